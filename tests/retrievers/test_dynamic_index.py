"""The dynamic index: what is added is found, what is deleted never is, and it comes back from disk as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vectors import TextAsRow, closest, clustered

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.retrievers.diskann.dynamic import DynamicDiskANN
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search import EarlyStop, EmissionGate, SearchOptions, SearchStatus
from stream2llm_sdk.testing import check_retriever

pytestmark = pytest.mark.slow

DIM = 32
VECTORS = clustered(3_000, DIM)
QUERIES = clustered(3_060, DIM)[3_000:]
EMBEDDER = TextAsRow(VECTORS, QUERIES)
OPTIONS = SearchOptions(search_list_size=60)


def document(row: int) -> dict[str, Any]:
    return {"text": str(row), "id": f"doc-{row}", "parity": row % 2, "group": f"g{row % 100}"}


def ids(rows: Iterable[int]) -> list[str]:
    return [f"doc-{row}" for row in rows]


def empty(metric: str = "cosine", **options: Any) -> DynamicDiskANN:
    return DynamicDiskANN(embedder=EMBEDDER, metric=metric, graph_degree=24, complexity=50, **options)


def rows_of(chunks: Iterable[Chunk]) -> list[int]:
    return [int(chunk.text) for chunk in chunks]


def recall(index: DynamicDiskANN, alive: Iterable[int], *, filter: Any = None, k: int = 10) -> float:
    """Mean recall against brute force; raises if a search finds what it must not."""
    rows = sorted(alive)
    hits = wanted = 0
    options = SearchOptions(k=k, search_list_size=60)
    for number, query in enumerate(QUERIES):
        expected = closest(index.metric, VECTORS, query, k, rows)
        found = rows_of(index.search(f"q{number}", options, filter))
        assert set(found) <= set(rows)
        assert len(found) == len(set(found)) == min(k, len(rows))
        hits += len(set(found) & set(expected))
        wanted += len(expected)
    return hits / wanted


def check(index: DynamicDiskANN) -> None:
    index._graph.check_integrity()
    index._table.check_integrity()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 documents, 100 of them deleted and consolidated, 50 more deleted."""
    directory = tmp_path_factory.mktemp("saved") / "index"
    index = empty()
    index.add(map(document, range(1_000)))
    index.delete(ids(range(100)))
    index.consolidate()
    index.delete(ids(range(100, 150)))
    index.save(directory)
    return directory


def reopen(directory: Path) -> DynamicDiskANN:
    return DynamicDiskANN.open(directory, embedder=EMBEDDER)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_a_life_of_adding_deleting_and_consolidating(metric: str) -> None:
    index, random = empty(metric), np.random.default_rng(1)
    alive: set[int] = set()
    for start in range(0, 1_200, 400):
        index.add(map(document, range(start, start + 400)))
        alive |= set(range(start, start + 400))
        gone = random.permutation(sorted(alive))[:120].tolist()
        assert index.delete(ids(gone)) == 120
        alive -= set(gone)
        assert recall(index, alive) > 0.95
        check(index)
        if start == 400:
            assert index.consolidate() > 0
            assert index.deleted_fraction == 0
            check(index)
            assert recall(index, alive) > 0.95
    index.add(map(document, sorted(set(range(1_200)) - alive)))  # into the slots that were freed
    assert index._num_slots <= 1_200 + 120
    assert recall(index, range(1_200)) > 0.95
    check(index)


def test_finds_what_the_native_search_finds() -> None:
    index = empty("l2")
    index.add(map(document, range(1_500)))
    same = 0
    for number, query in enumerate(QUERIES):
        ours = rows_of(index.search(f"q{number}", OPTIONS))
        native = index._graph.native_search(query, 10, 60)
        same += ours == [int(index._table.documents[slot][1].text) for slot in native]
    assert same >= 0.95 * len(QUERIES)


def test_scores_say_how_good_a_document_is() -> None:
    query = QUERIES[0]
    for metric in ("cosine", "l2", "ip"):
        index = empty(metric)
        index.add(map(document, range(200)))
        best = index.search("q0", OPTIONS)[0]
        vector = VECTORS[int(best.text)]
        expected = {
            "cosine": float(vector @ query / np.linalg.norm(vector) / np.linalg.norm(query)),
            "l2": -float(np.linalg.norm(vector - query)),
            "ip": float(vector @ query),
        }[metric]
        assert best.score == pytest.approx(expected, rel=1e-4)


def test_an_empty_index_finds_nothing_and_can_be_saved(tmp_path: Path) -> None:
    index = empty()
    assert index.search("q0") == []
    index.save(tmp_path / "index")
    again = reopen(tmp_path / "index")
    assert (len(again), again.search("q0")) == (0, [])
    again.add([document(5)])
    assert rows_of(again.search("q0")) == [5]


def test_everything_may_be_deleted_and_come_back() -> None:
    index = empty()
    index.add(map(document, range(50)))
    index.delete(ids(range(50)))
    assert index.search("q0") == []
    assert index.consolidate() == 50
    index.add(map(document, range(50, 100)))
    assert recall(index, range(50, 100)) == 1


def test_a_deleted_document_leaves_a_search_that_is_running() -> None:
    index = empty()
    index.add(map(document, range(500)))
    search = index.begin_search("q0", OPTIONS)
    search.advance(5)
    best = index.chunks(search)[0]
    index.delete([best.source])
    assert best.source not in [chunk.source for chunk in index.chunks(search)]
    while search.run() is not SearchStatus.FINISHED:
        pass
    assert best.source not in [chunk.source for chunk in index.chunks(search)]


def test_a_slot_that_got_another_document_is_not_taken_for_the_old_one() -> None:
    index = empty()
    index.add(map(document, range(100)))
    search = index.begin_search("q0", SearchOptions(k=100))
    while search.run() is not SearchStatus.FINISHED:
        pass
    assert len(index.chunks(search)) == 100
    index.delete(ids(range(100)))
    index.consolidate()
    index.add(map(document, range(1_000, 1_050)))
    assert index.chunks(search) == []


def test_replacing_a_document_is_one_step() -> None:
    index = empty()
    index.add(map(document, range(300)))
    with pytest.raises(ConfigurationError, match="'doc-7' is in the index already"):
        index.add([{"text": "8", "id": "doc-7"}])
    index.add([{"text": "2000", "id": "doc-7", "title": "new"}], replace_existing=True)
    assert len(index) == 300
    found = {chunk.source: chunk.text for chunk in index.search("2000", SearchOptions(k=300, search_list_size=300))}
    assert found["doc-7"] == "2000"
    check(index)


def test_ids_come_from_the_document() -> None:
    index = empty()
    given = index.add([Chunk("1", source="https://a"), {"text": "2", "id": 7, "url": "https://b"}, "3"])
    assert given[:2] == ["https://a", "7"]
    assert {chunk.source for chunk in index.search("q0")} == {"https://a", "https://b", given[2]}
    assert "7" in index
    index.delete(given)
    assert len(index) == 0


def test_deleting_is_all_or_nothing() -> None:
    index = empty()
    index.add(map(document, range(10)))
    with pytest.raises(ConfigurationError, match="1 ids are not in the index, among them 'nobody'"):
        index.delete(["doc-1", "nobody"])
    assert len(index) == 10
    assert index.delete(["doc-1", "doc-1", "nobody"], missing_ok=True) == 1
    with pytest.raises(ConfigurationError, match="is one str"):
        index.delete("doc-2")


@pytest.mark.parametrize(
    ("filter", "passes"),
    [
        ({"parity": 1}, lambda row: row % 2 == 1),
        ({"group": {"$in": ["g7", "g8", "g9"]}}, lambda row: row % 100 in (7, 8, 9)),
        ({"source": "doc-77"}, lambda row: row == 77),
        ({"parity": 5}, lambda row: False),
    ],
)
def test_filters_keep_up_with_what_is_added_and_deleted(filter: Any, passes: Any) -> None:
    index = empty()
    index.add(map(document, range(1_000)))
    assert (
        recall(index, filter_rows(range(1_000), passes), filter=filter) > 0.95
        if any(map(passes, range(1_000)))
        else True
    )
    index.delete(ids(range(300, 600)))
    index.add(map(document, range(1_000, 1_400)))
    alive = set(range(1_400)) - set(range(300, 600))
    rows = filter_rows(alive, passes)
    if rows:
        assert recall(index, rows, filter=filter) > 0.95
    else:
        assert index.search("q0", filter=filter) == []


def filter_rows(rows: Iterable[int], passes: Any) -> list[int]:
    return [row for row in rows if passes(row)]


def test_searching_while_documents_come_and_go() -> None:
    index = empty()
    index.add(map(document, range(600)))
    problems: list[str] = []
    stop = threading.Event()
    deleted: set[int] = set()

    def search(number: int) -> None:
        while not stop.is_set():
            gone, clock = set(deleted), index._table.clock  # deleted before the search began
            found = rows_of(index.search(f"q{number}", SearchOptions(k=20)))
            # Only what is deleted meanwhile may be missing.
            if (len(found) != 20 and index._table.clock == clock) or set(found) & gone:
                problems.append(f"{len(found)} found, {set(found) & gone} deleted")

    threads = [threading.Thread(target=search, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for start in (600, 800, 1_000):  # grows beyond its first 1,024 slots
        index.add(map(document, range(start, start + 200)))
        gone = list(range(start - 600, start - 550))
        index.delete(ids(gone))
        deleted |= set(gone)
    index.consolidate()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert problems == []
    check(index)
    assert recall(index, set(range(1_200)) - deleted) > 0.95


async def test_the_loop_goes_on_while_documents_are_inserted() -> None:
    index = empty()
    index.add(map(document, range(200)))
    loop = asyncio.get_running_loop()
    adding = loop.run_in_executor(None, lambda: index.add(map(document, range(200, 1_000))))
    turns = 0
    while not adding.done():
        await asyncio.sleep(0.001)
        turns += 1
    await adding
    assert turns > 20


async def test_a_retriever_streams_it() -> None:
    index = empty()
    index.add(map(document, range(1_500)))
    options: dict[str, Any] = {"k": 5, "search_list_size": 200, "beam_width": 1, "gate": EmissionGate(0, 0)}
    async with DiskANNRetriever(index, **options) as retriever:
        updates = [update async for update in retriever.stream("q3")]
        only_odd = [update async for update in retriever.stream("q3", filter={"parity": 1})]
    assert len(updates) > 1
    assert list(updates[-1].chunks) == index.search("q3", SearchOptions(5, 200, 1, gate=None))
    assert {chunk.metadata["parity"] for chunk in only_odd[-1].chunks} == {1}
    assert index.search("q3")  # it stays its owner's


async def test_a_retriever_over_it_conforms() -> None:
    def over(texts: list[str]) -> DiskANNRetriever:
        index = empty()
        index.add([{"text": text, "id": str(row)} for row, text in enumerate(texts) if text.strip()])
        return DiskANNRetriever(index, k=max(len(texts), 1), search_list_size=100)

    index = empty()
    index.add(map(document, range(1_200)))
    options: dict[str, Any] = {"k": 5, "search_list_size": 200, "beam_width": 1, "gate": EmissionGate(0, 0)}
    await check_retriever(lambda: DiskANNRetriever(index, **options), query="q3", over=over)


def test_a_search_may_stop_early() -> None:
    index = empty()
    index.add(map(document, range(2_000)))
    whole = index.begin_search("q1", SearchOptions(search_list_size=500, gate=None))
    short = index.begin_search("q1", SearchOptions(search_list_size=500, gate=None, early_stop=EarlyStop(32, 0.1)))
    assert whole.run() is short.run() is SearchStatus.FINISHED
    assert (whole.stopped_early, short.stopped_early) == (False, True)
    assert short.num_expansions < whole.num_expansions / 2
    assert short.pool == whole.pool


def test_comes_back_from_disk_as_it_was(saved: Path) -> None:
    index = reopen(saved)
    assert len(index) == 850
    assert index.deleted_fraction == pytest.approx(50 / 900)
    assert recall(index, range(150, 1_000)) > 0.95
    check(index)
    before = {f"q{n}": rows_of(index.search(f"q{n}", OPTIONS)) for n in range(10)}
    assert {query: rows_of(reopen(saved).search(query, OPTIONS)) for query in before} == before
    index.add(map(document, range(100)))
    assert recall(index, [*range(100), *range(150, 1_000)]) > 0.95
    found = index.search("q0", OPTIONS)[0]
    assert found.metadata["group"] == f"g{int(found.text) % 100}"


def test_saving_again_leaves_one_set(saved: Path, tmp_path: Path) -> None:
    index = reopen(saved)
    index.save(tmp_path)
    index.delete(ids([999]))
    index.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(reopen(tmp_path)) == 849


def test_a_folder_with_something_else_is_left_alone(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="holds something else"):
        reopen(saved).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


SAVE_FOR_EVER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_dynamic_index import document, ids, reopen
from pathlib import Path
index = reopen(Path(sys.argv[1]))
print("ready", flush=True)
row = 1_000
while True:
    index.add([document(row)])
    index.save(sys.argv[1])
    row += 1
"""


def test_killed_while_saving_leaves_a_whole_index(saved: Path, tmp_path: Path) -> None:
    reopen(saved).save(tmp_path)
    sizes = []
    for delay_s in (0.03, 0.12):
        arguments = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(Path(__file__).parent)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env={**os.environ, "RUST_LOG": "error"})
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
        index = reopen(tmp_path)
        check(index)
        sizes.append(len(index))
        # Begins again with the same row, so that each process finds its id free.
        index.delete([name for name in ids(range(1_000, 2_000)) if name in index])
        index.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    assert max(sizes) > 850


@pytest.mark.parametrize("name", ["vectors.npy", "neighbours.npy", "documents.jsonl", "ids.json", "snapshot.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_file_is_a_clear_error(saved: Path, tmp_path: Path, name: str, damage: str) -> None:
    reopen_copy = tmp_path / "copy"
    reopen(saved).save(reopen_copy)
    path = next(reopen_copy.glob(f"*/{name}"))
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(IndexFormatError, match=r"cannot be read|cut short or changed|damaged"):
        reopen(reopen_copy)


def test_a_folder_without_an_index_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match=r"CURRENT: cannot be read"):
        reopen(tmp_path)


def test_another_embedder_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'text-as-row' \(32 dimensions\).*wordllama"):
        DynamicDiskANN.open(saved)


def test_documents_without_an_id_get_one_of_their_own() -> None:
    index = empty()
    given = []
    for row in range(0, 8, 4):
        nameless = [{"text": str(row)}, Chunk(str(row + 1)), {"text": str(row + 2), "id": ""}, str(row + 3)]
        given += index.add(nameless, replace_existing=True)
    assert len(set(given)) == len(index) == 8
    found = index.search("q0", SearchOptions(k=8, search_list_size=60))
    assert sorted(rows_of(found)) == list(range(8))
    assert {chunk.source for chunk in found} == set(given)
    assert index.add([{"text": "9", "id": 0}, {"text": "10", "url": "https://c"}]) == ["0", "https://c"]
    index.delete(["0"])


@pytest.mark.parametrize("wanted", [None, 5, b"doc-1", "doc-1"])
def test_what_is_no_list_of_ids_is_refused(wanted: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a list of ids"):
        empty().delete(wanted)


def test_two_savers_into_one_folder_are_refused(saved: Path, tmp_path: Path) -> None:
    index = reopen(saved)
    index.save(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with FolderLock(tmp_path), pytest.raises(ConfigurationError, match="in use"):
        index.save(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    index.save(tmp_path)
    assert len(reopen(tmp_path)) == len(index)


def test_savers_at_once_leave_a_whole_index(saved: Path, tmp_path: Path) -> None:
    index = [reopen(saved) for _ in range(3)]
    outcomes: list[BaseException | None] = []

    def save(one: DynamicDiskANN) -> None:
        for _ in range(3):
            try:
                one.save(tmp_path)
                outcomes.append(None)
            except BaseException as error:
                outcomes.append(error)

    threads = [threading.Thread(target=save, args=(one,)) for one in index]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None in outcomes
    assert all(error is None or "in use" in str(error) for error in outcomes), outcomes
    assert len(reopen(tmp_path)) == len(index[0])


def test_a_folder_that_cannot_be_is_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "index"):
        with pytest.raises(ConfigurationError, match="cannot be a folder"):
            reopen(saved).save(place)


def test_a_closed_index_refuses_everything() -> None:
    index = empty()
    index.add([document(1)])
    index.close()
    calls = (lambda: index.search("q0"), lambda: index.add([document(2)]), lambda: index.delete([]), index.consolidate)
    for call in calls:
        with pytest.raises(RetrievalError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("one string", "is one str"),
        ([{"text": " "}], "has no text"),
        ([{"title": "x"}], "lacks 'text'"),
        (5, "is one int"),
    ],
)
def test_documents_that_cannot_be_added_are_an_error(documents: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        empty().add(documents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph_degree": 1}, "graph_degree=1"),
        ({"complexity": 0}, "complexity=0"),
        ({"metric": "hamming"}, "hamming"),
        ({"embedder": "x"}, "embedder='x'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DynamicDiskANN(**{"embedder": EMBEDDER, **options})
