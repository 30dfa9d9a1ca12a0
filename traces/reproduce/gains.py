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
_OUR_MODE = "cost"


@dataclass(frozen=True, slots=True)
class Gain:
    """One of our arms against the better of published FCFS and LCAS under pressure, medians over paired draws.

    Attributes:
        workload: 'crawler' or 'anns'.
        arm: ours, with its cost model choosing how to preempt.
        p50_ratio, p95_gain, p99_gain: their TTFT over ours. Theirs is, draw by draw, the run of least P99 among both
            policies and all ways of preempting.
        throughput_ratio: their time for the whole load over ours.
        longest_wait_s: our longest TTFT in any draw.
    """

    workload: str
    arm: str
    p50_ratio: float
    p95_gain: float
    p99_gain: float
    throughput_ratio: float
    longest_wait_s: float


def gains(judge: Judge) -> list[Gain]:
    """Of all our arms that were run, on both workloads."""
    found = []
    for workload in ("crawler", "anns"):
        runs = [run for run in PUBLISHED if run.workload == workload and run.is_under_pressure]
        for arm in OUR_ARMS:
            ours = [draw for run in runs if run.mode == _OUR_MODE for draw in judge.of(run, arm)]
            theirs = _best(judge, runs, len(ours))
            if ours and theirs:
                found.append(_gain(workload, arm, ours, theirs))
    return found


def _best(judge: Judge, runs: list[PublishedRun], num_draws: int) -> list[Figures]:
    """Draw by draw the published system's run of least P99."""
    columns = [judge.of(run, rival) for run in runs for rival in _RIVALS]
    if not columns or any(len(column) != num_draws for column in columns):
        return []
    return [min(draws, key=lambda figures: figures["ttft_s"][2]) for draws in zip(*columns, strict=True)]


def _gain(workload: str, arm: str, ours: list[Figures], theirs: list[Figures]) -> Gain:
    def ratio(index: int) -> float:
        pairs = zip(theirs, ours, strict=True)
        ratios = [float(them["ttft_s"][index] / us["ttft_s"][index]) for them, us in pairs]
        return statistics.median(ratios)

    times = [float(them["virtual_s"] / us["virtual_s"]) for them, us in zip(theirs, ours, strict=True)]
    longest = max(float(us["ttft_max_s"]) for us in ours)
    return Gain(workload, arm, ratio(0), ratio(1), ratio(2), statistics.median(times), longest)
