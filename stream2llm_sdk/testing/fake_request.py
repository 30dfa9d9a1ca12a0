"""One request of the engine without a model: its prompt, its counters and its answer."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.serving.lcp import TokenArray, longest_common_prefix, token_array
from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt
from stream2llm_sdk.trail import EventType

if TYPE_CHECKING:
    from stream2llm_sdk.testing.fake_engine import FakeEngine

__all__ = ["FakeRequest", "Operation"]

_WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that was sent for a request, and taken.

    Attributes:
        kind: 'open', 'append', 'replace', 'finish' or 'abort'.
        token_ids: what came with it.
    """

    kind: str
    token_ids: tuple[int, ...] = ()


class FakeRequest:
    """A request, made by `FakeEngine`; to its stream it is what vLLM's output collector is.

    Attributes:
        request_id: its name.
        sampling: its sampling parameters, as they were given.
        arrival_time: seconds since the epoch.
        operations: what was sent for it, in order.
        is_streaming_prompt, is_prompt_update: the request's flags.
        is_aborted: whether it was ended from outside.
    """

    def __init__(
        self,
        engine: FakeEngine,
        request_id: str,
        token_ids: list[int],
        sampling: Mapping[str, Any],
        flags: Mapping[str, Any],
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.sampling = dict(sampling)
        self.arrival_time = arrival_time
        self.operations = [Operation("open", tuple(token_ids))]
        self.is_aborted = False
        self._engine = engine
        self._trail = engine.recorder
        self._prompt = StreamingPrompt.from_flags(flags, token_array([]), 0.0)
        self._num_computed = 0
        self._computed_at_s = 0.0
        self._pieces: list[str] | None = None
        self._num_spoken = 0
        self._may_speak = asyncio.Event()
        self._trail.begin(request_id, flags.get("sent_s"))
        self._compute(token_array(token_ids), lcp=0)
        if not self._prompt.is_open:
            self._complete(flags.get("sent_s"))

    def __repr__(self) -> str:
        return f"<FakeRequest {self.request_id!r} {' '.join(operation.kind for operation in self.operations)}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt as it is now."""
        return tuple(self._prompt.token_ids.tolist())

    @property
    def is_streaming_prompt(self) -> bool:
        """Whether the prompt was opened to grow."""
        return self._prompt.is_streaming_prompt

    @property
    def is_streaming_prompt_finished(self) -> bool:
        """Whether the prompt is complete."""
        return not self._prompt.is_open

    @property
    def is_prompt_update(self) -> bool:
        """Whether updates replace the prompt (update mode) or only append to it."""
        return self._prompt.is_prompt_update

    # ---- the prompt ---------------------------------------------------------------------------------------------

    def update(self, kind: str, data: bytes, final: bool, sent_s: float) -> dict[str, Any]:
        """Changes the prompt, and says what that did as the engine's scheduler does.

        Args:
            kind: 'append' or 'replace'.
            data: token ids, little-endian int32.
            final: whether this completes the prompt.
            sent_s: when it was sent, on the monotonic clock.
        """
        if not self._prompt.is_open:
            return {"error": "finished"}
        given = token_array(data)
        self.operations.append(Operation("finish" if final else kind, tuple(given.tolist())))
        old = self._prompt.token_ids
        new = np.concatenate((old, given)) if kind == "append" else given
        lcp = longest_common_prefix(old, new)
        self._trail.mark(self.request_id, EventType.CHUNK_ARRIVED, sent_s, num_tokens=len(new) - lcp)
        self._rest()
        if final:
            self._prompt.is_streaming_prompt_finished = True
        num_invalidated = self._compute(new, lcp)
        self._prompt.num_updates += 1
        what = {"num_tokens": len(new), "lcp": lcp, "num_invalidated": num_invalidated}
        self._trail.mark(self.request_id, EventType.PROMPT_UPDATED, **what)
        if final:
            self._complete(sent_s)
        return what

    def _compute(self, new: TokenArray, lcp: int) -> int:
        """Takes the prompt's new tokens into work; the last one of an open prompt is held back."""
        keep = max(0, min(self._num_computed, lcp, len(new) - 1))
        num_invalidated = self._prompt.invalidated_from(keep, self._num_computed)
        self._prompt.token_ids = new
        self._num_computed = max(keep, len(new) - self._prompt.is_open)
        if num_new := self._num_computed - keep:
            self._prompt.computed(keep, num_new)
            self._trail.state(self.request_id, EventType.SCHEDULED)
        self._computed_at_s = self._engine.work(num_new)
        return num_invalidated

    def _rest(self) -> None:
        """Records that the last part was computed, which may have been a while ago."""
        if self._prompt.is_open and self._trail.current_state(self.request_id) is EventType.SCHEDULED:
            self._trail.state(self.request_id, EventType.KV_ON_GPU, self._computed_at_s)

    def _complete(self, sent_s: float | None) -> None:
        self._trail.mark(self.request_id, EventType.CONTEXT_COMPLETE, sent_s)
        self._may_speak.set()

    # ---- the answer ---------------------------------------------------------------------------------------------

    def get_nowait(self) -> None:
        """Outputs are made when they are waited for."""
        return

    async def get(self) -> Any:
        """The next output, in the shape of vLLM's `RequestOutput`.

        Raises:
            EngineDeadError: the engine died.
        """
        await self._may_speak.wait()
        if not self.is_aborted:
            await self._engine.turn(speaking=True)
        return _output("", (), "abort") if self.is_aborted else self._speak()

    def _speak(self) -> Any:
        if self._pieces is None:
            words = _WORD.findall(self._engine.answer_to(self.token_ids))
            self._pieces = words[: self.sampling["max_tokens"]] or [""]
            self._is_cut = len(words) > len(self._pieces)
            self._trail.state(self.request_id, EventType.SCHEDULED)
            self._trail.mark(self.request_id, EventType.FIRST_TOKEN)
        piece = self._pieces[self._num_spoken]
        self._num_spoken += 1
        ids = tuple(self._ids_of(piece))
        if self._num_spoken < len(self._pieces):
            self._prompt.computed(len(self._prompt.token_ids) + self._num_spoken - 1, 1)
            return _output(piece, ids, None)
        reason = "length" if self._is_cut else "stop"
        self.end(EventType.FINISHED, reason)
        return _output(piece, ids, reason)

    def _ids_of(self, piece: str) -> Iterator[int]:
        if piece:
            yield zlib.crc32(piece.encode()) % self._engine.vocabulary_size

    # ---- its end ------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends the request from outside; whoever waits for its output gets the end."""
        self.is_aborted = True
        self.operations.append(Operation("abort"))
        self.end(EventType.ABORTED, "abort")
        self._may_speak.set()

    def end(self, state: EventType, reason: str) -> None:
        """Ends in this `state`, for this `reason`."""
        self._rest()
        self._trail.end(self.request_id, state, reason=reason, **self._prompt.counters())
        self._engine.drop(self)

    def fail(self) -> None:
        """Whoever waits for output looks again, and finds the engine dead."""
        self._may_speak.set()

    def progress(self) -> dict[str, int]:
        """Counters as the engine's scheduler gives them. A part counts as computed once it is taken."""
        return {
            "num_tokens": len(self._prompt.token_ids) + self._num_spoken,
            "num_computed": self._num_computed,
            **self._prompt.counters(),
        }


def _output(text: str, token_ids: tuple[int, ...], finish_reason: str | None) -> Any:
    completion = SimpleNamespace(text=text, token_ids=token_ids, finish_reason=finish_reason, logprobs=None)
    return SimpleNamespace(outputs=[completion], finished=finish_reason is not None)
