"""What a question gets back: pieces of text while the model speaks, then the answer with all that led to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from stream2llm_sdk.context import Chunk, SourceFailure, shortened
from stream2llm_sdk.placement import DroppedChunk
from stream2llm_sdk.trail import EventTrail

__all__ = ["Answer", "AnswerPiece", "ContextEnd", "Source", "Timings", "TokenCounts"]


class ContextEnd(StrEnum):
    """Why the context was complete.

    Attributes:
        RETRIEVED: the retrieval ended by itself.
        DEADLINE: `deadline_s` was over.
        FULL: an appended context has reached `max_context_tokens`.
        ASKED: somebody called `answer_now`.
    """

    RETRIEVED = "retrieved"
    DEADLINE = "deadline"
    FULL = "full"
    ASKED = "asked"


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of an answer, as it is made.

    Attributes:
        text: new text.
        token_ids: its tokens.
    """

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A chunk that the model read, and its place in the prompt.

    Attributes:
        chunk: the chunk.
        retriever: the name of the retriever that it came from.
        start, end: its tokens in the prompt, `end` excluded.
        was_cut: whether only its beginning fitted.
    """

    chunk: Chunk
    retriever: str
    start: int
    end: int
    was_cut: bool

    @property
    def source(self) -> str:
        """Where the chunk comes from: a URL or a document id."""
        return self.chunk.source

    @property
    def title(self) -> str:
        """The chunk's short name for people."""
        return self.chunk.title

    @property
    def num_tokens(self) -> int:
        """How many tokens of it are in the prompt."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, on the application's clock, from the moment the question was asked.

    Attributes:
        first_context_s: until the first context came; None if none did.
        retrieval_s: until the retrieval ended (by itself, by a deadline, or because nothing more fitted).
        context_complete_s: until the engine was sent the end of the prompt.
        first_token_s: until the first token of the answer: the TTFT that a person waits.
        total_s: until the answer was complete.
    """

    first_context_s: float | None
    retrieval_s: float
    context_complete_s: float
    first_token_s: float | None
    total_s: float

    @property
    def ttft_from_request_s(self) -> float | None:
        """The TTFT that a person waits: from the question to the first token; None if there was none."""
        return self.first_token_s

    @property
    def ttft_from_context_complete_s(self) -> float | None:
        """From the end of the retrieval to the first token: the published definition of TTFT, with retrieval excluded.
        None if there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.retrieval_s


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one answer.

    Attributes:
        prompt: the final prompt's length.
        output: the answer's.
        prefilled: prompt tokens run through the model, again and again if they had to be.
        recomputed: those of them that were computed again after a preemption.
        invalidated: computed tokens that a changed context made void.
        cached: tokens found in the prefix cache.
    """

    prompt: int
    output: int
    prefilled: int
    recomputed: int
    invalidated: int
    cached: int


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """A complete answer. As a str it is its text; its repr is one line.

    Attributes:
        question: what was asked.
        text: what the model said.
        token_ids: the same as token ids.
        finish_reason: 'stop' (the model ended), 'length' (the budget did), 'abort' or 'error'.
        sources: the chunks in the prompt, in the prompt's order.
        dropped: chunks that were cut or left out, each with the budget that did it.
        failures: sources that could not be used, and retrievers that failed.
        context_end: why the context was complete.
        timings: how long everything took.
        tokens: token counts.
        trail: the request's events in the engine.
    """

    question: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    sources: tuple[Source, ...]
    dropped: tuple[DroppedChunk, ...]
    failures: tuple[SourceFailure, ...]
    context_end: ContextEnd
    timings: Timings
    tokens: TokenCounts
    trail: EventTrail

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        timings = self.timings
        times = {
            "retrieval": timings.retrieval_s,
            "first token": timings.first_token_s,
            "total": timings.total_s,
        }
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in times.items() if value is not None)
        num_sources = f"{len(self.sources)} source{'' if len(self.sources) == 1 else 's'}"
        return f"<Answer to {shortened(self.question)}: {shortened(self.text)}, {num_sources}, {seconds}>"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "question": self.question,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "context_end": self.context_end.value,
            "sources": [
                {
                    "source": source.source,
                    "title": source.title,
                    "retriever": source.retriever,
                    "start": source.start,
                    "end": source.end,
                    "was_cut": source.was_cut,
                }
                for source in self.sources
            ],
            "dropped": [
                {
                    "source": dropped.chunk.source,
                    "title": dropped.chunk.title,
                    "reason": dropped.reason.value,
                    "num_tokens": dropped.num_tokens,
                    "kept_tokens": dropped.kept_tokens,
                }
                for dropped in self.dropped
            ],
            "failures": [asdict(failure) for failure in self.failures],
            "timings": {
                **asdict(self.timings),
                "ttft_from_request_s": self.timings.ttft_from_request_s,
                "ttft_from_context_complete_s": self.timings.ttft_from_context_complete_s,
            },
            "tokens": asdict(self.tokens),
            "trail": self.trail.rows(),
        }

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.answer_view import answer_html

        return answer_html(self)
