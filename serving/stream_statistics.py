"""What streams of one kind have looked like, as decayed sums, and the model that follows from them.

A stream is a chain of events after its opening: chunks, and at last the completion. With k chunks so far the next
event is the completion with probability `hazards[k]`. Growth (tokens) and gaps (seconds) have one distribution each
for the first chunk (it carries the search), for later chunks, and for the completion. Their logarithms have a part
that is the stream's own: log x = mean + effect of the stream + noise. The variances of both parts are the estimates
of Bühlmann and Straub (1970).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream2llm_sdk.errors import ConfigurationError

__all__ = [
    "FIRST",
    "GAP",
    "GROWTH",
    "LAST",
    "LATER",
    "MAX_COUNT",
    "NUM_STREAMS",
    "NUM_SUMS",
    "LogSpread",
    "Moments",
    "StreamModel",
    "StreamPrior",
    "Sums",
]

Sums = NDArray[np.float64]

GROWTH, GAP = 0, 1
FIRST, LATER, LAST = 0, 1, 2

# Streams with more chunks than this share one hazard.
MAX_COUNT = 64
# A hazard with little data of its own leans on the one before it, worth this many streams.
_HAZARD_WEIGHT = 1.0
_MIN_VARIANCE, _MAX_VARIANCE = 0.05**2, 4.0**2
_MIN_GAP_S = 1e-3
_MAX_SCALE = 4.0

# The layout of a vector of sums.
_ENDED = MAX_COUNT + 1
_MOMENTS = 2 * (MAX_COUNT + 1)
_EFFECTS = _MOMENTS + 30
_WHOLE = _EFFECTS + 6
NUM_STREAMS = _WHOLE + 3
NUM_SUMS = NUM_STREAMS + 1


class Moments:
    """The sums of one stream, gathered event by event.

    For each quantity and kind of event there are five numbers: how often, the sum, how often positive, and the sums
    of the positive values' logarithms and of their squares.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [0.0] * 30

    def add(self, quantity: int, kind: int, value: float) -> None:
        values, base = self.values, 15 * quantity + 5 * kind
        values[base] += 1.0
        values[base + 1] += value
        if quantity == GAP and value < _MIN_GAP_S:
            value = _MIN_GAP_S
        if value > 0:
            log = math.log(value)
            values[base + 2] += 1.0
            values[base + 3] += log
            values[base + 4] += log * log

    def sums(self, num_chunks: int, completed: bool, duration_s: float, growth: float) -> Sums:
        """The stream's contribution to its groups. One that was not completed has only outlived its chunks."""
        sums = np.zeros(NUM_SUMS)
        sums[: min(num_chunks, MAX_COUNT) + (1 if completed else 0)] = 1.0
        beyond = num_chunks - MAX_COUNT
        if beyond > 0:
            sums[MAX_COUNT] = beyond + (1 if completed else 0)
        if completed:
            sums[_ENDED + min(num_chunks, MAX_COUNT)] = 1.0
            sums[_WHOLE : _WHOLE + 3] = (1.0, duration_s, growth)
        sums[_MOMENTS:_EFFECTS] = self.values
        for quantity in (GROWTH, GAP):
            num, total = self.values[15 * quantity + 7 : 15 * quantity + 9]
            if num:
                at = _EFFECTS + 3 * quantity
                sums[at : at + 3] = (1.0, total * total / num, num * num)
        sums[NUM_STREAMS] = 1.0
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPrior:
    """What is believed of streams before any was seen, and the weight of it.

    Attributes:
        num_chunks: mean number of chunks (geometric).
        first_gap_s: median seconds from the opening to the first chunk.
        gap_s: median seconds between chunks.
        last_gap_s: median seconds from the last chunk to the completion.
        chunk_tokens: median tokens of a chunk.
        last_tokens: median tokens that come with the completion.
        log_sd: standard deviation of the logarithms of all of these.
        num_streams: how many observed streams the belief counts for.
    """

    num_chunks: float = 5.0
    first_gap_s: float = 1.0
    gap_s: float = 1.0
    last_gap_s: float = 0.1
    chunk_tokens: float = 500.0
    last_tokens: float = 32.0
    log_sd: float = 1.0
    num_streams: float = 4.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} of a stream prior must be a positive number, not {value!r}")

    def sums(self) -> Sums:
        """The sums of `num_streams` streams that are as believed."""
        sums = np.zeros(NUM_SUMS)
        hazard = 1.0 / (1.0 + self.num_chunks)
        sums[: MAX_COUNT + 1] = (1.0 - hazard) ** np.arange(MAX_COUNT + 1)
        sums[MAX_COUNT] /= hazard
        sums[_ENDED:_MOMENTS] = hazard * sums[: MAX_COUNT + 1]
        first, later = 1.0 - hazard, self.num_chunks - (1.0 - hazard)
        variance = self.log_sd**2
        totals = []
        medians = (
            (self.chunk_tokens, self.chunk_tokens, self.last_tokens),
            (self.first_gap_s, self.gap_s, self.last_gap_s),
        )
        for quantity, of_kinds in enumerate(medians):
            total = 0.0
            for kind, (count, median) in enumerate(zip((first, later, 1.0), of_kinds, strict=True)):
                at, log = _MOMENTS + 15 * quantity + 5 * kind, math.log(median)
                amount = count * median * math.exp(variance / 2)
                sums[at : at + 5] = (count, amount, count, count * log, count * (log * log + variance))
                total += amount
            totals.append(total)
            # Part of the variance is the stream's own.
            log = math.log(of_kinds[LATER])
            squares = later * (log * log + variance / 4) + 0.75 * variance
            sums[_EFFECTS + 3 * quantity : _EFFECTS + 3 * quantity + 3] = (1.0, squares, later * later)
        sums[_WHOLE : _WHOLE + 3] = (1.0, totals[GAP], totals[GROWTH])
        sums[NUM_STREAMS] = 1.0
        return sums * self.num_streams


class LogSpread(NamedTuple):
    """One quantity at one kind of event: its mean, and mean and variance of its logarithm."""

    mean: float
    log_mean: float
    log_variance: float


class Effect(NamedTuple):
    """How much of a logarithm's variance lies within streams and how much between them."""

    within: float
    between: float

    def posterior(self, num: float, residual_sum: float) -> tuple[float, float]:
        """Mean and variance of a stream's own effect after `num` of its values, whose logarithms are off by
        `residual_sum` in total."""
        if num <= 0 or self.between <= 0:
            return 0.0, self.between
        trust = num * self.between / (num * self.between + self.within)
        return max(-3.0, min(3.0, trust * residual_sum / num)), self.between * (1.0 - trust)

    def factor(self, posterior: tuple[float, float]) -> float:
        """By how much a stream's values are larger than all streams' mean, for a normal effect."""
        mean, variance = posterior
        return math.exp(mean + (variance - self.between) / 2)


class StreamModel:
    """The distributions that follow from a vector of sums.

    Attributes:
        hazards: probability that the next event is the completion, by number of chunks so far (0 to `MAX_COUNT`).
        chunks_left: expected further chunks, by number of chunks so far.
        growth, gap: `LogSpread` by kind of event (FIRST, LATER, LAST), in tokens and seconds.
        growth_effect, gap_effect: the part of a stream.
        duration_s, total_growth: means of whole streams, from the opening to the completion.
        time_scale, growth_scale: observed means of whole streams over what the chain makes of its parts. They differ
            from 1 where the number of chunks and their sizes or gaps depend on each other.
        num_streams: how many streams the model rests on, decayed, the prior's included.
    """

    __slots__ = (
        "chunks_left",
        "duration_s",
        "gap",
        "gap_effect",
        "growth",
        "growth_effect",
        "growth_scale",
        "hazards",
        "num_streams",
        "time_scale",
        "total_growth",
    )

    def __init__(self, sums: Sums) -> None:
        values: list[float] = sums.tolist()
        self.num_streams = values[NUM_STREAMS]
        self.hazards = _hazards(values[:_ENDED], values[_ENDED:_MOMENTS])
        self.chunks_left = _chunks_left(self.hazards)
        self.growth = _spreads(values, GROWTH)
        self.gap = _spreads(values, GAP)
        self.growth_effect = _effect(values, GROWTH)
        self.gap_effect = _effect(values, GAP)
        num, duration_s, growth = values[_WHOLE : _WHOLE + 3]
        self.duration_s, self.total_growth = duration_s / num, growth / num
        self.time_scale = self._scale(self.duration_s, self.gap)
        self.growth_scale = self._scale(self.total_growth, self.growth)

    def _scale(self, observed: float, parts: tuple[LogSpread, ...]) -> float:
        started = 1.0 - self.hazards[0]
        expected = started * parts[FIRST].mean + (self.chunks_left[0] - started) * parts[LATER].mean + parts[LAST].mean
        if expected <= 0 or observed <= 0:
            return 1.0
        return max(1.0 / _MAX_SCALE, min(_MAX_SCALE, observed / expected))


def _hazards(at_risk: list[float], ended: list[float]) -> list[float]:
    hazard = sum(ended) / sum(at_risk)
    hazards = []
    for risk, end in zip(at_risk, ended, strict=True):
        hazard = (end + _HAZARD_WEIGHT * hazard) / (risk + _HAZARD_WEIGHT)
        hazards.append(hazard)
    return hazards


def _chunks_left(hazards: list[float]) -> list[float]:
    left = [0.0] * len(hazards)
    left[-1] = (1.0 - hazards[-1]) / hazards[-1]
    for count in range(len(hazards) - 2, -1, -1):
        left[count] = (1.0 - hazards[count]) * (1.0 + left[count + 1])
    return left


def _spreads(values: list[float], quantity: int) -> tuple[LogSpread, ...]:
    spreads = []
    for kind in (FIRST, LATER, LAST):
        at = _MOMENTS + 15 * quantity + 5 * kind
        num, total, num_positive, log_sum, log_squares = values[at : at + 5]
        log_mean = log_sum / num_positive if num_positive > 0 else 0.0
        variance = log_squares / num_positive - log_mean**2 if num_positive > 0 else 0.0
        spreads.append(
            LogSpread(total / num if num > 0 else 0.0, log_mean, min(_MAX_VARIANCE, max(_MIN_VARIANCE, variance)))
        )
    return tuple(spreads)


def _effect(values: list[float], quantity: int) -> Effect:
    at = _MOMENTS + 15 * quantity + 5 * LATER
    num, log_sum, log_squares = values[at + 2 : at + 5]
    num_streams, squares, num_squares = values[_EFFECTS + 3 * quantity : _EFFECTS + 3 * quantity + 3]
    if num <= num_streams or num * num <= num_squares:
        return Effect(_MIN_VARIANCE, 0.0)
    within = min(_MAX_VARIANCE, max(_MIN_VARIANCE, (log_squares - squares) / (num - num_streams)))
    excess = squares - log_sum * log_sum / num - max(0.0, num_streams - 1.0) * within
    # Sums that have faded, or lean on a wider group's, can leave next to nothing to divide by.
    between = excess / max(1.0, num - num_squares / num)
    return Effect(within, min(_MAX_VARIANCE, max(0.0, between)))
