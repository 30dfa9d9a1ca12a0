"""The steppable search over DiskANN's layout: the same results as the native one, and when a pool is emitted."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from vectors import TextAsRow, closest, clustered, unit

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.retrievers.diskann import kernel as diskann_kernel
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import GRAPH_FILE, SECTOR_BYTES, read_layout
from stream2llm_sdk.retrievers.diskann.search import (
    BeamSearch,
    EarlyStop,
    EmissionGate,
    Graph,
    Pool,
    SearchOptions,
    SearchStatus,
)
from stream2llm_sdk.retrievers.diskann.shared_file import SharedFile

Vectors = npt.NDArray[np.float32]


class RowEmbedder:
    """Embeds the text "17" as row 17 of a matrix."""

    name = "rows"

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors
        self.dim = vectors.shape[1]

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self._vectors[[int(text) for text in texts]]


class Corpus:
    """Clustered unit vectors, an index of them, and queries with their true neighbours."""

    def __init__(self, directory: Path, num_vectors: int, dim: int, num_queries: int = 80) -> None:
        random = np.random.default_rng(dim)
        centres = random.standard_normal((60, dim))
        points = centres[random.integers(0, 60, num_vectors + num_queries)]
        points = points + 0.8 * random.standard_normal(points.shape)
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        points = points.astype(np.float32)
        self.vectors, self.queries = points[:num_vectors], points[num_vectors:]
        self.neighbours = np.argsort(-(self.queries @ self.vectors.T), axis=1)[:, :10].tolist()
        self.directory = directory
        texts = [str(row) for row in range(num_vectors)]
        build_index(texts, directory, embedder=RowEmbedder(self.vectors)).close()
        self.graph = Graph(read_layout(directory), SharedFile(directory / GRAPH_FILE))

    def search(self, query: Vectors, options: SearchOptions) -> Pool:
        search = BeamSearch(self.graph, query, options)
        while search.run() is not SearchStatus.FINISHED:
            pass
        return search.pool


@pytest.fixture(scope="module", params=[(2500, 128), (500, 1024)], ids=["128-d", "1024-d, long nodes"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    made = Corpus(tmp_path_factory.mktemp("corpus") / "index", *request.param)
    yield made
    made.graph.file.close()


@pytest.mark.parametrize(("search_list_size", "beam_width"), [(20, 4), (100, 4), (320, 8)])
def test_finds_what_the_native_search_finds(corpus: Corpus, search_list_size: int, beam_width: int) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    import diskannpy

    try:
        native = diskannpy.StaticDiskIndex(index_directory=str(corpus.directory), num_threads=1, beam_width=beam_width)
    except Exception as error:
        pytest.skip(f"the native search cannot load here (it needs io_uring): {error}")
    options = SearchOptions(search_list_size=search_list_size, beam_width=beam_width)
    same_order, our_recall, native_recall = 0, 0, 0
    for query, neighbours in zip(corpus.queries, corpus.neighbours, strict=True):
        expected = native.search(query, k_neighbors=10, complexity=search_list_size)
        found = corpus.search(query, options)
        ties = np.allclose(found.distances, expected.distances, atol=1e-5)
        same_order += list(found.nodes) == expected.identifiers.tolist() or ties
        our_recall += len(set(found.nodes) & set(neighbours))
        native_recall += len(set(expected.identifiers.tolist()) & set(neighbours))
    # Ours also keeps expanded nodes that left the candidate list, which shows when that list is short.
    assert same_order >= (0.98 if search_list_size >= 100 else 0.85) * len(corpus.queries)
    assert our_recall >= native_recall - 2


class MetricCorpus:
    """Vectors of many lengths in an index of one metric."""

    def __init__(self, directory: Path, metric: str, dim: int) -> None:
        self.metric = metric
        num_vectors = 1_200 if dim < 1_000 else 500
        lengths = np.random.default_rng(5).uniform(0.5, 2, (num_vectors + 60, 1)).astype(np.float32)
        points = unit(clustered(num_vectors + 60, dim)) * lengths
        self.vectors, self.queries = points[:num_vectors], points[num_vectors:]
        self.embedder = TextAsRow(self.vectors, self.queries)
        rows = map(str, range(num_vectors))
        self.index = build_index(rows, directory, embedder=self.embedder, metric=metric)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[("l2", 48), ("ip", 48), ("ip", 1024), ("cosine", 48)], ids=str)
def of_metric(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetricCorpus]:
    made = MetricCorpus(tmp_path_factory.mktemp("metric") / "index", *request.param)
    yield made
    made.index.close()


def test_every_metric_finds_what_the_native_search_finds(of_metric: MetricCorpus) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    import diskannpy

    directory = str(of_metric.index.directory)
    try:
        native = diskannpy.StaticDiskIndex(index_directory=directory, num_threads=1, beam_width=4)
    except Exception as error:
        pytest.skip(f"the native search cannot load here (it needs io_uring): {error}")
    same = hits = 0
    for number, query in enumerate(of_metric.queries):
        vector = of_metric.index.embed_query(f"q{number}")
        expected = native.search(vector, k_neighbors=10, complexity=120)
        found = [int(c.text) for c in of_metric.index.search(f"q{number}", SearchOptions(search_list_size=120))]
        same += found == expected.identifiers.tolist()
        hits += len(set(found) & set(closest(of_metric.metric, of_metric.vectors, query, 10)))
    assert same >= 0.95 * len(of_metric.queries)
    assert hits >= 0.95 * 10 * len(of_metric.queries)


def test_every_metrics_score_is_what_it_says(of_metric: MetricCorpus) -> None:
    query = of_metric.queries[0]
    for chunk in of_metric.index.search("q0"):
        vector = of_metric.vectors[int(chunk.text)]
        expected = {
            "l2": -np.linalg.norm(vector - query),
            "ip": vector @ query,
            "cosine": vector @ query / np.linalg.norm(vector) / np.linalg.norm(query),
        }[of_metric.metric]
        assert chunk.score == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_every_metric_streams_and_stops_early(of_metric: MetricCorpus) -> None:
    options = SearchOptions(search_list_size=400, beam_width=4)
    whole = [of_metric.index.begin_search(f"q{number}", options) for number in range(30)]
    short = replace(options, early_stop=EarlyStop(48, 0.2))
    early = [of_metric.index.begin_search(f"q{number}", short) for number in range(30)]
    first = 0
    for search in whole:
        assert search.run() is SearchStatus.GATE_OPEN
        first += len(search.pool.nodes)
        emitted_pools(search)
    assert first == 300
    same = 0
    for search, stopped in zip(whole, early, strict=True):
        emitted_pools(stopped)
        same += len(set(search.pool.nodes) & set(stopped.pool.nodes))
    assert same >= 0.97 * 300
    assert sum(search.stopped_early for search in early) > 20
    assert sum(s.num_expansions for s in early) < 0.8 * sum(s.num_expansions for s in whole)


@pytest.mark.parametrize("metric", ["l2", "innerproduct"])
def test_an_index_that_diskannpy_built_elsewhere_can_be_searched(tmp_path: Path, metric: str) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    import diskannpy

    vectors = clustered(600, 24)
    diskannpy.build_disk_index(
        vectors, metric, str(tmp_path), 60, 32, 1.0, 1, num_of_pq_chunks=6, vector_dtype=np.float32, index_prefix="own"
    )
    embedder = TextAsRow(vectors, vectors)
    documents = [{"text": str(row), "url": f"https://example.org/{row}"} for row in range(600)]
    kind = "ip" if metric == "innerproduct" else "l2"
    with DiskANNIndex.open_native(
        tmp_path, documents, embedder=embedder, prefix="own", vectors_are_unit=False
    ) as index:
        assert index.metric == kind
        found = index.search("17", SearchOptions(k=5, search_list_size=80))
        assert [int(chunk.text) for chunk in found] == closest(kind, vectors, vectors[17], 5)
        assert found[0].source.startswith("https://example.org/")
    with pytest.raises(ConfigurationError, match="600 vectors; give as many documents, not 3"):
        DiskANNIndex.open_native(tmp_path, documents[:3], embedder=embedder, prefix="own")
    with pytest.raises(ConfigurationError, match="vectors of 24 dimensions; embedder 'text-as-row' makes 32"):
        DiskANNIndex.open_native(tmp_path, documents, embedder=TextAsRow(*[clustered(2, 32)] * 2), prefix="own")


@pytest.mark.parametrize("metric", ["cosine", "cosinenormalized"])
def test_diskanns_own_cosine_metrics_are_refused(tmp_path: Path, metric: str) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    import diskannpy

    vectors = unit(clustered(60, 8))
    diskannpy.build_disk_index(
        vectors, metric, str(tmp_path), 60, 16, 1.0, 1, num_of_pq_chunks=2, vector_dtype=np.float32
    )
    with pytest.raises(IndexFormatError, match=f"metric {metric}, expected l2 or innerproduct; for cosine, normalise"):
        DiskANNIndex.open_native(tmp_path, ["x"] * 60, embedder=TextAsRow(vectors, vectors))


def test_distances_are_exact(corpus: Corpus) -> None:
    for query in corpus.queries[:20]:
        found = corpus.search(query, SearchOptions())
        expected = ((corpus.vectors[list(found.nodes)] - query) ** 2).sum(axis=1)
        assert np.allclose(found.distances, expected, atol=1e-5)
        assert list(found.distances) == sorted(found.distances)


def test_stepping_one_iteration_at_a_time_changes_nothing(corpus: Corpus) -> None:
    options = SearchOptions(gate=None)
    for query in corpus.queries[:30]:
        stepped, whole = BeamSearch(corpus.graph, query, options), BeamSearch(corpus.graph, query, options)
        iterations = 1
        while stepped.advance(1) is SearchStatus.RUNNING:
            iterations += 1
            assert stepped.num_iterations == iterations - 1
        assert whole.run() is SearchStatus.FINISHED
        assert stepped.pool == whole.pool
        assert (stepped.num_expansions, stepped.num_comparisons) == (
            whole.num_expansions,
            whole.num_comparisons,
        )


def emitted_pools(search: BeamSearch) -> list[Pool]:
    pools: list[Pool] = []
    while True:
        status = search.run()
        pools.append(search.pool)
        if status is SearchStatus.FINISHED:
            return pools


def test_the_gate_opens_early_on_a_pool_that_is_nearly_right(corpus: Corpus) -> None:
    options = SearchOptions(search_list_size=320, beam_width=8)
    recalls, fractions = [], []
    for query, neighbours in zip(corpus.queries, corpus.neighbours, strict=True):
        search = BeamSearch(corpus.graph, query, options)
        assert search.run() is SearchStatus.GATE_OPEN
        recalls.append(len(set(search.pool.nodes) & set(neighbours)) / 10)
        at = search.num_iterations
        emitted_pools(search)
        fractions.append(at / search.num_iterations)
    assert np.mean(recalls) > 0.95
    assert np.median(fractions) < 0.5


@pytest.mark.parametrize("gate", [EmissionGate(), EmissionGate(0, 0), EmissionGate(4, 1)])
def test_every_emitted_pool_is_another_and_better_one(corpus: Corpus, gate: EmissionGate) -> None:
    options = SearchOptions(search_list_size=200, beam_width=2, gate=gate)
    for query in corpus.queries[:40]:
        *early, final = emitted_pools(BeamSearch(corpus.graph, query, options))
        for worse, better in itertools.pairwise(early):
            assert set(worse.nodes) != set(better.nodes)
            assert sum(better.distances) < sum(worse.distances)
        assert all(sum(final.distances) <= sum(pool.distances) for pool in early)
        assert final == corpus.search(query, SearchOptions(search_list_size=200, beam_width=2, gate=None))


def test_a_stricter_gate_emits_less_often(corpus: Corpus) -> None:
    counts = []
    for gate in (EmissionGate(0, 0), EmissionGate(8, 1), EmissionGate(64, 4)):
        options = SearchOptions(search_list_size=100, beam_width=1, gate=gate)
        counts.append(
            sum(len(emitted_pools(BeamSearch(corpus.graph, query, options))) for query in corpus.queries[:30])
        )
    assert counts[0] > counts[1] >= counts[2]


def test_the_gate_waits_until_the_pool_is_stable(corpus: Corpus) -> None:
    options = SearchOptions(search_list_size=200, beam_width=1, gate=EmissionGate(12, 1))
    for query in corpus.queries[:30]:
        gated = BeamSearch(corpus.graph, query, options)
        assert gated.run() is SearchStatus.GATE_OPEN
        ungated = BeamSearch(corpus.graph, query, SearchOptions(search_list_size=200, beam_width=1, gate=None))
        pools = [frozenset[int]()]
        while ungated.num_iterations < gated.num_iterations:
            ungated.advance(1)
            pools.append(frozenset(ungated.pool.nodes))
        assert len(set(pools[-13:])) == 1


def test_the_gate_stays_shut_when_the_list_is_shorter_than_its_rank(corpus: Corpus) -> None:
    options = SearchOptions(k=10, search_list_size=19, gate=EmissionGate(0, 2))
    assert {len(emitted_pools(BeamSearch(corpus.graph, q, options))) for q in corpus.queries[:30]} == {1}


def test_a_stricter_early_stop_reads_more_and_loses_less(corpus: Corpus) -> None:
    reads, recalls = [], []
    for stop in (EarlyStop(8, 0), EarlyStop(32, 0.05), EarlyStop(128, 0.3), None):
        options = SearchOptions(search_list_size=320, gate=None, early_stop=stop)
        searches = [BeamSearch(corpus.graph, query, options) for query in corpus.queries]
        for search in searches:
            assert search.run() is SearchStatus.FINISHED
            assert search.stopped_early or stop is None or search.num_iterations > 1
        reads.append(sum(search.num_expansions for search in searches))
        found = zip(searches, corpus.neighbours, strict=True)
        recalls.append(sum(len(set(search.pool.nodes) & set(neighbours)) for search, neighbours in found))
    assert reads == sorted(reads)
    assert reads[0] < 0.6 * reads[-1]
    assert recalls == sorted(recalls)
    assert recalls[1] > 0.97 * recalls[-1]


def test_a_search_that_stopped_early_met_its_rule(corpus: Corpus) -> None:
    options = SearchOptions(search_list_size=320, beam_width=1, gate=None, early_stop=EarlyStop(24, 0))
    for query in corpus.queries[:20]:
        stopped = BeamSearch(corpus.graph, query, options)
        stopped.run()
        assert stopped.stopped_early
        again = BeamSearch(corpus.graph, query, replace(options, early_stop=None))
        pools = []
        while again.num_iterations < stopped.num_iterations:
            again.advance(1)
            pools.append(again.pool.nodes)
        assert len(set(pools[-25:])) == 1


def test_many_searches_at_once_on_one_graph(corpus: Corpus) -> None:
    options = SearchOptions(search_list_size=150)
    expected = [corpus.search(query, options) for query in corpus.queries]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            assert list(threads.map(lambda q: corpus.search(q, options), corpus.queries)) == expected


def test_a_search_that_is_told_to_stop_stops(corpus: Corpus) -> None:
    stop = threading.Event()
    search = BeamSearch(corpus.graph, corpus.queries[0], SearchOptions())
    search.advance(1)
    stop.set()
    assert search.run(stop) is SearchStatus.STOPPED
    assert search.num_iterations == 1


def test_closing_the_file_ends_a_search_with_an_error(corpus: Corpus) -> None:
    graph = Graph(corpus.graph.layout, SharedFile(corpus.directory / GRAPH_FILE))
    search = BeamSearch(graph, corpus.queries[0], SearchOptions())
    search.advance(1)
    graph.file.close()
    with pytest.raises(RetrievalError, match="closed"):
        search.advance(1)


def test_closing_waits_for_the_reader(corpus: Corpus) -> None:
    file = SharedFile(corpus.directory / GRAPH_FILE)
    closer = threading.Thread(target=file.close)
    with file.reading() as descriptor:
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        assert len(os.pread(descriptor, SECTOR_BYTES, 0)) == SECTOR_BYTES
    closer.join(10)
    assert not closer.is_alive()


def test_a_file_cut_while_it_is_open_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / GRAPH_FILE
    shutil.copy(corpus.directory / GRAPH_FILE, path)
    file = SharedFile(path)
    os.truncate(path, SECTOR_BYTES)
    try:
        with pytest.raises(IndexFormatError, match="cut while open"):
            BeamSearch(Graph(corpus.graph.layout, file), corpus.queries[0], SearchOptions()).run()
    finally:
        file.close()


@pytest.mark.parametrize("word", [0xFFFFFFFF, 0x7FFFFFFF, 5_000_000])
def test_neighbours_that_do_not_exist_are_an_error(corpus: Corpus, tmp_path: Path, word: int) -> None:
    path = tmp_path / GRAPH_FILE
    raw = np.fromfile(corpus.directory / GRAPH_FILE, np.uint32)
    raw[SECTOR_BYTES // 4 :] = word
    raw.tofile(path)
    file = SharedFile(path)
    try:
        with pytest.raises(IndexFormatError, match="damaged"):
            BeamSearch(Graph(corpus.graph.layout, file), corpus.queries[0], SearchOptions()).run()
    finally:
        file.close()


def test_random_bytes_for_nodes_never_crash(corpus: Corpus, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    original = np.fromfile(corpus.directory / GRAPH_FILE, np.uint8)
    path = tmp_path / GRAPH_FILE
    for _ in range(10):
        raw = original.copy()
        places = random.integers(SECTOR_BYTES, len(raw), len(raw) // 500)
        raw[places] = random.integers(0, 256, len(places))
        raw.tofile(path)
        file = SharedFile(path)
        for query in corpus.queries[:10]:
            with contextlib.suppress(IndexFormatError):
                BeamSearch(Graph(corpus.graph.layout, file), query, SearchOptions()).run()
        file.close()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_of_another_shape_or_not_finite_is_refused(corpus: Corpus, value: float) -> None:
    good = corpus.queries[0]
    for bad in (good[:5], good[None], np.where(good == good.max(), value, good)):
        with pytest.raises(RetrievalError, match="query vector"):
            BeamSearch(corpus.graph, bad, SearchOptions())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 2.5}, "k=2.5"),
        ({"search_list_size": 5, "k": 10}, "at least k"),
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 1000}, "512"),
        ({"gate": 5}, "gate=5"),
        ({"early_stop": True}, "early_stop=True"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        SearchOptions(**arguments)


@pytest.mark.parametrize("rule", [EmissionGate, EarlyStop])
@pytest.mark.parametrize("arguments", [(-1, 2), (2.5, 2), (16, -1), (16, float("nan"))])
def test_a_rule_that_cannot_work_is_refused(rule: type, arguments: tuple[int, float]) -> None:
    with pytest.raises(ConfigurationError, match=rule.__name__):
        rule(*arguments)


@pytest.mark.parametrize(("num_vectors", "dim"), [(1, 8), (2, 3), (5, 100), (50, 33), (255, 12), (300, 1)])
def test_few_vectors_of_any_dimension_are_all_found(tmp_path: Path, num_vectors: int, dim: int) -> None:
    random = np.random.default_rng(num_vectors)
    vectors = random.standard_normal((num_vectors, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = [str(row) for row in range(num_vectors)]
    with build_index(rows, tmp_path / "index", embedder=RowEmbedder(vectors)) as index:
        for row in range(0, num_vectors, 7):
            found = index.search(str(row), SearchOptions(k=60))
            expected = np.sort(vectors @ vectors[row])[::-1][:60]
            assert np.allclose([chunk.score for chunk in found], expected, atol=1e-5)


def test_a_small_index_gives_every_document_even_when_no_edge_leads_to_it(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((100, 32)).astype(np.float32)
    rows = [str(row) for row in range(100)]
    one_edge = BuildOptions(graph_degree=1)
    with build_index(rows, tmp_path / "index", embedder=RowEmbedder(vectors), options=one_edge) as index:
        assert sorted(int(chunk.text) for chunk in index.search("3", SearchOptions(k=100))) == list(range(100))
        # From the medoid alone most cannot be reached.
        assert len(index.search("3", SearchOptions(k=90, search_list_size=99))) < 50


def test_identical_vectors_fill_the_pool(tmp_path: Path) -> None:
    vectors = np.ones((500, 16), np.float32)
    rows = [str(row) for row in range(500)]
    with build_index(rows, tmp_path / "index", embedder=RowEmbedder(vectors)) as index:
        found = index.search("0", SearchOptions(k=20))
    assert len({chunk.text for chunk in found}) == 20
    assert all(chunk.score == pytest.approx(1) for chunk in found)


def test_compiles_without_a_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").write_text("a file where the cache folder would be")
    shutil.copy(str(diskann_kernel.__file__), tmp_path / "kernel.py")
    script = (
        "import numpy as np, kernel\n"
        "table = np.empty((1, 256), np.float32)\n"
        "pivots = np.zeros((4, 256), np.float32)\n"
        "query, centre = np.full(4, 3, np.float32), np.zeros(4, np.float32)\n"
        "kernel.fill_distance_table(query, pivots, centre, np.array([0, 4]), False, table)\n"
        "print(table.sum(), kernel.fill_distance_table.stats.cache_path)\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": "/proc/nowhere", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [str(256 * 36.0), "None"]


def test_an_index_can_be_searched_by_the_embedder_it_was_built_with(corpus: Corpus) -> None:
    with DiskANNIndex.open(corpus.directory, embedder=RowEmbedder(corpus.vectors)) as index:
        assert index.search("17", SearchOptions(k=1))[0].text == "17"
