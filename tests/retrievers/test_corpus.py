"""Corpora: every kind of file gives the same documents, and what cannot be one is named by file and row."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from stream2llm_sdk.errors import BadDocumentError, ConfigurationError
from stream2llm_sdk.retrievers.diskann.corpus import Corpus, CorpusColumns, open_corpus

# FineWeb-Edu's columns.
ROWS: list[dict[str, Any]] = [
    {
        "text": f"Text {row} about härte.\nSecond line.",
        "id": f"<urn:uuid:{row}>",
        "dump": "CC-MAIN-2024-10",
        "url": f"https://example.org/{row}",
        "file_path": "s3://x",
        "language": "en",
        "language_score": 0.5 + row / 100,
        "token_count": 7,
        "int_score": 3,
    }
    for row in range(25)
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """One of every kind, by the file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.split(".")[1]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
        return path
    if kind == "csv":
        plain = path.with_name("plain.tmp")
        with open(plain, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        raw = plain.read_bytes()
        plain.unlink()
    else:
        raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".zst":
        # Two frames, as tools that append write them.
        middle = raw.index(b"\n", len(raw) // 2) + 1
        raw = b"".join(pa.compress(part, "zstd", asbytes=True) for part in (raw[:middle], raw[middle:]))
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


KINDS = ["a.parquet", "a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.gz", "a.csv.zst"]


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    corpus = open_corpus(write(tmp_path / name))
    documents = list(corpus)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    assert [document.source for document in documents] == [row["url"] for row in ROWS]
    assert documents[3].metadata["id"] == ROWS[3]["id"]
    assert str(documents[3].metadata["language_score"]) == "0.53"
    assert corpus.bytes_read == corpus.size_bytes == (tmp_path / name).stat().st_size
    assert texts(corpus) == [row["text"] for row in ROWS]  # as often as it is iterated


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[10:20])
    write(tmp_path / "a" / "z.parquet", ROWS[:10])
    write(tmp_path / "c.csv.gz", ROWS[20:])
    (tmp_path / "notes.pdf").write_bytes(b"no corpus")
    (tmp_path / "d.md").write_text("# A page")
    corpus = open_corpus(tmp_path)
    documents = list(corpus)
    assert [document.text for document in documents] == [*(row["text"] for row in ROWS), "# A page"]
    assert documents[-1].source == "d.md"
    assert corpus.bytes_read == corpus.size_bytes


def test_a_datasets_stream_is_read(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet")
    corpus = open_corpus(f"hub:{tmp_path / 'data'}")
    assert texts(corpus) == [row["text"] for row in ROWS]
    assert texts(open_corpus(f"hub:{tmp_path / 'data'}::train", limit=4)) == [row["text"] for row in ROWS[:4]]
    with pytest.raises(ConfigurationError, match="cannot load it"):
        open_corpus(f"hub:{tmp_path / 'data'}::validation")
    with pytest.raises(ConfigurationError, match="give hub:NAME"):
        open_corpus("hub:")


def test_columns_are_chosen(tmp_path: Path) -> None:
    rows = [{"body": "text", "key": "k1", "name": "a title", "year": 2020, "rest": None, "url": "u"}]
    columns = CorpusColumns("body", "key", "name", kept=("year", "rest"))
    (document,) = open_corpus(write(tmp_path / "a.jsonl", rows), columns=columns)
    assert (document.text, document.source, document.title) == ("text", "k1", "a title")
    assert dict(document.metadata) == {"year": 2020}


def test_a_row_without_a_source_is_named_by_its_place(tmp_path: Path) -> None:
    (document,) = open_corpus(write(tmp_path / "a.jsonl", [{"text": "x"}]))
    assert document.source == "a.jsonl, line 1"


GOOD = b'{"text": "fine"}\n'
BAD_LINES = [
    (b'{"text": "cut', r"a.jsonl, line 2: not JSON"),
    (b'{"text": "\xff"}', r"a.jsonl, line 2: not UTF-8"),
    (b'{"body": "x", "id": 1}', r"a.jsonl, line 2: lacks the column 'text'; it has: 'body', 'id'"),
    (b'{"text": null}', r"a.jsonl, line 2: its 'text' is null"),
    (b'{"text": 5}', r"a.jsonl, line 2: its 'text' is a int"),
    (b'{"text": " "}', r"a.jsonl, line 2: its 'text' is blank"),
    (b"[1]", r"a.jsonl, line 2: a JSON list"),
    (b"[" * 100_000, r"a.jsonl, line 2: not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(BadDocumentError, match=message):
        list(open_corpus(path))
    corpus = open_corpus(path, skip_bad=True)
    assert texts(corpus) == ["fine", "fine"]
    assert corpus.num_skipped == 1


def test_a_bad_csv_row_is_named_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,id\n"two\nlines",1\nfine,2,3\nbad \xe9,4\n"open"x,5\nfine,6\n')
    corpus = open_corpus(path, skip_bad=True)
    assert texts(corpus) == ["two\nlines", "fine"]
    assert corpus.num_skipped == 3
    with pytest.raises(BadDocumentError, match="line 4: 1 fields more than the heading"):
        list(open_corpus(path))
    path.write_bytes(b"text\nbad \xe9\n")
    with pytest.raises(BadDocumentError, match="line 2: not UTF-8"):
        list(open_corpus(path))


def test_a_parquet_value_that_is_null_or_not_utf8_is_named_or_skipped(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", None, b"fine too"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    corpus = open_corpus(tmp_path / "a.parquet", skip_bad=True)
    assert texts(corpus) == ["fine", "fine too"]
    assert corpus.num_skipped == 2
    with pytest.raises(BadDocumentError, match=r"a.parquet, row 1: not UTF-8"):
        list(open_corpus(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_named_and_never_taken_for_its_end(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path / name)
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        del raw[-20:]
    else:
        raw[len(raw) // 3 : len(raw) // 3 + 20] = bytes(20)
    path.write_bytes(raw)
    with pytest.raises(ConfigurationError, match=name):
        list(open_corpus(path, skip_bad=False))


def test_a_corpus_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or folder"):
        open_corpus(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="no file that ends with"):
        open_corpus(tmp_path)
    (tmp_path / "a.doc").touch()
    with pytest.raises(ConfigurationError, match="kind is not known"):
        open_corpus(tmp_path / "a.doc")
    with pytest.raises(ConfigurationError, match="limit=0"):
        open_corpus(write(tmp_path / "a.jsonl"), limit=0)
