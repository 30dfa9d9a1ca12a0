"""An answer with all that led to it: its text, its times, what happened in the engine, and what the model read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, bar, block, facts, fold, link, note, paragraph, seconds, table
from stream2llm_sdk.display.theme import BLUE
from stream2llm_sdk.display.trail_view import trail_picture

if TYPE_CHECKING:
    from stream2llm_sdk.answer import Answer

__all__ = ["answer_html"]

_ENDS = {
    "retrieved": "it ended",
    "deadline": "the deadline came",
    "full": "nothing more fitted",
    "asked": "it was asked to end",
}
_FINISHES = {"length": "the answer ends at its budget of tokens", "abort": "the answer was aborted"}


def answer_html(answer: Answer) -> str:
    """The answer as HTML."""
    finish = _FINISHES.get(answer.finish_reason, "" if answer.finish_reason == "stop" else answer.finish_reason)
    parts = [
        paragraph(answer.text),
        note(finish) if finish else "",
        facts(_figures(answer)),
        trail_picture(answer.trail) if answer.trail else "",
        _sources(answer),
        *_left_out(answer),
    ]
    return str(block(*parts, title=answer.question))


def _figures(answer: Answer) -> Iterator[tuple[str, object]]:
    timings, tokens = answer.timings, answer.tokens
    yield "first token, from the question", seconds(timings.ttft_from_request_s)
    yield "first token, from the complete context", seconds(timings.ttft_from_context_complete_s)
    yield (
        f"retrieval, until {_ENDS.get(answer.context_end.value, answer.context_end.value)}",
        seconds(timings.retrieval_s),
    )
    yield "complete answer", seconds(timings.total_s)
    yield "prompt tokens", tokens.prompt
    yield "prefilled", tokens.prefilled
    for name, count in (
        ("from the prefix cache", tokens.cached),
        ("made void by updates", tokens.invalidated),
        ("computed again", tokens.recomputed),
    ):
        if count:
            yield name, count
    yield "answer tokens", tokens.output


def _sources(answer: Answer) -> Markup:
    if not answer.sources:
        return note("the model read no sources")
    rows = [
        (
            number,
            link(source.source, source.title),
            source.retriever,
            source.num_tokens,
            bar(source.num_tokens / max(1, answer.tokens.prompt), BLUE),
            "cut" if source.was_cut else "",
        )
        for number, source in enumerate(answer.sources, start=1)
    ]
    return table(("", "source", "retriever", "tokens", "share of the prompt", ""), rows)


def _left_out(answer: Answer) -> Iterator[Markup]:
    if answer.dropped:
        rows = [
            (link(each.chunk.source, each.chunk.title), each.num_tokens, each.kept_tokens, each.reason.value)
            for each in answer.dropped
        ]
        yield fold(
            f"{len(rows):,} cut or left out", table(("source", "tokens left out", "tokens kept", "budget"), rows)
        )
    if answer.failures:
        failures = [(each.source, each.reason) for each in answer.failures]
        yield fold(f"{len(failures):,} could not be retrieved", table(("source", "why"), failures))
