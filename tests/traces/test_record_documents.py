"""The file of a recording's documents: each once, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.recording.documents import DocumentFile


def chunk(text: str, score: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    return {"text": text, "source": "s", "title": "", "score": score, "metadata": None, **fields}


CHUNKS = [chunk("one"), chunk("two", None), chunk("half \ud800 of a pair"), chunk("one", metadata='{"page": 1}')]


def test_a_document_stands_once_however_often_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    with DocumentFile(file) as documents:
        refs = documents.refs(CHUNKS)
        assert refs == [[0, 0.5], [1, None], [2, 0.5], [3, 0.5]]
        assert documents.refs([chunk("one", 0.25)]) == [[0, 0.25]]
        assert documents.chunks(refs) == CHUNKS
    with DocumentFile(file) as documents:
        assert len(documents) == 4
        assert documents.refs([*CHUNKS, chunk("new")])[3:] == [[3, 0.5], [4, 0.5]]
        assert documents.chunks([[4, 1.5]]) == [chunk("new", 1.5)]
    assert len(file.read_bytes().splitlines()) == 5


def test_wherever_a_crash_cut_it_what_was_whole_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    with DocumentFile(file) as documents:
        documents.refs(CHUNKS)
    content = file.read_bytes()
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        file.write_bytes(content[:cut])
        with DocumentFile(file) as documents:
            assert len(documents) == sum(end <= cut for end in ends)
            documents.refs(CHUNKS)
        assert file.read_bytes() == content


def test_what_a_lost_page_of_the_disk_left_at_its_end_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    with DocumentFile(file) as documents:
        documents.refs(CHUNKS)
    content = file.read_bytes()
    file.write_bytes(content + b"\0" * 4096)
    with DocumentFile(file) as documents:
        assert len(documents) == 4
    assert file.read_bytes() == content


def test_damage_before_its_end_and_numbers_that_are_not_there_are_told(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    with DocumentFile(file) as documents:
        refs = documents.refs(CHUNKS)
        with pytest.raises(ConfigurationError, match="has no document 4"):
            documents.chunks([[4, 0.5]])
        file.write_bytes(file.read_bytes().replace(b'"two"', b'"too"'))
        with pytest.raises(ConfigurationError, match="line 2: damaged"):
            documents.chunks(refs)
    with pytest.raises(ConfigurationError, match="line 2: damaged"):
        DocumentFile(file)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        DocumentFile(tmp_path / "no" / "documents.jsonl")
