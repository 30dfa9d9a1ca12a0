"""What a large index costs: the memory of its build, and how a search grows with the number of vectors.

1 million clustered vectors of 256 dimensions (2,000 centres, seeded), and the first 100,000 of them, are built by
`build_index` in a process of its own. The streamed search runs to the final pool with W 8, L 320 and the default gate,
on both indexes in turn, for the same 300 queries from the same clusters.

Figures: `build_peak_gib`, the most memory that all processes of the larger build held at once (resident, sampled every
50 ms); `query_growth_100k_to_1m`, the median time of a search in the larger index over that in the smaller one.

--keep DIR keeps the indexes there, and uses those that are there: `build_peak_gib` is then what was measured when the
index was built. --vectors N builds N and N / 10 instead, for a quick look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Measured, main

DIM = 256
NUM_CENTRES = 2_000
SPREAD = 0.5
BLOCK = 8_192
NUM_QUERIES = 300
SEED = 20


class ClusteredEmbedder:
    """The vector of row `n` for the text "n", and of query `n` for "query n": a function of the seed and n only."""

    name = "clustered"
    dim = DIM

    def __init__(self) -> None:
        self._centres = np.random.default_rng(SEED).standard_normal((NUM_CENTRES, DIM), np.float32)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        if texts[0].startswith("query"):
            return np.vstack([self._block(2, int(text.split()[1]), 1) for text in texts])
        # Whole blocks, so that a smaller index holds the first vectors of a larger one.
        return self._block(1, int(texts[0]), BLOCK)[: len(texts)]

    def _block(self, stream: int, first: int, count: int) -> npt.NDArray[np.float32]:
        random = np.random.default_rng([SEED, stream, first])
        noise = random.standard_normal((count, DIM), np.float32)
        return self._centres[random.integers(0, NUM_CENTRES, count)] + np.float32(SPREAD) * noise


def build(num_vectors: int, directory: Path) -> None:
    from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index

    rows = (str(row) for row in range(num_vectors))
    options = BuildOptions(batch_size=BLOCK)
    build_index(rows, directory, embedder=ClusteredEmbedder(), options=options).close()


def built(num_vectors: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The index of the first `num_vectors`, and what its build was like."""
    directory = folder / f"ann_scale_{num_vectors}"
    record = folder / f"ann_scale_{num_vectors}.json"
    if not record.exists():
        command = [sys.executable, __file__, "--build", str(num_vectors), str(directory)]
        start = time.perf_counter()
        peak_bytes = _peak_memory(subprocess.Popen(command))
        row = {"num_vectors": num_vectors, "build_s": time.perf_counter() - start, "build_peak_gib": peak_bytes / 2**30}
        record.write_text(json.dumps(row))
    return directory, json.loads(record.read_text())


def _peak_memory(process: subprocess.Popen[bytes]) -> int:
    import psutil

    peak = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        resident = 0
        try:
            for one in (root, *root.children(recursive=True)):
                resident += one.memory_info().rss
        except psutil.Error:
            continue
        peak = max(peak, resident)
        time.sleep(0.05)
    if process.returncode != 0:
        raise SystemExit(f"the build ended with status {process.returncode}")
    return peak


def measure(folder: Path, num_vectors: int) -> Measured:
    from stream2llm_sdk.retrievers.diskann.evaluation import exact_nearest
    from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
    from stream2llm_sdk.retrievers.diskann.search import SearchOptions, SearchStatus

    rows, indexes = [], []
    for count in (num_vectors // 10, num_vectors):
        directory, row = built(count, folder)
        rows.append(row)
        indexes.append(DiskANNIndex.open(directory, embedder=ClusteredEmbedder()))
    options = SearchOptions(k=10, search_list_size=320, beam_width=8)
    queries = [f"query {number}" for number in range(NUM_QUERIES)]
    times_ms: list[list[float]] = [[], []]
    found: list[list[tuple[int, ...]]] = [[], []]
    for timed in (False, True):
        for query in queries:
            for which, index in enumerate(indexes):
                search = index.begin_search(query, options)
                start = time.perf_counter()
                while search.run() is not SearchStatus.FINISHED:
                    pass
                if timed:
                    times_ms[which].append(1000 * (time.perf_counter() - start))
                    found[which].append(search.pool.nodes)
    for which, index in enumerate(indexes):
        vectors = np.array([index.embed_query(query) for query in queries])
        exact, _ = exact_nearest(index.directory, vectors, 10, "cosine")
        hits = [len(set(nodes) & set(near.tolist())) for nodes, near in zip(found[which], exact, strict=True)]
        rows[which] |= {
            "p50_ms": statistics.median(times_ms[which]),
            "p99_ms": float(np.percentile(times_ms[which], 99)),
            "recall": sum(hits) / (10 * len(hits)),
            "disk_gib": sum(file.stat().st_size for file in index.directory.iterdir()) / 2**30,
        }
        index.close()
    figures = {
        "build_peak_gib": rows[1]["build_peak_gib"],
        "query_growth_100k_to_1m": rows[1]["p50_ms"] / rows[0]["p50_ms"],
    }
    return figures, rows


def run() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--build", nargs=2)
    own, rest = parser.parse_known_args()
    if own.build:
        build(int(own.build[0]), Path(own.build[1]))
        return
    sys.argv[1:] = rest
    if own.keep is not None:
        own.keep.mkdir(parents=True, exist_ok=True)
        main(__doc__, lambda: measure(own.keep, own.vectors))
        return
    with tempfile.TemporaryDirectory() as folder:
        main(__doc__, lambda: measure(Path(folder), own.vectors))


if __name__ == "__main__":
    run()
