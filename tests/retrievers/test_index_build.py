"""Builds that end early go on from where they were, and end with the index that they would have ended with anyway."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, BuildStage, build_index, unfinished_build
from stream2llm_sdk.retrievers.diskann.build_folder import building_beside, discard_unfinished_build
from stream2llm_sdk.retrievers.diskann.build_journal import BuildJournal
from stream2llm_sdk.retrievers.diskann.columns import CodedColumn, MetadataColumns, NumberColumn
from stream2llm_sdk.retrievers.diskann.evaluation import _stored_vectors, exact_nearest
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, read_layout
from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE, Manifest
from stream2llm_sdk.retrievers.diskann.search import SearchOptions
from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter
from stream2llm_sdk.retrievers.embedding import WordLlamaEmbedder

pytestmark = pytest.mark.slow

OPTIONS = BuildOptions(batch_size=40)


class NumberEmbedder:
    """A vector of any length and direction for each number in a text."""

    name = "numbers"
    dim = 12

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        rows = [np.random.default_rng(int(text.split()[-1])).standard_normal(self.dim) for text in texts]
        return np.array(rows, np.float32) * np.array([[1 + int(t.split()[-1]) % 5] for t in texts], np.float32)


def documents(count: int = 300) -> Iterator[Chunk]:
    return (Chunk(f"document {row}", f"source {row}", metadata={"half": row % 2 == 0}) for row in range(count))


# Kills itself, as kill -9 would, at the place that its arguments name.
SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_index_build import OPTIONS, NumberEmbedder, documents
from stream2llm_sdk.retrievers.diskann.build import build_index

directory, place, number = sys.argv[2], sys.argv[3], int(sys.argv[4])

def die_at(what, count):
    if (what, count) == (place, number):
        os.kill(os.getpid(), signal.SIGKILL)

class Embedder(NumberEmbedder):
    def embed(self, texts):
        die_at("embedding", int(texts[0].split()[-1]))
        return super().embed(texts)

build_index(
    documents(), directory, embedder=Embedder(), options=OPTIONS, resume=True,
    on_progress=lambda count: die_at("written", count), on_stage=lambda stage, _: die_at(str(stage), 0),
).close()
"""


def die(directory: Path, place: str, number: int = 0) -> None:
    arguments = [str(Path(__file__).parent), str(directory), place, str(number)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not directory.exists()
    assert unfinished_build(directory).exists()


def go_on(directory: Path, source: Any = None, **arguments: Any) -> list[tuple[str, int]]:
    """Ends a build; returns its stages."""
    stages: list[tuple[str, int]] = []
    arguments = {"options": OPTIONS, "embedder": NumberEmbedder(), **arguments}
    build_index(
        documents() if source is None else source,
        directory,
        resume=True,
        on_stage=lambda stage, count: stages.append((str(stage), count)),
        **arguments,
    ).close()
    return stages


def vectors_of(directory: Path) -> npt.NDArray[np.float32]:
    return np.vstack([block for _, block in _stored_vectors(directory / GRAPH_FILE, read_layout(directory))])


def require_same(one: Path, other: Path) -> None:
    assert (one / "documents.jsonl").read_bytes() == (other / "documents.jsonl").read_bytes()
    assert (vectors_of(one) == vectors_of(other)).all()
    assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in other.iterdir())
    counts = [(m.num_documents, m.num_sources, m.num_skipped) for m in map(Manifest.read, (one, other))]
    assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of a build that nothing has interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "index"
    build_index(documents(), directory, embedder=NumberEmbedder(), options=OPTIONS).close()
    return directory


def test_kills_while_embedding_lose_and_double_nothing(tmp_path: Path, whole: Path) -> None:
    directory = tmp_path / "index"
    die(directory, "written", 80)
    die(directory, "embedding", 160)
    assert go_on(directory)[0] == ("embed", 160)
    require_same(directory, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_kill_at_or_behind_the_graph_repeats_neither_the_documents_nor_the_graph(tmp_path: Path, whole: Path) -> None:
    directory = tmp_path / "index"
    die(directory, "graph")
    die(directory, "finish")
    before = (unfinished_build(directory) / GRAPH_FILE).stat()
    assert go_on(directory, embedder=Unasked())[0] == ("embed", 300)
    after = (directory / GRAPH_FILE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    require_same(directory, whole)


class Unasked(NumberEmbedder):
    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        raise AssertionError("documents are embedded again")


@pytest.mark.parametrize("stage", ["graph", "finish"])
def test_other_documents_cannot_go_on_when_all_were_read(tmp_path: Path, stage: str) -> None:
    directory = tmp_path / "index"
    die(directory, stage)
    changed = list(documents())
    changed[45] = Chunk("document 9", "source 45", metadata={"half": False})
    for source in (changed, documents(299)):
        with pytest.raises(ConfigurationError, match="are not those that the build was begun with"):
            go_on(directory, source=source)
    assert not directory.exists()
    assert unfinished_build(directory).exists()


def test_documents_that_came_since_are_taken_in_before_the_graph_and_refused_behind_it(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    die(directory, "graph")
    assert go_on(directory, source=documents(310))[1] == ("graph", 310)
    build_index(documents(310), tmp_path / "whole", embedder=NumberEmbedder(), options=OPTIONS).close()
    require_same(directory, tmp_path / "whole")
    other = tmp_path / "other"
    die(other, "finish")
    with pytest.raises(ConfigurationError, match="more documents than the 300 of the graph"):
        go_on(other, source=documents(310))
    go_on(other)


def interrupted(directory: Path, **arguments: Any) -> None:
    """A build that is stopped after 120 documents, as by Ctrl-C."""

    def stop(count: int) -> None:
        if count == 120:
            raise KeyboardInterrupt

    arguments = {"embedder": NumberEmbedder(), "options": OPTIONS, **arguments}
    with pytest.raises(KeyboardInterrupt):
        build_index(documents(), directory, resume=True, on_progress=stop, **arguments)


def test_other_options_cannot_go_on(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    interrupted(directory)
    for changed, message in (
        ({"metric": "l2"}, "begun with metric='cosine' and cannot go on with 'l2'"),
        ({"splitter": PassageSplitter(64)}, "begun with splitter=None"),
        ({"filterable": ("half",)}, "begun with filterable"),
        ({"embedder": WordLlamaEmbedder()}, "begun with dim=12 and cannot go on with 256"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            go_on(directory, **changed)
    assert go_on(directory)[0] == ("embed", 120)


@pytest.mark.parametrize("change", ["another", "one less", "shorter"])
def test_other_documents_cannot_go_on(tmp_path: Path, change: str) -> None:
    directory = tmp_path / "index"
    interrupted(directory)
    changed = list(documents())
    if change == "another":
        changed[45] = Chunk("document 9", "source 45", metadata={"half": False})
    elif change == "one less":
        del changed[10]
    else:
        del changed[100:]
    with pytest.raises(ConfigurationError, match="are not those that the build was begun with"):
        go_on(directory, source=changed)


def test_two_builds_at_once_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    refused = []

    def build_too(count: int) -> None:
        if count == 120:
            with pytest.raises(ConfigurationError, match="in use") as error:
                go_on(directory)
            refused.append(error)

    go_on(directory, on_progress=build_too)
    assert len(refused) == 1


def test_a_build_that_has_written_nothing_yet_is_left_alone_by_a_second(tmp_path: Path) -> None:
    directory = tmp_path / "index"

    def given() -> Iterator[Chunk]:
        with pytest.raises(ConfigurationError, match="in use"):
            go_on(directory)
        with pytest.raises(ConfigurationError, match="in use"):
            discard_unfinished_build(directory)
        yield from documents(50)

    go_on(directory, source=given())
    assert Manifest.read(directory).num_documents == 50
    discard_unfinished_build(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_folder_that_got_another_owner_is_not_removed(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    with building_beside(directory, keep=True) as work:
        work.rename(directory)
        with building_beside(directory, keep=True) as other:
            (other / "documents.jsonl").write_text("x")
        assert other == work
    assert (work / "documents.jsonl").read_text() == "x"


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be made: Not a directory"):
        go_on(tmp_path / "file" / "index")


def test_a_failed_build_that_may_not_go_on_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_index(documents(), tmp_path / "index", embedder=NumberEmbedder(), on_progress=stop_at_once)
    assert list(tmp_path.iterdir()) == []


def stop_at_once(count: int) -> None:
    raise KeyboardInterrupt


def test_an_unfinished_build_stands_beside_an_index_that_is_replaced(tmp_path: Path, whole: Path) -> None:
    directory = tmp_path / "index"
    build_index(documents(50), directory, embedder=NumberEmbedder()).close()
    interrupted(directory, overwrite=True)
    with DiskANNIndex.open(directory, embedder=NumberEmbedder()) as old:
        assert len(old) == 50
    go_on(directory, overwrite=True)
    require_same(directory, whole)


FULL_DISK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from test_index_build import go_on
from pathlib import Path

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
go_on(Path(sys.argv[2]))
"""


def test_a_disk_that_takes_no_more_is_told_and_can_be_gone_on_from(tmp_path: Path, whole: Path) -> None:
    directory = tmp_path / "index"
    command = [sys.executable, "-c", FULL_DISK, str(Path(__file__).parent), str(directory), "9000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "RetrievalError" in done.stderr
    assert "what is done is kept" in done.stderr
    go_on(directory)
    require_same(directory, whole)


def fill(journal: BuildJournal, first: int, last: int) -> None:
    for batch in range(first, last):
        lines = [b"%d %d\n" % (batch, row) for row in range(1 + batch % 3)]
        journal.append(lines, np.full((len(lines), 8), batch, np.float32), sources=3, skipped=0, digest=f"{batch}")


@settings(max_examples=50, deadline=None)
@given(
    file=st.sampled_from(["documents.jsonl", "ann_vectors.bin", "journal.jsonl"]),
    place=st.floats(0, 1, exclude_max=True),
    damage=st.sampled_from(["cut", "flip", "tail"]),
)
def test_whatever_a_crash_leaves_is_a_beginning_of_what_was_done(
    tmp_path_factory: pytest.TempPathFactory, file: str, place: float, damage: str
) -> None:
    work = tmp_path_factory.mktemp("work")
    with BuildJournal(work, {"a": 1}, 8) as journal:
        fill(journal, 0, 8)
        expected = list(journal.batches)
    contents = {path.name: path.read_bytes() for path in work.iterdir()}
    raw = bytearray(contents[file])
    at = int(place * len(raw))
    if damage == "cut":
        del raw[at:]
    elif damage == "flip":
        raw[at] ^= 0x55
    else:
        raw += contents[file][at:]
    (work / file).write_bytes(raw)
    with BuildJournal(work, {"a": 1}, 8) as journal:
        held = len(journal.batches)
        assert journal.batches == expected[:held]
        fill(journal, held, 8)
    left = {path.name: path.read_bytes() for path in work.iterdir()}
    # The vectors' header is written when there are no more documents.
    assert {name: raw[8 * (name == "ann_vectors.bin") :] for name, raw in left.items()} == {
        name: raw[8 * (name == "ann_vectors.bin") :] for name, raw in contents.items()
    }


def texts(count: int) -> list[str]:
    return [f"number {row}" for row in range(count)]


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_each_metric_finds_what_exact_search_finds(tmp_path: Path, metric: Any) -> None:
    embedder = NumberEmbedder()
    directory = tmp_path / "index"
    with build_index(texts(500), directory, embedder=embedder, metric=metric) as index:
        queries = [f"query {row}" for row in range(700, 730)]
        found = [index.begin_search(query, SearchOptions(gate=None)) for query in queries]
        for search in found:
            search.run()
        asked = np.array([index.embed_query(query) for query in queries])
    raw = embedder.embed(texts(500)).astype(float)
    question = embedder.embed(queries).astype(float)
    if metric == "ip":
        distances = -(question @ raw.T)
    else:
        if metric == "cosine":
            raw, question = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (raw, question))
        distances = ((question[:, None] - raw[None]) ** 2).sum(2)
    exact = np.argsort(distances, axis=1)[:, :10]
    assert (exact_nearest(directory, asked, 10, metric)[0] == exact).all()
    hits = [len({*search.pool.nodes} & {*row.tolist()}) for search, row in zip(found, exact, strict=True)]
    assert np.mean(hits) >= 9.8
    assert Manifest.read(directory).metric == metric


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="metric='dot': give one of cosine, l2, ip"):
        build_index(["x"], tmp_path / "index", metric="dot")  # type: ignore[arg-type]


def test_a_graph_in_shards_finds_what_one_graph_finds(tmp_path: Path) -> None:
    """DiskANN itself cuts, builds and merges, when the vectors do not fit in the memory that it may use."""

    class Wide(NumberEmbedder):
        dim = 128

    recalls = []
    for memory_gb in (1.0, 0.002):
        directory = tmp_path / f"index{memory_gb}"
        options = BuildOptions(complexity=40, graph_degree=24, max_memory_gb=memory_gb)
        with build_index(texts(3_000), directory, embedder=Wide(), options=options) as index:
            queries = [f"query {row}" for row in range(5_000, 5_040)]
            asked = np.array([index.embed_query(query) for query in queries])
            exact, _ = exact_nearest(directory, asked, 10, "cosine")
            found = [{chunk.source for chunk in index.search(q, SearchOptions(search_list_size=200))} for q in queries]
        truth = [{f"document-{node}" for node in row} for row in exact]
        recalls.append(np.mean([len(a & b) / 10 for a, b in zip(found, truth, strict=True)]))
    assert min(recalls) > 0.85
    assert abs(recalls[0] - recalls[1]) < 0.06


def test_passages_are_indexed_with_what_their_documents_say(tmp_path: Path) -> None:
    text = " ".join(f"The {word} is a kind of animal that lives here." for word in ("cat", "dog", "horse", "owl"))
    rows = [{"text": text, "url": f"u{row}", "id": row, "dump": f"d{row % 2}", "score": row / 2} for row in range(6)]
    directory = tmp_path / "index"
    arguments: dict[str, Any] = {"splitter": PassageSplitter(16), "filterable": ("source", "dump", "score", "passage")}
    with build_index(rows, directory, **arguments) as index:
        assert len(index) == 24
        found = index.search("owl", SearchOptions(k=3), {"dump": "d1", "score": {"$gte": 1}})
    assert {chunk.text for chunk in found[:2]} == {"The owl is a kind of animal that lives here."}
    assert {chunk.source for chunk in found[:2]} == {"u3", "u5"}
    assert found[0].metadata["id"] in (3, 5)
    manifest = Manifest.read(directory)
    assert (manifest.num_documents, manifest.num_sources, manifest.embedder_spec) == (24, 6, "wordllama")
    columns = MetadataColumns.open(directory)
    assert list(columns) == ["dump", "passage", "score", "source"]
    dump, passage = columns["dump"], columns["passage"]
    assert isinstance(dump, CodedColumn)
    assert [dump.values[code] for code in dump.codes] == [f"d{row % 2}" for row in range(6) for _ in range(4)]
    assert isinstance(passage, NumberColumn)
    assert passage.numbers.tolist() == [0, 1, 2, 3] * 6


def test_columns_keep_kinds_apart_and_know_what_is_missing(tmp_path: Path) -> None:
    values: list[Any] = [True, 1, "1", None, 2**60, 0.5]
    rows = [
        {"text": f"t {row}", "mixed": value, "n": value if value == 0.5 else None} for row, value in enumerate(values)
    ]
    build_index(rows, tmp_path / "index", embedder=NumberEmbedder(), filterable=("mixed", "n")).close()
    columns = MetadataColumns.open(tmp_path / "index")
    mixed, numbers = columns["mixed"], columns["n"]
    assert isinstance(mixed, CodedColumn)
    assert [None if code < 0 else mixed.values[code] for code in mixed.codes] == values
    assert isinstance(numbers, NumberColumn)
    assert np.isnan(numbers.numbers[:5]).all()
    assert numbers.numbers[5] == 0.5


@pytest.mark.parametrize(
    ("filterable", "message"),
    [
        (("tags",), "'tags' is a list"),
        (("nothing",), "no document has 'nothing'"),
        (("../x",), "cannot be a column"),
        ("tags", "give a sequence of names"),
    ],
)
def test_columns_that_cannot_be_are_refused_before_the_graph(tmp_path: Path, filterable: Any, message: str) -> None:
    stages: list[BuildStage] = []
    with pytest.raises(ConfigurationError, match=message):
        build_index(
            [{"text": "t 1", "tags": ["a"]}],
            tmp_path / "index",
            embedder=NumberEmbedder(),
            filterable=filterable,
            on_stage=lambda stage, _: stages.append(stage),
        )
    assert BuildStage.GRAPH not in stages


def test_what_cannot_be_indexed_is_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    class Blind(NumberEmbedder):
        def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
            vectors = super().embed(texts)
            vectors[[text.endswith("7") for text in texts]] = 0
            return vectors

    given = ["a 1", " ", {"body": "x"}, "b 7", "c 3", 5, "d 4"]
    directory = tmp_path / "index"
    with build_index(given, directory, embedder=Blind(), skip_bad=True) as index:
        assert [index.chunk(node, 0.0).text for node in range(len(index))] == ["a 1", "c 3", "d 4"]
    manifest = Manifest.read(directory)
    assert (manifest.num_documents, manifest.num_sources, manifest.num_skipped) == (3, 7, 4)


def test_an_index_of_version_1_is_still_read(whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "old"
    directory.mkdir()
    for file in whole.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    content = json.loads((directory / MANIFEST_FILE).read_text())
    names = ("format", "metric", "embedder", "dim", "num_documents", "files")
    (directory / MANIFEST_FILE).write_text(json.dumps({name: content[name] for name in names} | {"version": 1}))
    with DiskANNIndex.open(directory, embedder=NumberEmbedder()) as index:
        assert index.search("document 5", SearchOptions(k=1))[0].text == "document 5"
