"""A cost model corrected by what steps and copies really took."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_model import CostModel

__all__ = ["CorrectionState", "CostTerm", "OnlineCorrection"]


class CostTerm(StrEnum):
    """The parts of a cost model that are corrected, each by itself."""

    RECOMPUTE = "recompute"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class CorrectionState:
    """What one term has learned: its factor, measurements used, and those that were none (not positive, not finite)."""

    factor: float
    num_observed: int
    num_ignored: int


class OnlineCorrection:
    """The cost model with a factor for each of its terms: the median of measured / predicted over a recent window.

    Up to half of a window can be outliers (a step held up by another process) without moving a factor far. Factors
    stay within [1 / limit, limit]: beyond that the model is wrong in more than its scale and must be measured again.
    They start at 1 and stay there until `min_observations` are in.

    Args:
        model: the model to correct.
        window: measurements that count, per term.
        min_observations: how many it takes to believe them.
        limit: bound of the factors.
        frozen: whether measurements change nothing; can be set at any time.
    """

    def __init__(
        self,
        model: CostModel,
        *,
        window: int = 64,
        min_observations: int = 8,
        limit: float = 4.0,
        frozen: bool = False,
    ) -> None:
        if not 1 <= min_observations <= window:
            raise ConfigurationError(
                f"min_observations must be between 1 and the window, got {min_observations} of {window}"
            )
        if not math.isfinite(limit) or limit < 1.0:
            raise ConfigurationError(f"limit must be 1 or more, got {limit}")
        self.model = model
        self.frozen = frozen
        self._min_observations = min_observations
        self._limit = limit
        self._windows = {term: _MedianWindow(window) for term in CostTerm}
        self._factors = dict.fromkeys(CostTerm, 1.0)
        self._num_observed = dict.fromkeys(CostTerm, 0)
        self._num_ignored = dict.fromkeys(CostTerm, 0)

    def observe(self, term: CostTerm, predicted_s: float, measured_s: float) -> None:
        """Learns from one step or copy. `predicted_s` is what `model`, without correction, said of it.

        Time does not grow with the number of measurements: one costs a search and an insertion in the window.
        """
        if self.frozen:
            return
        ratio = measured_s / predicted_s if predicted_s > 0 else 0.0
        if not math.isfinite(ratio) or ratio <= 0:
            self._num_ignored[term] += 1
            return
        self._num_observed[term] += 1
        window = self._windows[term]
        window.add(math.log(ratio))
        if self._num_observed[term] >= self._min_observations:
            self._factors[term] = min(max(math.exp(window.median()), 1.0 / self._limit), self._limit)

    def factor(self, term: CostTerm) -> float:
        """By how much the term's predictions are multiplied."""
        return self._factors[term]

    def states(self) -> dict[CostTerm, CorrectionState]:
        """What every term has learned."""
        return {
            term: CorrectionState(self._factors[term], self._num_observed[term], self._num_ignored[term])
            for term in CostTerm
        }

    def recompute_s(self, num_tokens: int, start: int = 0) -> float:
        """`CostModel.recompute_s`, corrected."""
        return self._factors[CostTerm.RECOMPUTE] * self.model.recompute_s(num_tokens, start)

    def swap_out_s(self, num_tokens: int) -> float:
        """`CostModel.swap_out_s`, corrected."""
        return self._factors[CostTerm.SWAP_OUT] * self.model.swap_out_s(num_tokens)

    def swap_in_s(self, num_tokens: int) -> float:
        """`CostModel.swap_in_s`, corrected."""
        return self._factors[CostTerm.SWAP_IN] * self.model.swap_in_s(num_tokens)


class _MedianWindow:
    """The median of the last `size` values: kept by age and in order."""

    def __init__(self, size: int) -> None:
        self._by_age: deque[float] = deque()
        self._in_order: list[float] = []
        self._size = size

    def add(self, value: float) -> None:
        if len(self._by_age) == self._size:
            del self._in_order[bisect_left(self._in_order, self._by_age.popleft())]
        self._by_age.append(value)
        insort(self._in_order, value)

    def median(self) -> float:
        middle = len(self._in_order) // 2
        if len(self._in_order) % 2:
            return self._in_order[middle]
        return (self._in_order[middle - 1] + self._in_order[middle]) / 2
