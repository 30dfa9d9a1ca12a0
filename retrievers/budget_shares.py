"""One budget between several sources, by weight: what one does not need goes to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["whole_shares"]


def whole_shares(total: int | None, weights: Sequence[float], demands: Sequence[float]) -> list[float]:
    """How much of `total` each may use, in whole units: max-min fairness by weight (water-filling).

    Each gets what it demands, but at most its share; what is left over is shared again between those that demand
    more. A demand of infinity is one that may still grow. Without a total, everybody gets what it demands.
    """
    if total is None:
        return list(demands)
    shares = [math.floor(share) for share in _filled(total, weights, demands)]
    left = total - sum(shares)
    for i, demand in enumerate(demands):
        if left > 0 and shares[i] + 1 <= demand:
            shares[i] += 1
            left -= 1
    return [float(share) for share in shares]


def _filled(total: float, weights: Sequence[float], demands: Sequence[float]) -> list[float]:
    shares = [0.0] * len(weights)
    open_ones = [i for i, demand in enumerate(demands) if demand > 0]
    left = float(total)
    while open_ones:
        level = left / math.fsum(weights[i] for i in open_ones)
        met = [i for i in open_ones if demands[i] <= level * weights[i]]
        if not met:
            for i in open_ones:
                shares[i] = level * weights[i]
            break
        for i in met:
            shares[i] = float(demands[i])
            left = max(0.0, left - shares[i])
        open_ones = [i for i in open_ones if i not in met]
    return shares
