"""Passages of HTML pages, for an index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.demo.page_text import PageText, Paragraph, page_text
from stream2llm_sdk.errors import ConfigurationError

__all__ = ["passages"]

_BOUNDARIES = (re.compile(r"(?<=[.!?])\s+(?=[^a-z])"), re.compile(r"\n"), re.compile(r"\s+"))


def passages(pages: Mapping[str, str], *, min_words: int = 120, max_words: int = 200) -> list[Chunk]:
    """Cuts pages into passages.

    A passage begins with a line that names its page and its place there, holds whole paragraphs, and is closed at
    the first paragraph end from `min_words` on; it never has more than `max_words`. A paragraph that alone is
    longer is cut at sentence ends, if need be at line ends or between words. The last passage of a page may be
    short.

    Args:
        pages: URL to HTML.
        min_words: words from which on a passage may end.
        max_words: words that a passage has at most, its first line included.

    Returns:
        Chunks in page order: `source` is the URL with the fragment where the passage begins, `title` its first
        line, `metadata["page"]` the URL and `metadata["passage"]` the passage's number on its page, from 0.

    Raises:
        ConfigurationError: the limits cannot be met.
    """
    if not 1 <= min_words <= max_words or max_words < 20:
        raise ConfigurationError(
            f"min_words={min_words}, max_words={max_words}: give 1 <= min_words <= max_words and max_words >= 20"
        )
    return [chunk for url, html in pages.items() for chunk in _page_passages(url, html, min_words, max_words)]


def _page_passages(url: str, html: str, min_words: int, max_words: int) -> Iterator[Chunk]:
    page = page_text(html)
    # The title takes its words from the passage's budget; beside an endless one, half is left for the text.
    longest_title = max((_num_words(_title(page, p.anchor)) for p in page.paragraphs), default=0)
    title_words = min(longest_title, max_words // 2)
    bodies = _pack(page.paragraphs, min_words - title_words, max_words - title_words)
    for number, (anchor, body) in enumerate(bodies):
        title = " ".join(_title(page, anchor).split()[:title_words])
        yield Chunk(
            text=f"{title}\n{body}",
            source=f"{url}#{anchor}" if anchor else url,
            title=title,
            metadata={"page": url, "passage": number},
        )


def _title(page: PageText, anchor: str) -> str:
    """`contextlib: ExitStack.close` for the anchor `ExitStack-close` of the page `contextlib`."""
    place = anchor.strip("-").replace("-", ".")
    return f"{page.title}: {place}" if place else page.title


def _pack(paragraphs: tuple[Paragraph, ...], min_words: int, max_words: int) -> list[tuple[str, str]]:
    """Returns (anchor of the first paragraph, text) of each passage."""
    packed: list[list[Paragraph]] = []
    num_words = 0
    for paragraph in paragraphs:
        for text in _fitting(paragraph.text, max_words, _BOUNDARIES):
            added = _num_words(text)
            if not packed or num_words >= min_words or num_words + added > max_words:
                packed.append([])
                num_words = 0
            packed[-1].append(Paragraph(text.rstrip(), paragraph.anchor))
            num_words += added
    if len(packed) > 1 and sum(_num_words(paragraph.text) for paragraph in packed[-2]) + num_words <= max_words:
        tail = packed.pop()
        packed[-1] += tail
    return [(texts[0].anchor, "\n\n".join(text.text for text in texts)) for texts in packed]


def _fitting(text: str, max_words: int, boundaries: tuple[re.Pattern[str], ...]) -> list[str]:
    """Cuts `text` at the first kind of boundary, and at the next kind whatever is still too long. Joined, the
    pieces are the text."""
    if _num_words(text) <= max_words:
        return [text]
    ends = [match.end() for match in boundaries[0].finditer(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    fitting: list[str] = []
    current = ""
    for piece in pieces:
        if current and _num_words(current + piece) > max_words:
            fitting.append(current)
            current = ""
        if _num_words(piece) > max_words:
            *whole, current = _fitting(piece, max_words, boundaries[1:])
            fitting += whole
        else:
            current += piece
    return [*fitting, current]


def _num_words(text: str) -> int:
    return len(text.split())
