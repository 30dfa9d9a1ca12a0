"""Building and opening an index: complete or not at all, and every damaged file is a clear error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import (
    GRAPH_FILE,
    METADATA_FILE,
    PQ_CODES_FILE,
    PQ_PIVOTS_FILE,
    read_layout,
)
from stream2llm_sdk.retrievers.diskann.manifest import INDEX_FILES, MANIFEST_FILE
from stream2llm_sdk.retrievers.diskann.search import SearchOptions

LAYOUT_FILES = (METADATA_FILE, GRAPH_FILE, PQ_PIVOTS_FILE, PQ_CODES_FILE)


class HashEmbedder:
    """A vector drawn from each text's own characters: cheap, deterministic, and different for every text."""

    name = "hash"

    def __init__(self, dim: int = 16) -> None:
        self.dim = dim

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        seeds = [list(text.encode("utf-8", "surrogatepass")) for text in texts]
        rows = [np.random.default_rng(seed).standard_normal(self.dim) for seed in seeds]
        return np.array(rows, np.float32)


class FixedEmbedder(HashEmbedder):
    """Returns the same array whatever it is asked."""

    def __init__(self, vectors: npt.NDArray[Any]) -> None:
        super().__init__()
        self._vectors = vectors

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._vectors


TEXTS = [f"document number {row}" for row in range(120)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built") / "index"
    build_index(TEXTS, directory, embedder=HashEmbedder()).close()
    return directory


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in built.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def reopen(directory: Path) -> DiskANNIndex:
    return DiskANNIndex.open(directory, embedder=HashEmbedder())


def test_documents_come_back_as_they_went_in(tmp_path: Path) -> None:
    documents = [
        "only text",
        Chunk("a chunk", source="s", title="t", metadata={"page": 3}),
        {"text": "a row", "id": 17, "url": "https://example.org/a", "title": None, "score": 0.5},
        {"text": "an id", "id": 18, "metadata": {"when": Path("kept as text")}},
        "lone \ud800 surrogate, NUL \x00 and \u2028 separator",
    ]
    with build_index(documents, tmp_path / "index", embedder=HashEmbedder()) as index:
        found = [index.search(d if isinstance(d, str) else dict_text(d))[0] for d in documents]
    assert [chunk.text for chunk in found] == [d if isinstance(d, str) else dict_text(d) for d in documents]
    assert [chunk.source for chunk in found] == ["document-0", "s", "https://example.org/a", "18", "document-4"]
    assert [chunk.title for chunk in found] == ["", "t", "", "", ""]
    assert [dict(chunk.metadata) for chunk in found] == [
        {},
        {"page": 3},
        {"id": 17, "score": 0.5},
        {"when": "kept as text"},
        {},
    ]
    assert all(chunk.score == pytest.approx(1, abs=1e-5) for chunk in found)


def dict_text(document: Any) -> str:
    text = document["text"] if isinstance(document, dict) else document.text
    assert isinstance(text, str)
    return text


def test_a_generator_of_documents_is_read_in_batches(tmp_path: Path) -> None:
    progress: list[int] = []
    documents = (f"generated {row}" for row in range(25))
    options = BuildOptions(batch_size=10)
    with build_index(
        documents, tmp_path / "index", embedder=HashEmbedder(), options=options, on_progress=progress.append
    ) as index:
        assert len(index) == 25
        assert index.search("generated 24")[0].source == "document-24"
    assert progress == [10, 20, 25]


def test_building_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_index(TEXTS, tmp_path / "index", embedder=HashEmbedder()).close()
    assert capfd.readouterr() == ("", "")


def failing_documents() -> Iterator[str]:
    yield "one"
    raise KeyError("the source broke")


@pytest.mark.parametrize(
    ("documents", "embedder", "message"),
    [
        ([], HashEmbedder(), "documents is empty"),
        (5, HashEmbedder(), "is one int"),
        (Chunk("one chunk"), HashEmbedder(), "is one Chunk"),
        ("one string", HashEmbedder(), "is one str"),
        ({"text": "one mapping"}, HashEmbedder(), "is one dict"),
        (["fine", b"bytes"], HashEmbedder(), "document 1 is a bytes"),
        (["fine", {"text": 5}], HashEmbedder(), "document 1: 'text' is int"),
        (["fine", {"title": "x", "body": "y"}], HashEmbedder(), "document 1 lacks 'text'; .* are: 'title', 'body'"),
        (["fine", {}], HashEmbedder(), "document 1 lacks 'text'; .* are: none"),
        (["fine", " \n"], HashEmbedder(), "document 1 .* has no text"),
        ([{"text": "x", "key": {(1, 2): 3}}], HashEmbedder(), "document 0: its metadata"),
    ],
)
def test_documents_that_cannot_be_indexed_are_an_argument_error(
    tmp_path: Path, documents: Any, embedder: HashEmbedder, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_index(documents, tmp_path / "index", embedder=embedder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("documents", "embedder", "message"),
    [
        (["a", "b"], FixedEmbedder(np.array([[1] * 16, [np.nan] * 16])), "document 1 a vector that is not finite"),
        (["a", "b"], FixedEmbedder(np.array([[1] * 16, [np.inf] * 16])), "document 1 a vector that is not finite"),
        (["a", "b"], FixedEmbedder(np.zeros((2, 16))), "document 0 a vector that is zero"),
        (["a", "b"], FixedEmbedder(np.ones((2, 17))), r"shape \(2, 17\)"),
        (["a", "b"], FixedEmbedder(np.ones((1, 16))), r"shape \(1, 16\)"),
        (failing_documents(), HashEmbedder(), "the source broke"),
    ],
)
def test_what_cannot_be_built_leaves_nothing(
    tmp_path: Path, documents: Any, embedder: HashEmbedder, message: str
) -> None:
    with pytest.raises((RetrievalError, KeyError), match=message):
        build_index(documents, tmp_path / "index", embedder=embedder)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_native_build_is_told(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="MemoryBudget"):
        build_index(TEXTS, tmp_path / "index", embedder=HashEmbedder(), options=BuildOptions(max_memory_gb=1e-12))
    assert list(tmp_path.iterdir()) == []


BUILD_SCRIPT = """
import sys
import numpy as np
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index

class Embedder:
    name, dim = "random", 64
    def embed(self, texts):
        return np.random.default_rng(0).standard_normal((len(texts), 64))

options = BuildOptions(complexity=2000, num_threads=1)  # for many minutes
build_index(map(str, range(60_000)), sys.argv[1], embedder=Embedder(), options=options)
"""


def child_of(pid: int, deadline_s: float = 120) -> int:
    """The native build that `pid` started; waits until there is one. The tests' process may have other children."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
            if b"diskann/native_build" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        if children:
            return children[0]
        time.sleep(0.01)
    raise AssertionError(f"process {pid} started no process in {deadline_s} s")


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds: Callable[[], bool], deadline_s: float = 60) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_build_leaves_no_index_and_no_process(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    building = subprocess.Popen([sys.executable, "-c", BUILD_SCRIPT, str(directory)])
    native = child_of(building.pid)
    wait_until(lambda: "_diskannpy" in Path(f"/proc/{native}/maps").read_text())
    building.kill()
    building.wait(60)
    try:
        wait_until(lambda: not is_running(native))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(native, signal.SIGKILL)
    assert not directory.exists()
    for left in (directory, *tmp_path.iterdir()):
        with pytest.raises(IndexFormatError, match="did not finish"):
            DiskANNIndex.open(left)


def test_a_native_build_that_is_killed_is_an_error(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(child_of(os.getpid()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    vectors = np.random.default_rng(0).standard_normal((20_000, 16))
    with pytest.raises(RetrievalError, match="SIGKILL"):
        build_index(
            map(str, range(20_000)),
            tmp_path / "index",
            embedder=FixedEmbedder(vectors),
            options=BuildOptions(batch_size=20_000),
        )
    killer.join(60)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="no empty folder"):
        build_index(TEXTS, tmp_path, embedder=HashEmbedder())
    with pytest.raises(ConfigurationError, match="holds no index"):
        build_index(TEXTS, tmp_path, embedder=HashEmbedder(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_overwrite_replaces_an_index_that_is_still_open(index: Path) -> None:
    with reopen(index) as old:
        with build_index(["the new one"], index, embedder=HashEmbedder(), overwrite=True) as new:
            assert [chunk.text for chunk in new.search("anything")] == ["the new one"]
            assert old.search(TEXTS[5], SearchOptions(k=1))[0].text == TEXTS[5]
    assert [path.name for path in index.parent.iterdir()] == [index.name]


def test_another_embedder_is_refused(index: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'hash' \(16 dimensions.*wordllama"):
        DiskANNIndex.open(index)
    with pytest.raises(ConfigurationError, match=r"not 'hash' \(8\)"):
        DiskANNIndex.open(index, embedder=HashEmbedder(8))


def test_a_closed_index_cannot_be_searched(index: Path) -> None:
    opened = reopen(index)
    opened.close()
    opened.close()
    with pytest.raises(RetrievalError, match="closed"):
        opened.search("anything")


@pytest.mark.parametrize("query", ["", " \n\t"])
def test_an_empty_query_is_refused(index: Path, query: str) -> None:
    with reopen(index) as opened, pytest.raises(RetrievalError, match="query is empty"):
        opened.search(query)


@pytest.mark.parametrize("name", [*INDEX_FILES, MANIFEST_FILE])
def test_a_missing_file_is_named(index: Path, name: str) -> None:
    (index / name).unlink()
    with pytest.raises(IndexFormatError, match=name):
        reopen(index)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, -1, +1], ids=["empty", "30%", "90%", "two bytes less", "one more"])
@pytest.mark.parametrize("name", [*INDEX_FILES, MANIFEST_FILE])
def test_a_file_of_another_length_is_named(index: Path, name: str, keep: float) -> None:
    raw = (index / name).read_bytes()
    changed = raw + b"{" if keep == 1 else raw[: int(keep * len(raw)) if keep >= 0 else -2]
    (index / name).write_bytes(changed)
    reason = "not JSON" if name == MANIFEST_FILE else r"\d+ bytes, expected"
    with pytest.raises(IndexFormatError, match=f"{name}: {reason}"):
        reopen(index)


@pytest.mark.parametrize("name", LAYOUT_FILES)
def test_the_layout_is_checked_without_the_manifest_too(index: Path, name: str) -> None:
    raw = (index / name).read_bytes()
    for length in sorted({0, 1, 7, 8, 12, 31, 100, 4095, 4096, len(raw) // 2, len(raw) - 1, len(raw) + 1}):
        (index / name).write_bytes((raw + b"\0")[:length])
        if len(raw) != min(length, len(raw) + 1):
            with pytest.raises(IndexFormatError, match=name):
                read_layout(index)
    (index / name).write_bytes(raw)
    assert read_layout(index).num_nodes == len(TEXTS)


@pytest.mark.parametrize("name", sorted(set(INDEX_FILES) - {METADATA_FILE}))
def test_a_file_of_another_index_of_the_same_size_is_refused(index: Path, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    build_index(TEXTS[::-1], other, embedder=HashEmbedder()).close()
    mine, theirs = (index / name).read_bytes(), (other / name).read_bytes()
    assert mine != theirs
    assert len(mine) == len(theirs)
    (index / name).write_bytes(theirs)
    with pytest.raises(IndexFormatError, match=name):
        reopen(index)


@pytest.mark.parametrize(
    ("name", "word", "value", "message"),
    [
        (METADATA_FILE, 0, 1, "dtype int8, expected float32"),
        (METADATA_FILE, 0, 9, "dtype number 9"),
        (METADATA_FILE, 1, 1, "metric cosine, expected l2"),
        (METADATA_FILE, 1, 2, "metric cosinenormalized, expected l2 or innerproduct"),
        (METADATA_FILE, 2, 0, "0 vectors"),
        (METADATA_FILE, 2, 119, "says 119"),
        (METADATA_FILE, 3, 2**63, "dimensions"),
        (GRAPH_FILE, 1, 2**40, "vectors of 16 dimensions, but"),
        (GRAPH_FILE, 2, 8, "of 8 dimensions, but"),
        (GRAPH_FILE, 3, 120, "medoid 120, expected a number below 120"),
        (GRAPH_FILE, 4, 0, "nodes of 0 bytes"),
        (GRAPH_FILE, 4, 2**62, "nodes of"),
        (GRAPH_FILE, 5, 0, "0 nodes a sector, expected"),
        (GRAPH_FILE, 8, 1, "reordering"),
        (GRAPH_FILE, 9, 4096, "the header says 4096"),
        (GRAPH_FILE, 10, 4, "associated data"),
        (GRAPH_FILE, 11, 512, "blocks of 512"),
        (GRAPH_FILE, 12, 2, "version 2.0"),
        (PQ_CODES_FILE, 0, (4 << 32) | 119, "119 codes of 4 bytes, expected 120"),
        (PQ_CODES_FILE, 0, 2**64 - 1, "-1 codes"),
        (PQ_PIVOTS_FILE, 0, (1 << 32) | 5, "5 section offsets"),
        (PQ_PIVOTS_FILE, 1, 2**63, "before the pivots"),
        (PQ_PIVOTS_FILE, 3, 5, "offsets"),
        (PQ_PIVOTS_FILE, 512, (16 << 32) | 255, "pivots of shape"),
        (PQ_PIVOTS_FILE, 513, 0x7FC00000, "not finite"),
    ],
)
def test_a_header_that_does_not_fit_is_explained(index: Path, name: str, word: int, value: int, message: str) -> None:
    raw = bytearray((index / name).read_bytes())
    raw[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
    (index / name).write_bytes(raw)
    with pytest.raises(IndexFormatError, match=message):
        read_layout(index)
    with pytest.raises(IndexFormatError, match=name):
        reopen(index)


@pytest.mark.parametrize("name", LAYOUT_FILES)
def test_random_damage_to_a_header_is_an_error_or_harmless(index: Path, name: str) -> None:
    random = np.random.default_rng(1)
    raw = (index / name).read_bytes()
    refused = 0
    for _ in range(150):
        damaged = bytearray(raw)
        for place in random.integers(0, min(len(raw), 104), 3):
            damaged[place] = random.integers(0, 256)
        (index / name).write_bytes(damaged)
        try:
            read_layout(index)
        except IndexFormatError:
            refused += 1
    assert refused > 0


def test_a_document_damaged_after_opening_is_an_error_that_names_its_row(index: Path) -> None:
    path = index / "documents.jsonl"
    raw = path.read_bytes()
    at = raw.rindex(b'"text"')
    with reopen(index) as opened:
        path.write_bytes(raw[:at] + b"#" + raw[at + 1 :])
        with pytest.raises(IndexFormatError, match=r"document 119 .* damaged"):
            opened.search(TEXTS[119], SearchOptions(k=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3, expected .* version 2"),
        ({"format": "faiss"}, "format 'faiss'"),
        ({"metric": "hamming"}, "metric .hamming."),
        ({"num_documents": 0}, "num_documents|0 is not a positive"),
        ({"num_documents": 119}, "119"),
        ({"dim": 24}, "embedder"),
        ({"dim": "16"}, "positive integer"),
        ({"files": {}}, METADATA_FILE),
        ({"files": None}, "damaged"),
        ({"embedder_spec": 5}, "'embedder_spec' is 5, not str"),
        ({"splitter": "x"}, "'splitter' is 'x', not dict"),
        ({"num_sources": "x"}, "'num_sources' is 'x', not int"),
        ({"num_skipped": float("inf")}, "damaged"),
    ],
)
def test_a_manifest_that_does_not_fit_is_explained(index: Path, change: dict[str, Any], message: str) -> None:
    path = index / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((IndexFormatError, ConfigurationError), match=message):
        reopen(index)


@pytest.mark.parametrize("content", ["", "[]", "null", "7", '"text"', "{", "\ud800", "[" * 100_000])
def test_a_manifest_that_is_something_else_is_an_error(index: Path, content: str) -> None:
    (index / MANIFEST_FILE).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(IndexFormatError, match=MANIFEST_FILE):
        reopen(index)


@pytest.mark.parametrize(
    "arguments",
    [{"graph_degree": 0}, {"complexity": -1}, {"num_threads": 0}, {"max_memory_gb": 0}, {"batch_size": 1.5}],
)
def test_build_options_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        BuildOptions(**arguments)


def test_an_embedder_without_the_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name, dim"):
        build_index(TEXTS, tmp_path / "index", embedder=object())  # type: ignore[arg-type]


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diskannpy", None)
    with pytest.raises(MissingExtraError, match=r"diskannpy is not installed.*\[diskann\]"):
        build_index(TEXTS, tmp_path / "index", embedder=HashEmbedder())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(MissingExtraError, match=r"wordllama is not installed.*\[diskann\]"):
        build_index(TEXTS, tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_retriever_loads_no_heavy_library() -> None:
    script = (
        "import sys, stream2llm_sdk.retrievers.diskann.retriever\n"
        "print({'numba', 'diskannpy', 'wordllama', 'tokenizers', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
