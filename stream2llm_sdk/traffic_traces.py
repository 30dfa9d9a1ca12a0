"""Questions that were asked as traces, with their texts kept, hashed, or replaced by token counts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stream2llm_sdk.answer import ContextEnd
from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace
from stream2llm_sdk.context_log import AskedQuestion
from stream2llm_sdk.placement import DroppedChunk, Fitted
from stream2llm_sdk.plain_text import clean_text
from stream2llm_sdk.traces.checked_files import MAX_TEXT_CHARACTERS
from stream2llm_sdk.traces.json_values import json_text
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedFailure, TimedUpdate, Trace
from stream2llm_sdk.traffic_recording import KeptTexts

__all__ = ["TraceMaker"]

# A retrieval that ends this soon after its last update ends with it: a stream sends the two to the engine as one.
_TOGETHER_S = 0.03
_WITHHELD = "withheld"


class TraceMaker:
    """Makes traces of what was asked.

    Args:
        texts: what is kept.
        key: of digests.
        begun_s: the recording's begin on the monotonic clock.
        prefix: what the names of the traces begin with.
        tell: told about what must be left out of a trace, once for each trace.
    """

    def __init__(
        self, texts: KeptTexts, key: bytes, *, begun_s: float, prefix: str, tell: Callable[[str], object]
    ) -> None:
        self._texts = texts
        self._key = key
        self._begun_s = begun_s
        self._prefix = prefix
        self._tell = tell
        self._number = 0

    def trace(self, asked: AskedQuestion) -> Trace:
        """The next trace: what reached the prompt, and when.

        A chunk's number of tokens is what the prompt holds of it, label and separator included; the question's is what
        stands behind the context. `max_tokens` is how many tokens the answer had; None where none came.
        """
        self._number += 1
        name = f"{self._prefix}-{self._number:06d}"
        is_kept = self._texts is KeptTexts.KEEP
        return Trace(
            trace_id=name,
            query=_plain(asked.question) if is_kept else self._name_of("question", asked.question),
            updates=tuple(self._updates(asked, name)),
            arrival_s=max(0.0, asked.arrived_s - self._begun_s),
            num_query_tokens=len(asked.prompt.tail_ids),
            max_tokens=asked.num_output_tokens or None,
            tenant=_plain(asked.tenant) if is_kept else self._digest("tenant", asked.tenant),
            tag=asked.tag,
            failures=tuple(sorted(self._failures(asked), key=lambda failure: failure.offset_s)),
        )

    # ---- context ------------------------------------------------------------------------------------------------

    def _updates(self, asked: AskedQuestion, name: str) -> Iterator[TimedUpdate]:
        numbers = _Numbers(name)
        appends = asked.mode is ContextMode.APPEND
        last_s, last = -1.0, Append(()) if appends else Replace(())
        for last_s, last in self._appended(asked, numbers) if appends else self._replaced(asked, numbers):
            yield TimedUpdate(last_s, last)
        if last_s < 0 or asked.retrieved_s - last_s > _TOGETHER_S:
            yield TimedUpdate(max(last_s, asked.retrieved_s), Append(()) if appends else last)

    def _appended(self, asked: AskedQuestion, numbers: _Numbers) -> Iterator[tuple[float, Append | Replace]]:
        ((placed, dropped),) = asked.prompt.contents
        chunks, begin = [self._chunk(fitted, dropped, numbers) for fitted in placed], 0
        for offset_s, end in asked.log.appended:
            yield offset_s, Append(chunks[begin:end])
            begin = end

    def _replaced(self, asked: AskedQuestion, numbers: _Numbers) -> Iterator[tuple[float, Append | Replace]]:
        # Chunks that stay are the same objects mostly; both these and their ids live as long as the log does.
        made: dict[tuple[int, int], Chunk] = {}
        for offset_s, contents in asked.log.replaced:
            pool = []
            for fitted, dropped in ((fitted, dropped) for placed, dropped in contents for fitted in placed):
                key = (id(fitted.chunk), len(fitted.ids))
                if key not in made:
                    made[key] = self._chunk(fitted, dropped, numbers)
                pool.append(made[key])
            yield offset_s, Replace(pool)

    def _chunk(self, fitted: Fitted, dropped: Sequence[DroppedChunk], numbers: _Numbers) -> Chunk:
        num_tokens = len(fitted.ids)
        if self._texts is KeptTexts.KEEP:
            return self._kept(fitted.chunk, _share(fitted, dropped) if fitted.was_cut else 1.0, num_tokens)
        # Equal tokens, equal name: a chunk that was cut is another text than the whole one.
        if self._texts is KeptTexts.COUNT:
            source = numbers.name_of(fitted.ids)
        else:
            source = self._digest("chunk", array("I", fitted.ids).tobytes())
        return Chunk("", source, metadata={NUM_TOKENS: num_tokens})

    def _kept(self, chunk: Chunk, share: float, num_tokens: int) -> Chunk:
        text = chunk.text if share >= 1 else chunk.text[: round(len(chunk.text) * share)]
        metadata = {**self._json_of(chunk.metadata), NUM_TOKENS: num_tokens}
        return Chunk(_plain(text), _plain(chunk.source), _plain(chunk.title), _number_of(chunk.score), metadata)

    def _json_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What of metadata can be written and read back as it is."""
        if not metadata:
            return {}
        whole = dict(metadata)
        if json_text(whole) is not None:
            return whole
        kept = {name: value for name, value in whole.items() if isinstance(name, str) and json_text(value) is not None}
        left_out = ", ".join(repr(name) for name in whole if name not in kept)
        self._tell(f"metadata that is not JSON is left out of recorded traces: {left_out:.200}")
        return kept

    # ---- what else ----------------------------------------------------------------------------------------------

    def _failures(self, asked: AskedQuestion) -> Iterator[TimedFailure]:
        is_kept = self._texts is KeptTexts.KEEP
        for offset_s, failure in asked.log.failures:
            if is_kept:
                yield TimedFailure(offset_s, _plain(failure.source), _plain(failure.reason))
            else:
                yield TimedFailure(offset_s, self._name_of("source", failure.source) or _WITHHELD, _WITHHELD)
        if asked.context_end is not ContextEnd.RETRIEVED:
            yield TimedFailure(asked.retrieved_s, "retrieval", f"ended early: {asked.context_end.value}")
        if asked.error is not None:
            kind, message = asked.error
            reason = "cancelled" if kind == "CancelledError" else kind
            if is_kept and message:
                reason += f": {_plain(message)}"
            yield TimedFailure(asked.ended_s, "answer", reason)

    def _name_of(self, kind: str, text: str) -> str:
        return "" if self._texts is KeptTexts.COUNT else self._digest(kind, text)

    def _digest(self, kind: str, data: str | bytes) -> str:
        """A keyed digest; of nothing, nothing."""
        if not data:
            return ""
        content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        return hashlib.blake2b(content, digest_size=16, key=self._key, person=kind.encode()).hexdigest()


class _Numbers:
    """Names for the texts of one trace that say nothing but which of them are equal."""

    def __init__(self, trace_name: str) -> None:
        self._trace_name = trace_name
        self._numbers: dict[tuple[int, ...], int] = {}

    def name_of(self, ids: tuple[int, ...]) -> str:
        return f"{self._trace_name}/{self._numbers.setdefault(ids, len(self._numbers))}"


def _share(fitted: Fitted, dropped: Sequence[DroppedChunk]) -> float:
    """About how much of a chunk's text its tokens in the prompt are."""
    cuts = (drop for drop in dropped if drop.chunk is fitted.chunk and drop.kept_tokens)
    return next((cut.kept_tokens / (cut.kept_tokens + cut.num_tokens) for cut in cuts), 1.0)


def _plain(text: str) -> str:
    return clean_text(text)[:MAX_TEXT_CHARACTERS]


def _number_of(score: Any) -> float | None:
    try:
        return None if score is None else float(score)
    except (TypeError, ValueError, OverflowError):
        return None
