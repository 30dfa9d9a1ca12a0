"""The passages of a page that matter for a question, within a number of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stream2llm_sdk.retrievers.lexical import bm25_scores, terms

__all__ = ["Passage", "estimate_tokens", "select_passages", "split_passages"]

TokenCount = Callable[[str], int]

_TOKEN = re.compile(r"[A-Za-z]{1,6}|[0-9]{1,3}|_{1,3}|[^\s]|\n")
_HEADING = re.compile(r"(#{1,6})\s+\S")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_PASSAGE_TOKENS = 120
_NEIGHBOUR = 0.4
_LEAST = 0.1
_GAP = "[…]"


def estimate_tokens(text: str) -> int:
    """About as many tokens as a model's tokenizer makes of `text`, without one.

    One token for every six ASCII letters of a word begun, for every three digits, for a mark, a line break, and a
    letter outside of ASCII. On documentation pages that was 2 to 10 % more than Llama 2's tokenizer makes in English
    and German, 10 to 20 % more in French, 12 % less in Japanese.
    """
    return len(_TOKEN.findall(text))


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive blocks under one heading. `headings` are the lines of the headings above it, outermost first."""

    text: str
    headings: tuple[str, ...]
    num_tokens: int


def split_passages(
    markdown: str, *, max_tokens: int = _PASSAGE_TOKENS, count_tokens: TokenCount = estimate_tokens
) -> list[Passage]:
    """Cuts Markdown into passages of about `max_tokens`: at headings, else between blocks, else between lines, and a
    line that alone is longer between words. A code block that is cut is fenced in each passage."""
    passages: list[Passage] = []
    headings: list[tuple[int, str]] = []
    blocks: list[str] = []
    size = 0

    def finish() -> None:
        nonlocal size
        if blocks:
            lines = tuple(line for _, line in headings)
            passages.append(Passage("\n\n".join(blocks), lines, size))
            blocks.clear()
            size = 0

    for block in _blocks(markdown):
        match = _HEADING.match(block)
        if match and "\n" not in block:
            finish()
            level = len(match[1])
            headings = [(above, line) for above, line in headings if above < level] + [(level, block)]
            continue
        for part in _parts(block, max_tokens, count_tokens):
            num_tokens = count_tokens(part)
            if size and size + num_tokens > max_tokens:
                finish()
            blocks.append(part)
            size += num_tokens
    finish()
    return passages


def select_passages(
    markdown: str,
    query: str,
    max_tokens: int | None,
    *,
    count_tokens: TokenCount = estimate_tokens,
) -> str:
    """The part of a page that matters for `query`, at most `max_tokens`.

    Passages are ranked by BM25 (Lucene's variant, over the passage and the headings above it), a passage beside a
    good one by a share of its neighbour's score, and taken in that order while they fit; those far below the best are
    left out. They stay in the page's order under their headings, with `[…]` where something is left out between them.
    A page that fits is left as it is; where nothing matches the question, or there is none, its beginning is taken.
    """
    if max_tokens is None or count_tokens(markdown) <= max_tokens:
        return markdown
    passage_tokens = min(_PASSAGE_TOKENS, max(max_tokens // 3, 8))
    passages = split_passages(markdown, max_tokens=passage_tokens, count_tokens=count_tokens)
    ranks = _ranks(passages, query)
    order = sorted((i for i, rank in enumerate(ranks) if rank), key=lambda i: (-ranks[i], i))
    chosen: set[int] = set()
    room = max_tokens
    for i in order or range(len(passages)):
        cost = _cost(passages, chosen, i, count_tokens)
        if cost <= room:
            chosen.add(i)
            room -= cost
        elif not order:
            break
    return _joined(passages, sorted(chosen)) or _start(passages, max_tokens, count_tokens)


def _ranks(passages: Sequence[Passage], query: str) -> list[float]:
    """How much each passage matters; 0 for those to leave out."""
    texts = [terms(" ".join((*passage.headings, passage.text))) for passage in passages]
    scores = bm25_scores(texts, terms(query))
    best = max(scores, default=0.0)
    padded = [0.0, *scores, 0.0]
    ranks = (max(score, _NEIGHBOUR * max(padded[i], padded[i + 2])) for i, score in enumerate(scores))
    return [rank if rank >= _LEAST * best else 0.0 for rank in ranks]


def _cost(passages: Sequence[Passage], chosen: set[int], i: int, count_tokens: TokenCount) -> int:
    """Tokens that passage `i` adds to the chosen ones; headings that a neighbour shows already are counted again, so
    the sum is never too low."""
    shown = passages[i - 1].headings if i - 1 in chosen else ()
    new = [line for line in passages[i].headings if line not in shown]
    return passages[i].num_tokens + sum(count_tokens(line) + 2 for line in new) + 2 + count_tokens(_GAP) + 2


def _joined(passages: Sequence[Passage], chosen: Sequence[int]) -> str:
    parts: list[str] = []
    shown: tuple[str, ...] = ()
    last = -1
    for i in chosen:
        if parts and i != last + 1:
            parts.append(_GAP)
        headings = passages[i].headings
        common = next((n for n, (a, b) in enumerate(zip(headings, shown, strict=False)) if a != b), None)
        parts += headings[len(shown) if common is None else common :]
        parts.append(passages[i].text)
        shown, last = headings, i
    return "\n\n".join(parts)


def _start(passages: Sequence[Passage], max_tokens: int, count_tokens: TokenCount) -> str:
    """The beginning of the first passage, where headings alone take all the room."""
    words = passages[0].text.split(" ") if passages else []
    while words and count_tokens(" ".join(words)) > max_tokens:
        del words[-max(len(words) // 8, 1) :]
    return " ".join(words)


def _blocks(markdown: str) -> Iterator[str]:
    """What blank lines separate; a code block is one block, and so is each heading."""
    lines: list[str] = []
    fence = ""
    for line in markdown.split("\n"):
        mark = _FENCE.match(line)
        if mark:
            if not fence:
                fence = mark[1]
            elif line.strip().startswith(fence):
                fence = ""
        is_heading = not fence and _HEADING.match(line) is not None
        if (is_heading or (not fence and not line.strip())) and lines:
            yield "\n".join(lines)
            lines = []
        if is_heading:
            yield line
        elif line.strip() or fence:
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def _parts(block: str, max_tokens: int, count_tokens: TokenCount) -> Iterator[str]:
    if count_tokens(block) <= max_tokens:
        yield block
        return
    lines = block.split("\n")
    mark = _FENCE.match(lines[0])
    opening = closing = ""
    if mark and len(lines) > 2:
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
        opening, closing = lines[0] + "\n", "\n" + indent + mark[1]
        lines = lines[1:-1] if lines[-1].strip().startswith(mark[1]) else lines[1:]
    room = max(max_tokens - 8, 8) if mark else max_tokens
    for group in _groups((piece for line in lines for piece in _pieces(line, room, count_tokens)), room, count_tokens):
        yield opening + group + closing


def _groups(pieces: Iterator[str], max_tokens: int, count_tokens: TokenCount) -> Iterator[str]:
    group: list[str] = []
    size = 0
    for piece in pieces:
        num_tokens = count_tokens(piece) + 1
        if group and size + num_tokens > max_tokens:
            yield "\n".join(group)
            group, size = [], 0
        group.append(piece)
        size += num_tokens
    if group:
        yield "\n".join(group)


def _pieces(line: str, max_tokens: int, count_tokens: TokenCount) -> Iterator[str]:
    """A line, cut between words, and inside those that are longer than any passage, where it is too long."""
    start, longest = 0, max_tokens * 8
    while start < len(line):
        end = min(len(line), start + longest)
        while end - start > 1 and (num_tokens := count_tokens(line[start:end])) > max_tokens:
            end = start + max((end - start) * max_tokens // num_tokens, 1)
        space = line.rfind(" ", start + 1, end) if end < len(line) else -1
        end = space if space > (start + end) // 2 else end
        yield line[start:end]
        start = end + (line[end : end + 1] == " ")
