"""Pages that are known beforehand, from a folder or given, as title and text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["KnownPage", "pages_in_folder"]

_SUFFIXES = (".html", ".htm", ".xhtml")
_MAX_PAGE_BYTES = 8_000_000
_SILENT = ("script", "style", "template", "noscript", "nav", "header", "footer", "aside", "svg")


@dataclass(frozen=True, slots=True)
class KnownPage:
    """A page that a search can find.

    Attributes:
        url: where it is read.
        title: its name.
        text: what is searched.
    """

    url: str
    title: str
    text: str


def pages_in_folder(folder: str | os.PathLike[str], base_url: str) -> Iterator[KnownPage]:
    """The HTML pages below a folder, in the order of their paths. The page `a/b.html` has the URL `base_url/a/b.html`.

    Links to folders are followed, but no folder is read twice. Files that are no text, and files of more than 8 MB, are
    left out.

    Args:
        folder: where the pages are.
        base_url: the http(s) URL at which the folder is served.

    Raises:
        ConfigurationError: there is no such folder, or `base_url` is not http(s).
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigurationError(f"{str(root)!r} is not a folder")
    if not base_url.startswith(("http://", "https://")):
        raise ConfigurationError(f"base_url={base_url!r}: give the http(s) URL at which the folder is served")
    for path in _files(root):
        if path.stat().st_size <= _MAX_PAGE_BYTES and (page := _read(path)) is not None:
            relative = quote(path.relative_to(root).as_posix())
            yield KnownPage(f"{base_url.rstrip('/')}/{relative}", *page)


def _files(root: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders.sort()
        for name in sorted(names):
            if Path(name).suffix.lower() in _SUFFIXES and (path := Path(folder, name)).is_file():
                yield path


def _read(path: Path) -> tuple[str, str] | None:
    """Title and text of a page. Its main text is not looked for, which would take ten times as long."""
    from stream2llm_sdk.retrievers.web.html_tree import parse_html, read_head

    root: Any = parse_html(path.read_bytes().decode(errors="replace"))
    if root is None:
        return None
    title = read_head(root, "").title
    body = root.body if root.body is not None else root
    for element in list(body.iter(*_SILENT)):
        if element is not body:
            element.drop_tree()
    text = " ".join(" ".join(body.itertext()).split())
    return (title, text) if text else None
