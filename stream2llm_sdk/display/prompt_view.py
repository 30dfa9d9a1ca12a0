"""A prompt as a strip of tokens, and the strips of its history one below the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, block, facts, legend, link, note, table
from stream2llm_sdk.display.svg import Svg
from stream2llm_sdk.display.theme import INK, KEPT, NEW, VOID, Fill

if TYPE_CHECKING:
    from stream2llm_sdk.growing_prompt import Prompt
    from stream2llm_sdk.placement import Placement
    from stream2llm_sdk.prompt_history import PromptHistory, PromptStep

__all__ = ["history_html", "prompt_html"]

_LEFT, _WIDTH, _RIGHT_TEXT = 70.0, 770.0, 190.0
_ROW, _BAR = 44.0, 16.0
_HEAD = Fill(INK, 0.4)
_LETTER_PX = 6.4


def prompt_html(prompt: Prompt) -> str:
    """Head, chunks and question of a prompt, and a table of its chunks."""
    num_tokens = len(prompt.final_ids)
    svg = Svg(_WIDTH, 46, f"A prompt of {num_tokens:,} tokens")
    scale = (_WIDTH - 2) / max(1, num_tokens)
    head, tail = len(prompt.head_ids), len(prompt.tail_ids)
    svg.rect(1, 4, scale * head, _BAR, _HEAD, f"head: {head:,} tokens")
    svg.rect(1 + scale * (num_tokens - tail), 4, scale * tail, _BAR, _HEAD, f"question: {tail:,} tokens")
    for place in prompt.placements:
        svg.rect(1 + scale * place.start, 4, scale * (place.end - place.start), _BAR, NEW, _tip(place))
    _draw_borders(svg, prompt.placements, scale, 1, 4)
    _draw_names(svg, prompt.placements, scale, 1, 36)
    rows = [
        (number, link(place.chunk.source, place.chunk.title), place.start, place.end, place.end - place.start)
        for number, place in enumerate(prompt.placements, start=1)
    ]
    named = (("tokens", num_tokens), ("head", head), ("context", prompt.num_context_tokens), ("question", tail))
    chunks = table(("", "chunk", "first token", "end", "tokens"), rows) if rows else note("no context yet")
    return str(block(facts((*named, ("room", prompt.room_tokens))), svg.markup(), chunks, title=prompt.question))


def history_html(history: PromptHistory) -> str:
    """A strip for each step: what stays, what is new, and what became void of the step before."""
    longest = max(max(len(step.ids), step.num_before) for step in history)
    svg = Svg(_WIDTH, 8 + _ROW * len(history), f"{len(history):,} steps of a prompt of up to {longest:,} tokens")
    scale = (_WIDTH - _LEFT - _RIGHT_TEXT) / max(1, longest)
    for number, (before, step) in enumerate(itertools.pairwise([None, *history])):
        if step is not None:
            _draw_step(svg, number, before, step, scale)
    figures = facts(
        (
            ("tokens of the prompt", len(history[-1].ids)),
            ("prefilled in all", history.num_prefilled),
            ("of these in vain", history.num_invalidated),
        )
    )
    return str(block(figures, svg.markup(), _legend(history), title=history.prompt.question))


def _draw_step(svg: Svg, number: int, before: PromptStep | None, step: PromptStep, scale: float) -> None:
    top = 6 + _ROW * number
    svg.text(_LEFT - 8, top + 12, step.name, anchor="end")
    svg.rect(_LEFT, top, scale * step.lcp, _BAR, KEPT, f"{step.lcp:,} tokens stay, and so does their KV")
    start, end = _LEFT + scale * step.lcp, _LEFT + scale * len(step.ids)
    svg.rect(start, top, end - start, _BAR, NEW, f"{step.num_new:,} tokens are prefilled")
    _draw_borders(svg, step.placements, scale, _LEFT, top)
    _draw_names(svg, step.placements, scale, _LEFT, top + _BAR + 15)
    if step.num_invalidated:
        width = scale * step.num_invalidated
        svg.rect(start, top + _BAR + 1, width, 3, VOID, f"{step.num_invalidated:,} computed tokens became void")
    if before is not None:
        svg.line(start, top - 3, start, top + _BAR + 5, Fill(INK), width=1.5)
        void = f", {step.num_invalidated:,} void" if step.num_invalidated else ""
        svg.text(_WIDTH - _RIGHT_TEXT + 10, top + 12, f"LCP {step.lcp:,}, {step.num_new:,} new{void}")


def _draw_borders(svg: Svg, placements: Sequence[Placement], scale: float, left: float, top: float) -> None:
    for place in placements:
        for token in (place.start, place.end):
            x = left + scale * token
            svg.line(x, top, x, top + _BAR, Fill(INK, 0.7))


def _draw_names(svg: Svg, placements: Sequence[Placement], scale: float, left: float, y: float) -> None:
    for place in placements:
        name = _fitting(place.chunk.title or place.chunk.source, scale * (place.end - place.start) - 4)
        if name:
            svg.text(left + scale * place.start + 3, y, name, size=11, opacity=0.8)


def _fitting(name: str, width: float) -> str:
    letters = int(width / _LETTER_PX)
    if len(name) <= letters:
        return name
    return f"{name[: letters - 1]}…" if letters >= 2 else ""


def _tip(place: Placement) -> str:
    cut = ", cut" if place.was_cut else ""
    return f"{place.chunk.title or place.chunk.source}: tokens {place.start:,} to {place.end:,}{cut}"


def _legend(history: PromptHistory) -> Markup:
    colours = [(KEPT, "as before: its KV is kept"), (NEW, "to be prefilled")]
    if history.num_invalidated:
        colours.append((VOID, "prefilled before, now void"))
    return legend((fill.colour, fill.opacity, meaning) for fill, meaning in colours)
