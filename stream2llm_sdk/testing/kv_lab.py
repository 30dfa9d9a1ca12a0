"""One growing prompt on vLLM's real engine core, and what its KV blocks hold after each change.

No model runs: the KV memory is the simulator's, whose slots know of which tokens they hold the KV, and which ends the
step with an error where a request would read any other. So what is shown here is what the real scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.testing.core_driver import CoreDriver

__all__ = ["KVBlock", "KVLab", "KVSnapshot", "SlotState"]

_SCHEDULER = "stream2llm_sdk.serving.scheduler.Stream2LLMScheduler"
_REQUEST = "prompt"


class SlotState(StrEnum):
    """What one token's place in a KV block holds.

    Attributes:
        KEPT: KV that was there before the change, and is good after it.
        NEW: KV that was computed after the change.
        VOID: KV that was good before the change, and is not any more.
        WAITING: nothing yet: the last token of an open prompt is held back until more comes, or the prompt's end.
        FREE: nothing of this prompt.
    """

    KEPT = "kept"
    NEW = "new"
    VOID = "void"
    WAITING = "waiting"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class KVBlock:
    """A physical block of the KV cache, and what each of its slots holds.

    Attributes:
        block_id: its number in the cache.
        slots: one for each token that it has room for.
    """

    block_id: int
    slots: tuple[SlotState, ...]


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """What a change did to a prompt's KV.

    Attributes:
        before: the request's block table before the change, in the order of the prompt: what the change kept of it,
            and what it made void.
        after: the block table when the engine had nothing more to compute.
        num_tokens: the prompt's length after the change.
        num_steps: steps of the engine that it took.
    """

    before: tuple[KVBlock, ...]
    after: tuple[KVBlock, ...]
    num_tokens: int
    num_steps: int

    @property
    def num_kept(self) -> int:
        """Tokens whose KV was kept."""
        return _count(self.after, SlotState.KEPT)

    @property
    def num_new(self) -> int:
        """Tokens that were prefilled."""
        return _count(self.after, SlotState.NEW)

    @property
    def num_void(self) -> int:
        """Tokens that had been prefilled in vain."""
        return _count(self.before, SlotState.VOID)

    @property
    def num_held_back(self) -> int:
        """Tokens that are not computed until more of the prompt comes, or its end."""
        return self.num_tokens - self.num_kept - self.num_new

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.kv_view import snapshot_html

        return snapshot_html(self)


def _count(blocks: Sequence[KVBlock], state: SlotState) -> int:
    return sum(block.slots.count(state) for block in blocks)


class KVLab:
    """One prompt in an engine of its own. Use as a context manager, or call `close`.

    Args:
        model: a folder with a model's configuration; its weights are not needed.
        mode: whether the context appends or updates.
        block_size: tokens per KV block.
        max_model_len: of prompt and output.
        max_num_batched_tokens: the token budget of a step.

    Raises:
        ConfigurationError: the mode is none.
        MissingExtraError: vLLM is not installed.
    """

    def __init__(
        self,
        model: str | Path,
        mode: ContextMode | str,
        *,
        block_size: int = 16,
        max_model_len: int = 512,
        max_num_batched_tokens: int = 128,
    ) -> None:
        try:
            self._mode = ContextMode(mode)
        except ValueError:
            raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
        self._driver = CoreDriver(
            model,
            scheduler_cls=_SCHEDULER,
            prefix_caching=False,
            num_gpu_blocks=2 + 2 * -(-max_model_len // block_size),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            additional_config={"stream2llm": {"policy": "FCFS"}},
        )
        self._block_size = block_size
        self._num_tokens = 0

    def __enter__(self) -> KVLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, ids: Sequence[int], *, max_tokens: int = 8) -> KVSnapshot:
        """Sends the head of the prompt.

        Args:
            ids: its tokens.
            max_tokens: output tokens that `finish` will ask for.
        """
        flags = {
            "is_streaming_prompt": True,
            "is_streaming_prompt_finished": False,
            "is_prompt_update": self._mode is ContextMode.UPDATE,
        }
        content = self._content()
        self._driver.add(_REQUEST, ids, max_tokens=max_tokens, extra_args={"stream2llm": flags})
        self._num_tokens = len(ids)
        return self._settled((), content)

    def change(self, ids: Sequence[int], *, is_replace: bool) -> KVSnapshot:
        """Sends what a `PromptChange` says.

        Args:
            ids: tokens to put behind the others, or in place of all.
            is_replace: whether they are in place of all.

        Raises:
            ConfigurationError: the engine refuses the change.
        """
        table, num_had, content = self._table(), self._num_computed(), self._content()
        self._send(ids, "replace" if is_replace else "append", is_final=False)
        self._num_tokens = len(ids) if is_replace else self._num_tokens + len(ids)
        num_kept = self._num_computed()
        before = self._blocks(
            table,
            lambda block, slot, position: (
                SlotState.KEPT if position < num_kept else SlotState.VOID if position < num_had else SlotState.FREE
            ),
        )
        return self._settled(before, content)

    def finish(self, tail_ids: Sequence[int]) -> list[int]:
        """Completes the prompt, and returns what is sampled: made-up tokens, each of which depends on all before it.

        Raises:
            ConfigurationError: the engine refuses the tokens.
        """
        self._send(tail_ids, "append", is_final=True)
        self._driver.run_until_idle()
        return list(self._driver.outputs[_REQUEST])

    def expected_output(self, prompt_ids: Sequence[int], num_tokens: int = 8) -> list[int]:
        """What `finish` returns of a correct engine that was sent the whole prompt at once.

        Args:
            prompt_ids: the whole prompt.
            num_tokens: output tokens.
        """
        return self._driver.expected_output(prompt_ids, num_tokens)

    def close(self) -> None:
        """Shuts the engine down. Idempotent."""
        self._driver.close()

    def _send(self, ids: Sequence[int], kind: str, *, is_final: bool) -> None:
        packed = np.array(ids, dtype=np.int32).tobytes()
        answer = self._driver.call("update", [_REQUEST, kind, packed, is_final, self._driver.scheduler.now_s()])
        if "error" in answer:
            raise ConfigurationError(f"the engine refused to {kind} {len(ids)} tokens: {answer['error']}")

    def _settled(self, before: tuple[KVBlock, ...], content: npt.NDArray[np.uint64]) -> KVSnapshot:
        """Steps until nothing is left to do, and compares with the memory's content before."""
        num_steps = self._driver.run_until_idle()
        num_computed, unchanged = self._num_computed(), self._content() == content

        def state(block: int, slot: int, position: int) -> SlotState:
            if position >= num_computed:
                return SlotState.WAITING if position < self._num_tokens else SlotState.FREE
            return SlotState.KEPT if unchanged[block, slot] else SlotState.NEW

        return KVSnapshot(before, self._blocks(self._table(), state), self._num_tokens, num_steps)

    def _blocks(self, table: Sequence[int], state: Callable[[int, int, int], SlotState]) -> tuple[KVBlock, ...]:
        size = self._block_size
        return tuple(
            KVBlock(block, tuple(state(block, slot, index * size + slot) for slot in range(size)))
            for index, block in enumerate(table)
        )

    def _content(self) -> npt.NDArray[np.uint64]:
        memory = self._driver.executor.memory
        content: npt.NDArray[np.uint64] = memory.read_blocks(range(memory.num_blocks))
        return content

    def _table(self) -> list[int]:
        return list(self._driver.scheduler.kv_cache_manager.get_block_ids(_REQUEST)[0])

    def _num_computed(self) -> int:
        return int(self._driver.scheduler.requests[_REQUEST].num_computed_tokens)
