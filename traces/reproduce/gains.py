"""How much better this project's scheduler does than the published one, on the same draws."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS, Figures
from stream2llm_sdk.traces.reproduce.judgement import Judge
from stream2llm_sdk.traces.reproduce.published import PUBLISHED

__all__ = ["BEST_ARM", "Gain", "gains"]

BEST_ARM = "ours SRPF, last victims"
_RIVALS = ("FCFS", "LCAS")
_MODE = "cost"


@dataclass(frozen=True, slots=True)
class Gain:
    """One of our arms, with its cost model, against published FCFS and LCAS under pressure; medians over paired draws.

    Attributes:
        workload: 'crawler' or 'anns'.
        arm: ours.
        p50_ratio, p95_gain, p99_gain: their TTFT over ours. Theirs is, draw by draw, the run of least P99 of both
            policies and all ways of preempting: whichever comes out best after the fact.
        p99_gain_by_way: the same over the better of both policies, by their way of preempting. 'cost' is like with
            like: each system decides by its own cost model.
        throughput_ratio: their time for the whole load over ours.
        longest_wait_s: our longest TTFT in any draw.
    """

    workload: str
    arm: str
    p50_ratio: float
    p95_gain: float
    p99_gain: float
    p99_gain_by_way: Mapping[str, float]
    throughput_ratio: float
    longest_wait_s: float


def gains(judge: Judge) -> list[Gain]:
    """Of all our arms that were run, on each workload of which all published runs under pressure were."""
    found = []
    for workload in ("crawler", "anns"):
        runs = [run for run in PUBLISHED if run.workload == workload and run.is_under_pressure]
        for arm in OUR_ARMS:
            ours = [draw for run in runs if run.mode == _MODE for draw in judge.of(run, arm)]
            theirs = [[judge.of(run, rival) for rival in _RIVALS] for run in runs]
            if ours and all(len(column) == len(ours) for columns in theirs for column in columns):
                by_way = {run.mode: _best(columns) for run, columns in zip(runs, theirs, strict=True)}
                found.append(_gain(workload, arm, ours, by_way))
    return found


def _best(columns: Iterable[Sequence[Figures]]) -> list[Figures]:
    """Draw by draw the run of least P99."""
    return [min(draws, key=lambda figures: figures["ttft_s"][2]) for draws in zip(*columns, strict=True)]


def _gain(workload: str, arm: str, ours: Sequence[Figures], by_way: Mapping[str, Sequence[Figures]]) -> Gain:
    theirs = _best(by_way.values())
    return Gain(
        workload,
        arm,
        p50_ratio=_ratio(theirs, ours, 0),
        p95_gain=_ratio(theirs, ours, 1),
        p99_gain=_ratio(theirs, ours, 2),
        p99_gain_by_way={way: _ratio(rivals, ours, 2) for way, rivals in by_way.items()},
        throughput_ratio=statistics.median(
            float(them["virtual_s"] / us["virtual_s"]) for them, us in zip(theirs, ours, strict=True)
        ),
        longest_wait_s=max(float(us["ttft_max_s"]) for us in ours),
    )


def _ratio(theirs: Sequence[Figures], ours: Sequence[Figures], index: int) -> float:
    """Median of their TTFT over ours, at a percentile."""
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(float(them["ttft_s"][index] / us["ttft_s"][index]) for them, us in pairs)
