"""A prompt's history token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, Shown, block, legend
from stream2llm_sdk.display.theme import BLUE, INK, VERMILION

if TYPE_CHECKING:
    from stream2llm_sdk.prompt_history import PromptHistory
    from stream2llm_sdk.tokenizer import Tokenizer

__all__ = ["tokens_shown"]

_KEPT, _NEW, _VOID = (INK, 0.1), (BLUE, 0.45), (VERMILION, 0.4)
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})


def tokens_shown(history: PromptHistory, tokenizer: Tokenizer) -> Shown:
    """Each step's tokens in the order of the prompt: those that stay, those that are new, and, struck out, those that
    were taken out."""
    rows = Markup("").join(_row(history, number, tokenizer) for number in range(len(history)))
    meanings = [(*_KEPT, "stays, with its KV"), (*_NEW, "new")]
    if history.num_invalidated:
        meanings.append((*_VOID, "taken out, its KV void"))
    return Shown(str(block(rows, legend(meanings), title=history.prompt.question)))


def _row(history: PromptHistory, number: int, tokenizer: Tokenizer) -> Markup:
    step = history[number]
    void = history[number - 1].ids[step.lcp :] if number else ()
    tokens = Markup("").join(
        (
            _tokens(step.ids[: step.lcp], tokenizer, _KEPT),
            _tokens(void, tokenizer, _VOID, struck=True),
            _tokens(step.ids[step.lcp :], tokenizer, _NEW),
        )
    )
    row = Markup(
        "<div style='display:flex;margin:0.5em 0'><div style='flex:0 0 5.5em;font-weight:600'>{}</div>"
        "<div style='font-family:monospace;font-size:92%;line-height:1.75;overflow-wrap:anywhere'>{}</div></div>"
    )
    return row.format(step.name, tokens)


def _tokens(ids: Iterable[int], tokenizer: Tokenizer, colour: tuple[str, float], *, struck: bool = False) -> Markup:
    line = ";text-decoration:line-through" if struck else ""
    background = f"color-mix(in srgb, {colour[0]} {100 * colour[1]:g}%, transparent)"
    one = Markup(
        f"<span style='white-space:pre-wrap;background:{background};"
        f"padding:0.15em 0;margin-right:1px;border-radius:2px{line}' title='{{}}'>{{}}</span>"
    )
    # Each by itself: it is where tokens end that decides what two prompts have in common.
    return Markup("").join(one.format(token, tokenizer.decode([token]).translate(_VISIBLE)) for token in ids)
