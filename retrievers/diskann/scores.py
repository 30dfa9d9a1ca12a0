"""What a distance in an index's graph means as a score."""

from __future__ import annotations

import math

from stream2llm_sdk.retrievers.diskann.manifest import Metric

__all__ = ["score_of"]


def score_of(distance: float, metric: Metric) -> float:
    """The cosine similarity, minus the L2 distance, or the inner product: larger is better.

    Args:
        distance: as a search gives it: squared L2 (for cosine, of vectors of length 1), or minus the inner product.
    """
    if metric == "cosine":
        return 1 - distance / 2
    return -distance if metric == "ip" else -math.sqrt(max(distance, 0.0))
