"""How much better this project's scheduler does than the published one, on the same draws."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS, Figures
from stream2llm_sdk.traces.reproduce.judgement import Judge
from stream2llm_sdk.traces.reproduce.published import PUBLISHED, PublishedRun

__all__ = ["BEST_ARM", "Gain", "gains"]

BEST_ARM = "ours SRPF, last victims"
_RIVALS = ("FCFS", "LCAS")
_MODE = "cost"


@dataclass(frozen=True, slots=True)
class Gain:
    """One of our arms against the better of published FCFS and LCAS under pressure, medians over paired draws.

    Each system has its own cost model choose how it preempts.

    Attributes:
        workload: 'crawler' or 'anns'.
        arm: ours.
        p50_ratio, p95_gain, p99_gain: their TTFT over ours. Theirs is, draw by draw, the run of least P99 of both
            policies.
        p99_gain_over_any: the same where theirs may be any way of preempting, whichever comes out best after the fact;
            None where not all of them were run.
        throughput_ratio: their time for the whole load over ours.
        longest_wait_s: our longest TTFT in any draw.
    """

    workload: str
    arm: str
    p50_ratio: float
    p95_gain: float
    p99_gain: float
    p99_gain_over_any: float | None
    throughput_ratio: float
    longest_wait_s: float


def gains(judge: Judge) -> list[Gain]:
    """Of all our arms that were run, on both workloads."""
    found = []
    for workload in ("crawler", "anns"):
        runs = [run for run in PUBLISHED if run.workload == workload and run.is_under_pressure]
        with_costs = [run for run in runs if run.mode == _MODE]
        for arm in OUR_ARMS:
            ours = [draw for run in with_costs for draw in judge.of(run, arm)]
            theirs = _best(judge, with_costs, len(ours))
            if ours and theirs:
                found.append(_gain(workload, arm, ours, theirs, _best(judge, runs, len(ours))))
    return found


def _best(judge: Judge, runs: list[PublishedRun], num_draws: int) -> list[Figures]:
    """Draw by draw the published system's run of least P99."""
    columns = [judge.of(run, rival) for run in runs for rival in _RIVALS]
    if not columns or any(len(column) != num_draws for column in columns):
        return []
    return [min(draws, key=lambda figures: figures["ttft_s"][2]) for draws in zip(*columns, strict=True)]


def _gain(workload: str, arm: str, ours: list[Figures], theirs: list[Figures], best_of_any: list[Figures]) -> Gain:
    return Gain(
        workload,
        arm,
        p50_ratio=_ratio(theirs, ours, 0),
        p95_gain=_ratio(theirs, ours, 1),
        p99_gain=_ratio(theirs, ours, 2),
        p99_gain_over_any=_ratio(best_of_any, ours, 2) if best_of_any else None,
        throughput_ratio=statistics.median(
            float(them["virtual_s"] / us["virtual_s"]) for them, us in zip(theirs, ours, strict=True)
        ),
        longest_wait_s=max(float(us["ttft_max_s"]) for us in ours),
    )


def _ratio(theirs: list[Figures], ours: list[Figures], index: int) -> float:
    """Median of their TTFT over ours, at a percentile."""
    pairs = zip(theirs, ours, strict=True)
    return statistics.median(float(them["ttft_s"][index] / us["ttft_s"][index]) for them, us in pairs)
