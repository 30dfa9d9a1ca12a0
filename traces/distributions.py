"""Distributions that are known by a few quantiles, and draws that have them.

A `QuantileCurve` passes through known quantiles: on the scale of normal scores, where a lognormal distribution is a
straight line, the logarithm of the value is interpolated linearly. Beyond the outermost quantile it stays constant.

Draws are stratified: of n normal scores one falls into each of n equally probable intervals, in random order. So even a
few hundred draws have the distribution's quantiles, and only what is made of several draws varies from seed to seed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["FloatArray", "IntArray", "QuantileCurve", "generator", "normal_scores", "stratified"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NORMAL = NormalDist()
_LARGEST_SCORE = 6.0
_SCORES = np.linspace(-_LARGEST_SCORE, _LARGEST_SCORE, 12_001)
_PROBABILITIES = np.array([_NORMAL.cdf(score) for score in _SCORES])


def generator(seed: int, quantity: str) -> np.random.Generator:
    """Random numbers of one quantity: drawing more or fewer of one leaves the others as they are."""
    return np.random.default_rng((seed, zlib.crc32(quantity.encode())))


def stratified(random: np.random.Generator, size: int) -> FloatArray:
    """`size` numbers between 0 and 1, one in each interval of length `1 / size`, in random order."""
    return (random.permutation(size) + random.random(size)) / max(1, size)


def normal_scores(random: np.random.Generator, size: int) -> FloatArray:
    """`size` stratified draws of the standard normal distribution, none beyond ±6."""
    return np.interp(stratified(random, size), _PROBABILITIES, _SCORES)


@dataclass(frozen=True, slots=True)
class QuantileCurve:
    """Positive values as a function of normal scores.

    Attributes:
        quantiles: from probability, between 0 and 1 exclusively, to value, as items; both increase.

    Raises:
        ConfigurationError: there are fewer than two, or one of them is out of range or order.
    """

    quantiles: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rising = all(p < q and v <= w for (p, v), (q, w) in itertools.pairwise(self.quantiles))
        if len(self.quantiles) < 2 or not rising or not all(0 < p < 1 and v > 0 for p, v in self.quantiles):
            raise ConfigurationError(
                f"quantiles={self.quantiles!r}: give two or more pairs of a probability between 0 and 1 and a value "
                "above 0, both increasing"
            )

    @classmethod
    def of_sample(cls, size: int, quantiles: Mapping[float, float], *, minimum: float, maximum: float) -> QuantileCurve:
        """Through the quantiles of a sample of `size`, and through its extremes at `1 / size` from either end."""
        return cls(((1 / size, minimum), *sorted(quantiles.items()), (1 - 1 / size, maximum)))

    def __call__(self, scores: FloatArray) -> FloatArray:
        """The values at standard normal scores."""
        knots = [_NORMAL.inv_cdf(probability) for probability, _ in self.quantiles]
        logarithms: FloatArray = np.interp(scores, knots, np.log([value for _, value in self.quantiles]))
        return np.exp(logarithms)
