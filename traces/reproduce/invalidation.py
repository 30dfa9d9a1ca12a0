"""Tokens that a vector search's updates make void: in rank order with every change, and in stable order with the gate.

Real searches of a real DiskANN index, over clustered random vectors, whose documents have the lengths of the published
corpus (lognormal, median 512 tokens).
"""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.placement import ChunkOrder, arranged

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever

__all__ = ["invalidated_tokens_ratio"]

_NUM_DOCUMENTS, _NUM_CLUSTERS, _NUM_QUERIES = 20_000, 200, 100
_DIM, _SPREAD = 64, 0.6
_SEARCH_LIST_SIZE, _BEAM_WIDTH, _K = 320, 8, 10


class _Clusters:
    """Embeds any text as a point near one of many random centres."""

    name, dim = "clusters", _DIM

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._centres = np.random.default_rng((seed, 0)).normal(size=(_NUM_CLUSTERS, _DIM))

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        rows = []
        for text in texts:
            random = np.random.default_rng((self._seed, zlib.crc32(text.encode())))
            centre = self._centres[random.integers(_NUM_CLUSTERS)]
            rows.append(centre + _SPREAD * random.normal(size=_DIM))
        return np.array(rows, dtype=np.float32)


def invalidated_tokens_ratio(*, seed: int = 0) -> float:
    """Tokens made void in rank order without the gate, over those in stable order with it; the same searches.

    Raises:
        MissingExtraError: the extra `diskann` is not installed.
    """
    from stream2llm_sdk.retrievers.diskann.build import build_index
    from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
    from stream2llm_sdk.retrievers.diskann.search import EmissionGate

    every_change = EmissionGate(min_stable_expansions=0, min_rank_factor=0.0)
    with tempfile.TemporaryDirectory() as folder:
        documents = (f"document {number}" for number in range(_NUM_DOCUMENTS))
        with build_index(documents, Path(folder) / "index", embedder=_Clusters(seed)) as index:

            def retriever(gate: EmissionGate) -> DiskANNRetriever:
                return DiskANNRetriever(
                    index, k=_K, search_list_size=_SEARCH_LIST_SIZE, beam_width=_BEAM_WIDTH, gate=gate
                )

            without = asyncio.run(_invalidated(retriever(every_change), ChunkOrder.RANK, seed))
            gated = asyncio.run(_invalidated(retriever(EmissionGate()), ChunkOrder.STABLE, seed))
    return without / max(1, gated)


async def _invalidated(retriever: DiskANNRetriever, order: ChunkOrder, seed: int) -> int:
    """Tokens of all queries that had been in the prompt behind the common prefix with the next one."""
    lengths = np.maximum(20, 512 * np.exp(1.27 * np.random.default_rng((seed, 1)).normal(size=_NUM_DOCUMENTS)))
    total = 0
    async with retriever:
        for number in range(_NUM_QUERIES):
            prompt: list[int] = []
            async for update in retriever.stream(f"query {number}"):
                best_first = [int(chunk.text.split()[1]) for chunk in update.chunks]
                following = arranged(best_first, prompt, order)
                num_common = next(
                    (place for place, pair in enumerate(zip(prompt, following, strict=False)) if pair[0] != pair[1]),
                    min(len(prompt), len(following)),
                )
                total += int(sum(lengths[document] for document in prompt[num_common:]))
                prompt = following
    return total
