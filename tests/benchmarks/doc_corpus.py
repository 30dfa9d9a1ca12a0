"""The documentation that Debian's packages install, as a corpus in FineWeb-Edu's schema, and questions for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hit_rate import questions

__all__ = ["doc_questions", "write_corpus"]

ROOTS = {
    "python": Path("/usr/share/doc/python3.11-doc/html"),
    "postgresql": Path("/usr/share/doc/postgresql-doc-15/html"),
    "git": Path("/usr/share/doc/git-doc"),
    "sqlite": Path("/usr/share/doc/sqlite3"),
    "apache": Path("/usr/share/doc/apache2-doc/manual/en"),
    "policy": Path("/usr/share/doc/debian-policy"),
    "reference": Path("/usr/share/debian-reference"),
}
_MAX_PAGE_BYTES, _LEAST_CHARACTERS = 1_500_000, 200


def _pages(limit: int | None) -> Iterator[dict[str, Any]]:
    """Pages as rows of FineWeb-Edu."""
    import lxml.html

    count = 0
    for name, root in ROOTS.items():
        for file in sorted(root.rglob("*.html*")):
            if not file.is_file() or file.suffix == ".gz" or file.stat().st_size > _MAX_PAGE_BYTES:
                continue
            page = lxml.html.fromstring(file.read_bytes())
            for element in page.xpath("//script|//style|//nav|//header|//footer"):
                element.drop_tree()
            text = page.text_content().strip()
            if len(text) < _LEAST_CHARACTERS:
                continue
            if count == limit:
                return
            count += 1
            path = f"{name}/{file.relative_to(root)}"
            yield {
                "text": text,
                "id": f"<urn:doc:{path}>",
                "dump": "debian-12",
                "url": f"http://docs/{path}",
                "file_path": str(file),
                "language": "en",
                "language_score": 1.0,
                "token_count": len(text) // 4,
                "score": 3.0,
                "int_score": 3,
                "title": " ".join((page.findtext(".//title") or file.stem).split()),
            }


def write_corpus(file: Path, *, limit: int | None = None) -> list[str]:
    """Writes the pages as Parquet and returns their titles.

    Raises:
        SystemExit: the documentation is not installed.
    """
    import pyarrow
    import pyarrow.parquet

    rows = list(_pages(limit))
    if not rows:
        raise SystemExit("install python3.11-doc, postgresql-doc-15, git-doc, apache2-doc, sqlite3-doc and the like")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return [row["title"] for row in rows]


def doc_questions(file: Path, titles: list[str], count: int) -> None:
    """Writes questions, one a line of JSON in its column `query`: those of the Python FAQ, then pages' titles."""
    asked = [text for text, _ in questions()]
    others = list(dict.fromkeys(f"What does the manual say about {title}?" for title in titles))
    step = max(1, len(others) // max(1, count - len(asked)))
    asked = [*asked, *others[::step]][:count]
    file.write_text("".join(json.dumps({"query": text}) + "\n" for text in asked), encoding="utf-8")
