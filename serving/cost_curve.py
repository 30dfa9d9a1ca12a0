"""A cost in seconds over a number of tokens, and how it is fitted to what was measured."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["CostCurve", "FitQuality", "Sample", "fit_curve", "fit_quality", "fit_recompute", "num_pairs"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds for a number of tokens: linear between knots, and beyond the outer ones as in the nearest segment.

    No tokens cost nothing. A single knot means a cost in proportion to the tokens.

    Attributes:
        num_tokens: the knots' tokens, positive and increasing.
        seconds: the knots' seconds, one for each; they never decrease.

    Raises:
        ConfigurationError: the knots are not like that.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.num_tokens or len(self.num_tokens) != len(self.seconds):
            raise ConfigurationError(
                f"a cost curve needs a number of seconds for every number of tokens, and at least one: got "
                f"{len(self.num_tokens)} numbers of tokens and {len(self.seconds)} of seconds"
            )
        if self.num_tokens[0] < 1:
            raise ConfigurationError(f"a cost curve's tokens must be positive, got {self.num_tokens[0]}")
        for before, after in zip(self.num_tokens, self.num_tokens[1:], strict=False):
            if after <= before:
                raise ConfigurationError(f"a cost curve's tokens must increase, got {after} after {before}")
        for num_tokens, seconds in zip(self.num_tokens, self.seconds, strict=True):
            if not math.isfinite(seconds) or seconds < 0:
                raise ConfigurationError(f"the cost of {num_tokens} tokens must be 0 s or more, got {seconds}")
        for before_s, after_s in zip(self.seconds, self.seconds[1:], strict=False):
            if after_s < before_s:
                raise ConfigurationError(f"more tokens cannot cost less: {after_s} s after {before_s} s")

    def __call__(self, num_tokens: float) -> float:
        """Seconds for `num_tokens`, never negative and never less for more tokens."""
        if num_tokens <= 0:
            return 0.0
        if len(self.num_tokens) == 1:
            return self.seconds[0] * num_tokens / self.num_tokens[0]
        right = min(max(bisect_right(self.num_tokens, num_tokens), 1), len(self.num_tokens) - 1)
        x0, x1 = self.num_tokens[right - 1 : right + 1]
        y0, y1 = self.seconds[right - 1 : right + 1]
        return max(0.0, y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: `num_tokens` tokens, at positions from `start` on, took `seconds`."""

    num_tokens: int
    seconds: float
    start: int = 0


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well a fitted curve tells what was measured.

    Attributes:
        num_samples: measurements.
        r_squared: share of the measurements' variance that the fit explains.
        median_relative_error: of the fit against each single measurement.
        held_out_relative_error: median over the inner numbers of tokens, each predicted by a fit that was not shown
            any measurement of it; None where there are fewer than three. This is what to expect between the knots.
    """

    num_samples: int
    r_squared: float
    median_relative_error: float
    held_out_relative_error: float | None

    @property
    def is_good(self) -> bool:
        """Whether decisions can rest on it: R² of 0.9 (where the published artifact warns) and errors within 25 %."""
        errors = (self.median_relative_error, self.held_out_relative_error or 0.0)
        return self.r_squared >= 0.9 and max(errors) <= 0.25


def num_pairs(num_tokens: int, start: int = 0) -> int:
    """(query, key) pairs that causal attention computes for positions [start, start + num_tokens)."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def fit_curve(samples: Iterable[Sample]) -> CostCurve:
    """The curve through the median of each number of tokens; where medians decrease, they are pooled.

    Pooling is isotonic regression by pool-adjacent-violators: the closest non-decreasing values, weighted by the
    number of measurements.

    Raises:
        ConfigurationError: there is no sample.
    """
    seconds_of = _by_num_tokens(samples)
    if not seconds_of:
        raise ConfigurationError("a cost curve needs at least one measurement, got none")
    lengths = sorted(seconds_of)
    pools: list[tuple[float, int, int]] = []  # mean seconds, measurements, knots
    for length in lengths:
        value, weight, knots = median(seconds_of[length]), len(seconds_of[length]), 1
        while pools and pools[-1][0] > value:
            before, before_weight, before_knots = pools.pop()
            value = (before * before_weight + value * weight) / (before_weight + weight)
            weight, knots = weight + before_weight, knots + before_knots
        pools.append((value, weight, knots))
    return CostCurve(tuple(lengths), tuple(value for value, _, knots in pools for _ in range(knots)))


def fit_recompute(prefills: Sequence[Sample], chunks: Sequence[Sample]) -> tuple[CostCurve, float]:
    """A curve for prefill without its attention to the context, and the seconds for each (query, key) pair.

    `prefills` are whole prompts from position 0, `chunks` single steps at any start; both may be the same. The
    seconds per pair come from the chunks, by a + b·tokens + c·pairs with no coefficient below zero and the least
    absolute relative error, which outliers hardly move. The curve then goes through what the pairs leave of the
    prefills.
    """
    per_pair = _seconds_per_pair(chunks)
    rest = [
        Sample(sample.num_tokens, max(0.0, sample.seconds - per_pair * num_pairs(sample.num_tokens, sample.start)))
        for sample in prefills
    ]
    return fit_curve(rest), per_pair


def fit_quality(fit: Callable[[Sequence[Sample]], Callable[[Sample], float]], samples: Sequence[Sample]) -> FitQuality:
    """Judges `fit`, which makes predictions in seconds from samples, on all samples and on those it was not shown."""
    predict = fit(samples)
    measured = np.array([sample.seconds for sample in samples], dtype=np.float64)
    predicted = np.array([predict(sample) for sample in samples], dtype=np.float64)
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - predicted) ** 2).sum())
    lengths = sorted({sample.num_tokens for sample in samples})
    held_out = [_held_out_error(fit, samples, length) for length in lengths[1:-1]]
    return FitQuality(
        num_samples=len(samples),
        r_squared=1.0 - missed / spread if spread > 0 else float(missed == 0),
        median_relative_error=median(_relative_error(p, m) for p, m in zip(predicted, measured, strict=True)),
        held_out_relative_error=median(held_out) if held_out else None,
    )


def _held_out_error(
    fit: Callable[[Sequence[Sample]], Callable[[Sample], float]], samples: Sequence[Sample], length: int
) -> float:
    predict = fit([sample for sample in samples if sample.num_tokens != length])
    hidden = [sample for sample in samples if sample.num_tokens == length]
    return _relative_error(predict(hidden[0]), median(sample.seconds for sample in hidden))


def _relative_error(predicted: float, measured: float) -> float:
    return float(abs(predicted - measured) / max(measured, 1e-9))


def _by_num_tokens(samples: Iterable[Sample]) -> dict[int, list[float]]:
    seconds_of: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        seconds_of[sample.num_tokens].append(sample.seconds)
    return seconds_of


def _seconds_per_pair(chunks: Sequence[Sample]) -> float:
    """0 where there are too few different chunks to tell attention from the rest."""
    seconds_of: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for chunk in chunks:
        seconds_of[chunk.num_tokens, chunk.start].append(chunk.seconds)
    medians = {key: value for key, values in seconds_of.items() if (value := median(values)) > 0}
    if len(medians) < 3:
        return 0.0
    rows = [(1.0, float(n), float(num_pairs(n, start))) for n, start in medians]
    relative = np.array(rows) / np.array(list(medians.values()))[:, None]
    scale = relative.max(axis=0)
    return float(_least_absolute_error(relative / scale)[2] / scale[2])


def _least_absolute_error(design: Floats) -> Floats:
    """Coefficients ≥ 0 that bring `design @ coefficients` to 1 with the least absolute error, by reweighting."""
    weights = np.ones(len(design))
    coefficients = np.zeros(design.shape[1])
    for _ in range(30):
        coefficients = _non_negative_least_squares(design * weights[:, None], weights)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(design @ coefficients - 1.0), 1e-3))
    return coefficients


def _non_negative_least_squares(design: Floats, target: Floats) -> Floats:
    """Exact for a handful of columns: the best of the least-squares solutions over all subsets of columns."""
    num_columns = design.shape[1]
    best, best_error = np.zeros(num_columns), float((target**2).sum())
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            solution = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            error = float(((design[:, chosen] @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = solution
    return best
