"""Pieces of HTML. Whatever is put into them is escaped, unless it is `Markup` already."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

__all__ = [
    "Markup",
    "Shown",
    "bar",
    "block",
    "facts",
    "fold",
    "legend",
    "link",
    "note",
    "paragraph",
    "seconds",
    "table",
]

_NO_CHARACTER = re.compile("[\0\ud800-\udfff]")
_LINE = "1px solid color-mix(in srgb, currentColor 25%, transparent)"
_CELL = "padding:0.2em 0.7em;vertical-align:top"
_NOTE = "opacity:0.72;font-size:92%"


@dataclass(frozen=True, slots=True)
class Shown:
    """HTML that shows itself in a notebook."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def block(*parts: object, title: object = "") -> Markup:
    """Parts one below the other, in the page's own font and colour."""
    head = Markup("<div style='font-weight:600;margin-bottom:0.4em'>{}</div>").format(title) if title else ""
    # Everything that is shown comes through here: HTML cannot hold what is replaced.
    inner = Markup(_NO_CHARACTER.sub("\ufffd", Markup("").join(escape(part) for part in (head, *parts))))
    return Markup("<div style='margin:0.4em 0;max-width:60em;line-height:1.45'>{}</div>").format(inner)


def paragraph(text: object) -> Markup:
    """A paragraph whose line ends are kept."""
    return Markup("<div style='margin:0.3em 0 0.7em;white-space:pre-wrap;overflow-wrap:anywhere'>{}</div>").format(text)


def note(text: object) -> Markup:
    """A remark in a quieter tone."""
    return Markup(f"<div style='margin:0.3em 0;{_NOTE}'>{{}}</div>").format(text)


def facts(named: Iterable[tuple[object, object]]) -> Markup:
    """Figures with their names, side by side: `(name, figure)` each."""
    one = Markup(f"<div><div style='{_NOTE}'>{{}}</div><div style='font-weight:600'>{{}}</div></div>")
    inner = Markup("").join(one.format(name, _shown(value)) for name, value in named)
    return Markup("<div style='display:flex;flex-wrap:wrap;gap:0.5em 2em;margin:0.5em 0'>{}</div>").format(inner)


def table(
    headings: Sequence[object], rows: Iterable[Sequence[object]], *, caption: object = "", right: Collection[int] = ()
) -> Markup:
    """A table. Numbers stand on the right, whole ones with thousands apart; None is a dash.

    Args:
        headings: of the columns.
        rows: as many cells each.
        caption: above it.
        right: columns, from 0, whose texts stand on the right too.
    """
    rows = [tuple(row) for row in rows]
    is_number = [
        column in right
        or (
            any(_is_number(row[column]) for row in rows)
            and all(row[column] is None or _is_number(row[column]) for row in rows)
        )
        for column in range(len(headings))
    ]
    head = Markup("").join(
        Markup(f"<th style='{_CELL};text-align:{_side(right)};border-bottom:{_LINE}'>{{}}</th>").format(heading)
        for heading, right in zip(headings, is_number, strict=True)
    )
    body = Markup("").join(_row(row, is_number) for row in rows)
    above = Markup("<caption style='text-align:left;font-weight:600'>{}</caption>").format(caption) if caption else ""
    whole = Markup(
        "<div style='overflow-x:auto'><table style='border-collapse:collapse;margin:0.4em 0'>"
        "{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    )
    return whole.format(above, head, body)


def _row(row: Sequence[object], is_number: Sequence[bool]) -> Markup:
    cells = (
        Markup(f"<td style='{_CELL};text-align:{_side(right)}'>{{}}</td>").format(_shown(value))
        for value, right in zip(row, is_number, strict=True)
    )
    return Markup("<tr>{}</tr>").format(Markup("").join(cells))


def fold(summary: object, *parts: object) -> Markup:
    """Parts that are seen when the summary is clicked."""
    inner = Markup("").join(escape(part) for part in parts)
    return Markup("<details style='margin:0.4em 0'><summary style='cursor:pointer'>{}</summary>{}</details>").format(
        summary, inner
    )


def bar(share: float, colour: str, *, opacity: float = 1.0) -> Markup:
    """A bar, as long as a share of its place; it stands in a cell of a table."""
    percent = 100 * min(1.0, max(0.0, share))
    return Markup(
        "<div style='width:8em;height:0.7em;margin-top:0.35em;"
        "background:color-mix(in srgb, currentColor 10%, transparent)'>"
        "<div style='width:{:.1f}%;height:100%;background:{};opacity:{:g}'></div></div>"
    ).format(percent, colour, opacity)


def legend(entries: Iterable[tuple[str, float, object]]) -> Markup:
    """What colours mean: `(colour, opacity, meaning)` each."""
    one = Markup(
        "<span style='margin-right:1.6em;white-space:nowrap'><span style='display:inline-block;width:1.2em;"
        "height:0.7em;margin-right:0.5em;background:{};opacity:{:g}'></span>{}</span>"
    )
    return Markup("<div>{}</div>").format(Markup("").join(one.format(*entry) for entry in entries))


def link(address: str, text: object = "") -> Markup:
    """A link to a page of the web; of any other address just the text."""
    if not address.startswith(("http://", "https://")):
        return escape(text or address)
    return Markup("<a href='{}' target='_blank' rel='noopener noreferrer'>{}</a>").format(address, text or address)


def seconds(value: float | None) -> str:
    """A time for people: `1.23 s`, `45.6 ms`, `120 µs`; a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 0.9995 or value == 0:
        return f"{value:,.1f} s" if size >= 100 else f"{value:.2f} s"
    return f"{1e3 * value:.3g} ms" if size >= 0.9995e-3 else f"{1e6 * value:.3g} µs"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: object) -> object:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return value


def _side(right: bool) -> str:
    return "right" if right else "left"
