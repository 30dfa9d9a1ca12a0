"""When questions come: at random, in bursts, or as they were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals_file import read_arrival_times
from stream2llm_sdk.traces.distributions import FloatArray, generator
from stream2llm_sdk.value_checks import is_number, is_whole, plain, plain_numbers

__all__ = ["Arrivals", "read_arrivals"]

_MOST_VARIATION, _MOST_AT_ONCE = 1_000, 10_000_000
_MOST_ARRIVALS, _MOST_SEED = 1_000_000_000, 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A process of arrivals: random ones, recorded ones, bursts, or bursts beside one of the others.

    Attributes:
        rate_per_s: how many come a second on average at random; None for none.
        variation: of the random waits, standard deviation over mean. 1 is a Poisson process; more comes in clusters,
            less more evenly (gamma-distributed waits), 0 like a clock.
        recorded_s: times in seconds, none negative, in any order; instead of random ones. See `read_arrivals`.
        burst_every_s: seconds between bursts; the first comes after as many. None for none.
        burst_size: how many come at once.

    Raises:
        ConfigurationError: nothing ever comes, two of them exclude each other, or a number is out of range.
    """

    rate_per_s: float | None = None
    variation: float = 1.0
    recorded_s: tuple[float, ...] | None = None
    burst_every_s: float | None = None
    burst_size: int = 0

    def __post_init__(self) -> None:
        plain_numbers(self)
        for name in ("rate_per_s", "burst_every_s"):
            value = getattr(self, name)
            if value is not None and not is_number(value, above=True):
                raise ConfigurationError(f"{name}={value!r:.80} must be finite and above 0")
        if not is_number(self.variation, 0, _MOST_VARIATION):
            raise ConfigurationError(
                f"variation={self.variation!r:.80} must be 0 to {_MOST_VARIATION}; 1 is a Poisson process"
            )
        if not is_whole(self.burst_size, 0, _MOST_AT_ONCE):
            raise ConfigurationError(
                f"burst_size={self.burst_size!r:.80} must be a whole number of 0 to {_MOST_AT_ONCE:,}"
            )
        if (self.burst_every_s is None) != (self.burst_size == 0):
            raise ConfigurationError(
                f"burst_every_s={self.burst_every_s!r} and burst_size={self.burst_size!r} go together: give both"
            )
        if self.rate_per_s is not None and self.recorded_s is not None:
            raise ConfigurationError("give either rate_per_s or recorded_s, not both")
        if self.rate_per_s is None and self.recorded_s is None and self.burst_every_s is None:
            raise ConfigurationError("nothing ever comes: give rate_per_s, recorded_s, or burst_every_s and burst_size")
        if self.recorded_s is not None:
            object.__setattr__(self, "recorded_s", _checked_times(self.recorded_s))

    def draw(self, num_arrivals: int, *, seed: int) -> FloatArray:
        """The first `num_arrivals` times in seconds, in order. The same `seed` gives the same times.

        Raises:
            ConfigurationError: so many were not recorded.
        """
        num_arrivals, seed = plain(num_arrivals), plain(seed)
        for name, value, most in (("num_arrivals", num_arrivals, _MOST_ARRIVALS), ("seed", seed, _MOST_SEED)):
            if not is_whole(value, 0, most):
                raise ConfigurationError(f"{name}={value!r:.80} must be a whole number of 0 to {most:,}")
        times = np.concatenate([self._alone(num_arrivals, seed), self._bursts(num_arrivals)])
        if len(times) < num_arrivals:
            raise ConfigurationError(
                f"{num_arrivals} arrivals were asked for, and {len(times)} are recorded: ask for fewer"
            )
        return np.sort(times)[:num_arrivals]

    def _alone(self, num_arrivals: int, seed: int) -> FloatArray:
        if self.recorded_s is not None:
            return np.array(self.recorded_s, dtype=np.float64)
        if self.rate_per_s is None:
            return np.empty(0)
        random, mean_s, squared = generator(seed, "arrivals"), 1 / self.rate_per_s, self.variation**2
        if not squared:
            return np.arange(1, num_arrivals + 1, dtype=np.float64) * mean_s
        return np.cumsum(random.gamma(1 / squared, mean_s * squared, num_arrivals))

    def _bursts(self, num_arrivals: int) -> FloatArray:
        if self.burst_every_s is None:
            return np.empty(0)
        num_bursts = -(-num_arrivals // self.burst_size)
        return np.repeat(self.burst_every_s * np.arange(1, num_bursts + 1), self.burst_size)


def read_arrivals(path: str | Path, *, delays: bool = False) -> Arrivals:
    """Recorded arrivals from a file of times or delays; see `read_arrival_times` for the arguments and errors."""
    return Arrivals(recorded_s=tuple(read_arrival_times(path, delays=delays)))


def _checked_times(times: Any) -> tuple[float, ...]:
    try:
        checked = () if isinstance(times, (str, bytes)) else tuple(map(plain, times))
    except TypeError:
        checked = ()
    if not checked:
        raise ConfigurationError(f"recorded_s={times!r:.80} must be one or more times in seconds")
    for time_s in checked:
        if not is_number(time_s):
            raise ConfigurationError(f"recorded_s holds {time_s!r:.80}: all must be finite numbers, 0 or more")
    return tuple(map(float, checked))
