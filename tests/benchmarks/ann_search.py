"""Streamed search over a DiskANN index against diskannpy's own, in turn on the same files.

100,000 clustered unit vectors of 384 dimensions, k 10, L 320, W 8. Figures:

- `single_ratio`: time of a streamed search to its final pool / of the native call (blocks of queries in turn, the best
  of three for each query, medians of the queries; median of rounds).
- `concurrent_ratio`: the same for 8 threads at once on 2 CPUs, total time.
- `cold_ratio`: the same with the graph file dropped from the page cache before each search.
- `first_pool_fraction`, `first_pool_recall`: iterations until the default gate first opens, as a share of all, and that
  pool's recall@10 against the exact neighbours. `final_recall`, `native_recall`: of the final results.
- `same_order`: share of the queries for which both give the same documents in the same order.
- `loop_gap_ms`: the longest time for which an event loop was held up while 8 questions were searched at once (median of
  rounds of their longest), and `idle_gap_ms` without any.
- `early_stop_ratio`, `early_stop_recall`: time with the default `EarlyStop` / without, and the recall@10 then.

Expected: at most 0.35, 0.35, 1.0; 0.25, 0.97; 15 ms. The index takes some minutes to build; `--keep DIR` keeps it for
the next run.

`--gate-curve` instead measures gates and early stops on real text: the HTML documentation that Debian's packages
python3.11-doc, postgresql-doc-15, git-doc, apache2-doc and sqlite3-doc install, in passages of 200 words, WordLlama's
vectors, and the headings of its pages as questions. It prints the tables of `search_options`'s docstring.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Measured, main

from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.layout import graph_path
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search import BeamSearch, SearchStatus
from stream2llm_sdk.retrievers.diskann.search_options import EarlyStop, EmissionGate, SearchOptions
from stream2llm_sdk.retrievers.diskann.streaming_policy import documents_prefilled_again
from stream2llm_sdk.retrievers.embedding import WordLlamaEmbedder, embed_unit_vectors

os.environ.setdefault("RUST_LOG", "error")

NUM_VECTORS, DIM, NUM_QUERIES = 100_000, 384, 1_000
K, LIST_SIZE, BEAM_WIDTH = 10, 320, 8
ROUNDS, QUERIES_A_ROUND, BLOCK, TURNS, COLD_QUERIES, THREADS = 5, 40, 20, 3, 40, 8
STREAMED = SearchOptions(k=K, search_list_size=LIST_SIZE, beam_width=BEAM_WIDTH)

Vectors = npt.NDArray[np.float32]


class RowEmbedder:
    """Embeds the text "17" as row 17 of the vectors, and "q17" as query 17."""

    name = "clustered-rows"
    dim = DIM

    def __init__(self, vectors: Vectors, queries: Vectors) -> None:
        self.vectors, self.queries = vectors, queries

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.array([self._vector(text) for text in texts], np.float32)

    def _vector(self, text: str) -> Vectors:
        if text.isdigit():
            return self.vectors[int(text)]
        number = text.removeprefix("q")
        return self.queries[int(number) if number.isdigit() else 0]


def clustered() -> RowEmbedder:
    random = np.random.default_rng(0)
    centres = random.standard_normal((1_000, DIM), dtype=np.float32)
    points = centres[random.integers(0, len(centres), NUM_VECTORS + NUM_QUERIES)]
    points += np.float32(0.8) * random.standard_normal(points.shape, dtype=np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return RowEmbedder(points[:NUM_VECTORS], points[NUM_VECTORS:])


def nearest(vectors: Vectors, queries: Vectors) -> list[set[int]]:
    """The exact k nearest of each query."""
    found = []
    for at in range(0, len(queries), 50):
        similar = queries[at : at + 50] @ vectors.T
        found += [set(row.tolist()) for row in np.argpartition(-similar, K, axis=1)[:, :K]]
    return found


def finish(search: BeamSearch) -> BeamSearch:
    while search.run() is not SearchStatus.FINISHED:
        pass
    return search


def timed(function: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


class Comparison:
    """Both searches over one index."""

    def __init__(self, index: DiskANNIndex, embedder: RowEmbedder) -> None:
        import diskannpy

        self.index, self.queries = index, embedder.queries
        self.native = diskannpy.StaticDiskIndex(
            index_directory=str(index.directory), num_threads=1, beam_width=BEAM_WIDTH
        )
        self.exact = nearest(embedder.vectors, embedder.queries)

    def ours(self, row: int, options: SearchOptions = STREAMED) -> BeamSearch:
        return finish(BeamSearch(self.index._graph, self.queries[row], options))

    def theirs(self, row: int) -> list[int]:
        found = self.native.search(self.queries[row], K, LIST_SIZE).identifiers
        return [int(node) for node in found]

    def recall(self, nodes: Sequence[int], row: int) -> float:
        return len(set(nodes) & self.exact[row]) / K

    def in_turn(self, rows: Sequence[int], before: Callable[[], None] = lambda: None) -> float:
        """Blocks of queries in turn, each of them three times; a query's best time counts.

        So other processes' time is no part of it, and neither search runs on caches that the other has just emptied.
        """
        theirs, ours = np.full(len(rows), np.inf), np.full(len(rows), np.inf)
        for at in range(0, len(rows), BLOCK):
            for _ in range(TURNS):
                for search, best in ((self.theirs, theirs), (self.ours, ours)):
                    for place, row in enumerate(rows[at : at + BLOCK], at):
                        before()
                        best[place] = min(best[place], timed(lambda search=search, row=row: search(row)))  # type: ignore[misc]
        return float(np.median(ours) / np.median(theirs))

    def at_once(self, rows: Sequence[int]) -> float:
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self.ours, rows[:THREADS]))
            theirs = timed(lambda: list(threads.map(self.theirs, rows)))
            return timed(lambda: list(threads.map(self.ours, rows))) / theirs

    def drop_from_page_cache(self) -> None:
        descriptor = os.open(graph_path(self.index.directory), os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def first_pool(self, row: int) -> tuple[float, float]:
        """When the gate first opens, as a share of the iterations, and the recall of that pool."""
        search = BeamSearch(self.index._graph, self.queries[row], STREAMED)
        search.run()
        at, nodes = search.num_iterations, search.pool.nodes
        return at / finish(search).num_iterations, self.recall(nodes, row)

    def early_stop(self, rows: Sequence[int]) -> tuple[float, float]:
        whole = SearchOptions(K, LIST_SIZE, BEAM_WIDTH, gate=None)
        short = SearchOptions(K, LIST_SIZE, BEAM_WIDTH, gate=None, early_stop=EarlyStop())
        with_s = median(timed(lambda row=row: self.ours(row, short)) for row in rows)  # type: ignore[misc]
        without_s = median(timed(lambda row=row: self.ours(row, whole)) for row in rows)  # type: ignore[misc]
        return with_s / without_s, fmean(self.recall(self.ours(row, short).pool.nodes, row) for row in rows)


async def longest_gap_s(work: Callable[[], Any] | None, duration_s: float = 1.0) -> float:
    """The longest time between two turns of the loop while `work` runs."""
    loop = asyncio.get_running_loop()
    task = None if work is None else asyncio.ensure_future(work())
    longest, last = 0.0, loop.time()
    end = last + duration_s
    while last < end:
        await asyncio.sleep(0.001)
        now = loop.time()
        longest, last = max(longest, now - last), now
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
    return longest


async def loop_gaps(index: DiskANNIndex) -> tuple[float, float]:
    """The longest gaps in seconds with 8 questions at once, and with none."""
    options: dict[str, Any] = {"k": K, "search_list_size": LIST_SIZE, "beam_width": BEAM_WIDTH}
    async with DiskANNRetriever(index, **options, max_concurrent_searches=THREADS) as retriever:

        async def ask(first: int) -> None:
            while True:
                async for _ in retriever.stream(f"q{first}"):
                    pass

        async def all_ask() -> None:
            await asyncio.gather(*(ask(row) for row in range(THREADS)))

        busy = [await longest_gap_s(all_ask) for _ in range(ROUNDS)]
    return median(busy), median([await longest_gap_s(None) for _ in range(ROUNDS)])


def measure(folder: Path) -> Measured:
    embedder = clustered()
    try:
        index = DiskANNIndex.open(folder / "index", embedder=embedder)
    except Exception:
        rows = (str(row) for row in range(NUM_VECTORS))
        index = build_index(
            rows, folder / "index", embedder=embedder, options=BuildOptions(batch_size=10_000), overwrite=True
        )
    with index:
        return compare(index, embedder)


def compare(index: DiskANNIndex, embedder: RowEmbedder) -> Measured:
    both = Comparison(index, embedder)
    all_rows = range(NUM_QUERIES)
    found = [(both.ours(row).pool.nodes, both.theirs(row)) for row in all_rows]  # also warms both
    runs = []
    for number in range(ROUNDS):
        rows = [(number * QUERIES_A_ROUND + i) % NUM_QUERIES for i in range(QUERIES_A_ROUND)]
        ratio, recall = both.early_stop(rows)
        runs.append(
            {
                "single_ratio": both.in_turn(rows),
                "concurrent_ratio": both.at_once(rows),
                "early_stop_ratio": ratio,
                "early_stop_recall": recall,
            }
        )
    first = [both.first_pool(row) for row in all_rows]
    busy_s, idle_s = asyncio.run(loop_gaps(index))
    figures = {
        **{name: median(run[name] for run in runs) for name in runs[0]},
        "cold_ratio": both.in_turn(range(COLD_QUERIES), both.drop_from_page_cache),
        "first_pool_fraction": fmean(fraction for fraction, _ in first),
        "first_pool_recall": fmean(recall for _, recall in first),
        "final_recall": fmean(both.recall(ours, row) for row, (ours, _) in enumerate(found)),
        "native_recall": fmean(both.recall(theirs, row) for row, (_, theirs) in enumerate(found)),
        "same_order": fmean(list(ours) == theirs for ours, theirs in found),
        "loop_gap_ms": busy_s * 1e3,
        "idle_gap_ms": idle_s * 1e3,
    }
    return figures, runs


# --- gates and early stops on real text ---

DOCUMENTATION = (
    "/usr/share/doc/python3.11/html",
    "/usr/share/doc/postgresql-doc-15/html",
    "/usr/share/doc/git-doc",
    "/usr/share/doc/apache2-doc/manual/en",
    "/usr/share/doc/sqlite3",
)
WORDS_A_PASSAGE, OVERLAP = 200, 20
NUM_QUESTIONS = 300
GATES = {
    "every change": EmissionGate(0, 0),
    "8 expansions, rank k": EmissionGate(8, 1.0),
    "16 expansions, rank 2k (default)": EmissionGate(),
    "48 expansions, rank 4k": EmissionGate(48, 4.0),
}
STOPS = {
    "none": None,
    "16 expansions, margin 0": EarlyStop(16, 0.0),
    "32 expansions, margin 0.05": EarlyStop(32, 0.05),
    "64 expansions, margin 0.1 (default)": EarlyStop(),
    "128 expansions, margin 0.2": EarlyStop(128, 0.2),
}


def documentation() -> Iterator[tuple[str, str]]:
    """Passages with their page's title."""
    import lxml.html

    for root in DOCUMENTATION:
        for path in sorted(Path(root).rglob("*.htm*")):
            if not path.is_file() or path.suffix == ".gz" or path.stat().st_size > 1_500_000:
                continue
            page = lxml.html.fromstring(path.read_bytes())
            for element in page.xpath("//script|//style|//nav|//header|//footer"):
                element.drop_tree()
            title = " ".join((page.findtext(".//title") or path.stem).split())
            words = page.text_content().split()
            for at in range(0, len(words), WORDS_A_PASSAGE - OVERLAP):
                text = " ".join(words[at : at + WORDS_A_PASSAGE])
                if len(text) > 200:
                    yield title, text


class RealText:
    """An index of the documentation, questions, and each passage's tokens."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        passages = list(documentation())
        if not passages:
            raise SystemExit("install python3.11-doc, postgresql-doc-15, git-doc, apache2-doc and sqlite3-doc first")
        self.embedder = WordLlamaEmbedder()
        self.index = build_index(
            [text for _, text in passages], folder / "text", embedder=self.embedder, overwrite=True
        )
        titles = sorted({title for title, _ in passages})
        chosen = np.random.default_rng(0).permutation(len(titles))[:NUM_QUESTIONS]
        self.questions = [self.index.embed_query(f"{titles[row]}?") for row in chosen]
        vectors = embed_unit_vectors(self.embedder, [text for _, text in passages], str)
        self.exact = nearest(vectors, np.array(self.questions)[:, : self.embedder.dim])
        import wordllama

        tokenizer = Tokenizer.from_file(str(next(Path(wordllama.__file__).parent.rglob("*tokenizer*.json"))))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.num_tokens = [len(encoded.ids) for encoded in tokenizer.encode_batch([text for _, text in passages])]

    def recall(self, nodes: Sequence[int], row: int) -> float:
        return len(set(nodes) & self.exact[row]) / K

    def gate(self, gate: EmissionGate) -> dict[str, float]:
        options = SearchOptions(K, LIST_SIZE, BEAM_WIDTH, gate=gate)
        rows = [self._gated(row, options) for row in range(len(self.questions))]
        return {name: fmean(row[name] for row in rows) for name in rows[0]}

    def _gated(self, row: int, options: SearchOptions) -> dict[str, float]:
        search = BeamSearch(self.index._graph, self.questions[row], options)
        started_s = time.perf_counter()
        pools: list[tuple[int, ...]] = []
        at: list[tuple[int, float]] = []
        status = SearchStatus.RUNNING
        while status is not SearchStatus.FINISHED:
            status = search.run()
            at.append((search.num_iterations, time.perf_counter() - started_s))
            if not pools or search.pool.nodes != pools[-1]:
                pools.append(search.pool.nodes)
        again, invalidated = self._costs(pools)
        return {
            "iterations": at[0][0],
            "of all iterations": at[0][0] / at[-1][0],
            "ms": at[0][1] * 1e3,
            "of the time": at[0][1] / at[-1][1],
            "recall": self.recall(pools[0], row),
            "pools": len(pools),
            "documents prefilled again": again,
            "tokens invalidated": invalidated,
        }

    def _costs(self, pools: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Documents that the updates make the model prefill, and tokens of the prompts before that were in vain."""
        again, invalidated = 0, 0
        order = list(pools[0])
        for pool in pools[1:]:
            count, new_order = documents_prefilled_again(order, pool)
            again += count
            invalidated += sum(self.num_tokens[node] for node in order[len(new_order) - count :])
            order = new_order
        return again, invalidated

    def stop(self, stop: EarlyStop | None) -> dict[str, float]:
        options = SearchOptions(K, LIST_SIZE, BEAM_WIDTH, gate=None, early_stop=stop)
        times_s, recalls, reads = [], [], []
        for row, question in enumerate(self.questions):
            started_s = time.perf_counter()
            search = finish(BeamSearch(self.index._graph, question, options))
            times_s.append(time.perf_counter() - started_s)
            recalls.append(self.recall(search.pool.nodes, row))
            reads.append(search.num_expansions)
        return {"ms": median(times_s) * 1e3, "nodes read": fmean(reads), "recall": fmean(recalls)}


def print_table(rows: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print(f"{'':36}" + "".join(f"{name:>27}" for name in names))
    for title, figures in rows.items():
        print(f"{title:36}" + "".join(f"{figures[name]:>27.3f}" for name in names))


def gate_curve(folder: Path) -> None:
    text = RealText(folder)
    print(f"{len(text.num_tokens)} passages, {len(text.questions)} questions, k {K}, L {LIST_SIZE}, W {BEAM_WIDTH}")
    text.stop(None)  # warms
    print_table({title: text.gate(gate) for title, gate in GATES.items()})
    print_table({title: text.stop(stop) for title, stop in STOPS.items()})
    text.index.close()


def run() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--gate-curve", action="store_true")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    with tempfile.TemporaryDirectory(prefix="ann-search-") as temporary:
        folder = own.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if own.gate_curve:
            gate_curve(folder)
        else:
            main(__doc__, lambda: measure(folder))


if __name__ == "__main__":
    run()
