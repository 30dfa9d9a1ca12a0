"""Files of arrivals: one number of seconds a line, as times or as the waits between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.checked_files import exact_number, read_text
from stream2llm_sdk.traces.trace import Trace

__all__ = ["read_arrival_times", "with_arrivals", "write_arrival_times"]

_MAX_BYTES = 1 << 26


def read_arrival_times(path: str | Path, *, delays: bool) -> list[float]:
    """The times of a file in seconds; blank lines are skipped.

    Args:
        path: the file.
        delays: its numbers are waits, each since the arrival before and the first since the start, as in the published
            `poisson_delays_*.txt`. Otherwise they are times, and must not decrease.

    Raises:
        TraceError: the file cannot be read or has no numbers, or a line is no finite number, 0 or more, or less than
            the one before; it names the line.
    """
    file = Path(path)
    if not file.is_file():
        raise TraceError("there is no such file", file=file)
    times: list[float] = []
    time_s = Fraction(0)
    for number, line in enumerate(read_text(file, _MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            seconds = exact_number(line)
            if not delays and seconds < time_s:
                raise ValueError(f"{line.strip()!r:.80} is before the time above, {float(time_s)!r}")
            time_s = time_s + seconds if delays else seconds
            times.append(float(time_s))
        except (ValueError, OverflowError) as error:
            raise TraceError(str(error), file=file, row=number) from None
    if not times:
        raise TraceError("there are no numbers", file=file)
    return times


def write_arrival_times(times_s: Sequence[float], path: str | Path, *, delays: bool) -> None:
    """Writes times, or the waits between them, so that `read_arrival_times` gives exactly the same floats.

    Args:
        times_s: in seconds, in their order.
        path: the file.
        delays: write waits, each since the arrival before.

    Raises:
        ConfigurationError: there are none, they decrease, one is negative or not finite, or they cannot be written.
    """
    lines, before = [], Fraction(0)
    if not times_s:
        raise ConfigurationError("there are no arrivals to write")
    for time_s in times_s:
        try:
            exact = exact_number(repr(float(time_s)))
        except ValueError as error:
            raise ConfigurationError(f"an arrival of {time_s!r}: {error}") from None
        if exact < before:
            raise ConfigurationError(f"arrivals decrease from {float(before)!r} s to {time_s!r} s: sort them")
        lines.append(_decimal(exact - before if delays else exact))
        before = exact
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"arrivals cannot be written to {str(path)!r}: {error}") from error


def with_arrivals(traces: Sequence[Trace], times_s: Sequence[float]) -> list[Trace]:
    """Copies of the traces that come at these times, the first trace at the first.

    Args:
        traces: the traces.
        times_s: in seconds, at least one for each trace.

    Raises:
        ConfigurationError: there are fewer times than traces.
    """
    if len(times_s) < len(traces):
        raise ConfigurationError(f"{len(times_s):,} arrivals for {len(traces):,} traces: give as many, or fewer traces")
    return [replace(trace, arrival_s=float(time_s)) for trace, time_s in zip(traces, times_s, strict=False)]


def _decimal(value: Fraction) -> str:
    """All decimal digits of a number whose denominator divides a power of ten."""
    digits = 0
    while (10**digits) % value.denominator:
        digits += 1
    text = f"{value.numerator * (10**digits // value.denominator):0{digits + 1}d}"
    return f"{text[:-digits]}.{text[-digits:]}" if digits else text
