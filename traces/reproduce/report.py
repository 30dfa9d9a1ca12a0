"""The matrix beside the published tables, as figures and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS, Figures, Fit
from stream2llm_sdk.traces.reproduce.gains import BEST_ARM, Gain, gains
from stream2llm_sdk.traces.reproduce.judgement import PERCENTILES, TOLERANCES, CellJudgement, Judge
from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = ["FITTED", "Reproduction"]

FITTED = (
    "Fitted: the shares of its peak that each device reaches in linear layers and in attention, to P50, P95 and P99 "
    "without streaming at the two lowest rates of each workload; and the number of KV blocks of the crawls under "
    "pressure, to the preemptions of all policies where victims are recomputed. The step's overhead (3 ms) and "
    "messaging (2 ms) are assumed; traces are drawn from the published statistics; what one of the published system's "
    "many small copies takes (6 µs, and 2 µs in the profile that its decisions rest on) and the time of a search "
    "before its first top-k are taken from measurements elsewhere. All else is prediction."
)
"""What was fitted to published figures, and what is assumed, for people."""

_MEANINGS = {
    "cells_within_tolerance_crawler": "share of the crawls' cells that noise between runs explains",
    "cells_within_tolerance_anns": "share of the vector searches'",
    "orderings_reproduced": "share of the orderings that noise does not explain, which come out",
    "preemptions_within_factor_2": "share of the runs under pressure",
    "speed_over_real_time": "seconds of crawls at 4 a second that are simulated in one",
    "p99_gain_crawler": "P99 of the best published run under pressure over ours",
    "p99_gain_anns": "P99 of the best published run under pressure over ours",
    "p50_ratio": "P50 of that run over ours, the lesser of both workloads",
    "throughput_ratio": "the time of that run over ours, the lesser of both workloads",
    "invalidated_tokens_ratio": "tokens that updates make void by rank, over those with gate and a stable order; of "
    "real searches, so that it differs from run to run",
}


@dataclass(frozen=True)
class Reproduction:
    """What came out of the matrix.

    Attributes:
        figures_by_cell: of every cell that was run, by its key.
        draws: of the arrivals.
        fit: all that was fitted.
        num_queries: of each run; None for as many as were published.
        invalidated_tokens_ratio: see `invalidation`; None if it was not measured.
    """

    figures_by_cell: Mapping[str, Figures] = field(repr=False)
    draws: Sequence[int]
    fit: Fit
    num_queries: int | None = None
    invalidated_tokens_ratio: float | None = None

    @property
    def judge(self) -> Judge:
        """What compares it with the published figures."""
        return Judge(self.figures_by_cell, self.draws, self.num_queries)

    @property
    def figures(self) -> dict[str, float]:
        """The figures that a benchmark is asked for, by name; those that were not run are left out."""
        judge = self.judge
        found: dict[str, float] = {}
        for workload in ("crawler", "anns"):
            if judge.cells(workload):
                found[f"cells_within_tolerance_{workload}"] = judge.share_inside(workload)
        if orderings := judge.orderings():
            found["orderings_reproduced"] = sum(ordering.holds for ordering in orderings) / len(orderings)
        if counts := judge.preemptions():
            found["preemptions_within_factor_2"] = sum(count.is_inside for count in counts) / len(counts)
        if speed := self._speed_over_real_time():
            found["speed_over_real_time"] = speed
        best = {gain.workload: gain for gain in gains(judge) if gain.arm == BEST_ARM}
        for workload, gain in best.items():
            found[f"p99_gain_{workload}"] = gain.p99_gain
        if best:
            found["p50_ratio"] = min(gain.p50_ratio for gain in best.values())
            found["throughput_ratio"] = min(gain.throughput_ratio for gain in best.values())
        if self.invalidated_tokens_ratio is not None:
            found["invalidated_tokens_ratio"] = self.invalidated_tokens_ratio
        return found

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file: the figures, every cell's run, and what was judged."""
        judge = self.judge
        return {
            "figures": self.figures,
            "fit": asdict(self.fit),
            "draws": list(self.draws),
            "num_queries": self.num_queries,
            "runs": [{"cell": key, **figures} for key, figures in self.figures_by_cell.items()],
            "gains": [asdict(gain) for gain in gains(judge)],
            "orderings": [{**asdict(ordering), "holds": ordering.holds} for ordering in judge.orderings()],
        }

    def to_markdown(self) -> str:
        """All tables, with the cells that miss."""
        return "\n".join(self._lines()) + "\n"

    def plot(self, *parts: str) -> Plot:
        """Simulated TTFT beside the published one and the bound, at P50, P95 and P99.

        Args:
            parts: only runs whose name holds any of them; left out, the first few that were run.

        Raises:
            ConfigurationError: no such run was run.
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.display.reproduction_plot import reproduction_plot

        return reproduction_plot(self, parts)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.reproduction_view import reproduction_html

        return reproduction_html(self)

    # ---- Markdown -----------------------------------------------------------------------------------------------

    def _lines(self) -> Iterator[str]:
        yield "# The published tables in virtual time"
        num_draws = len(self.draws)
        yield f"\nMedians of {num_draws} arrival draw{'s' * (num_draws > 1)}. {FITTED}"
        if self.num_queries is not None:
            yield f"\n**Each run has {self.num_queries} queries, not as many as were published: percentiles differ.**"
        yield "\n| figure | value | what it is |\n|---|---|---|"
        yield from (f"| `{name}` | {value:.3f} | {_MEANINGS[name]} |" for name, value in self.figures.items())
        yield "\n## TTFT from the complete context: simulated / published, P50 · P95 · P99 in s; a miss is marked ✗"
        yield f"\nThe published system's own decisions, run here. {TOLERANCES}"
        for workload in ("crawler", "anns"):
            yield from self._cells(workload)
        yield from self._pressure()
        yield from self._preemptions()
        yield from self._orderings()
        yield from self._ours()
        yield from self._gains()

    def _cells(self, workload: str) -> Iterator[str]:
        cells = self.judge.cells(workload)
        if not cells:
            return
        yield f"\n| {workload} | " + " | ".join(_arm_names()) + " |\n|---|" + "---|" * len(ARMS)
        by_run: dict[str, dict[str, CellJudgement]] = {}
        for cell in cells:
            by_run.setdefault(cell.run.name, {})[cell.arm] = cell
        for name, by_arm in by_run.items():
            yield f"| {name} | " + " | ".join(_cell_text(by_arm.get(arm)) for arm in ARMS) + " |"
        misses = [cell for cell in cells if not all(cell.is_inside)]
        yield f"\n{len(cells) * 3 - sum(sum(cell.is_inside) for cell in cells)} of {len(cells) * 3} cells miss" + (
            f", in {', '.join(f'{cell.run.name} {cell.arm}' for cell in misses)}." if misses else "."
        )

    def _pressure(self) -> Iterator[str]:
        judge = self.judge
        runs = [run for run in PUBLISHED if run.is_under_pressure and any(judge.of(run, arm) for arm in ARMS)]
        if not runs:
            return
        yield "\n## Under pressure: TTFT, simulated / published\n"
        yield "| | " + " | ".join(_arm_names()) + " |\n|---|" + "---|" * len(ARMS)
        for run in runs:
            texts = [_pairs(judge.ttft_s(run, arm), run.ttft_s[arm][:3]) if judge.of(run, arm) else "–" for arm in ARMS]
            yield f"| {run.name} | " + " | ".join(texts) + " |"

    def _preemptions(self) -> Iterator[str]:
        counts = self.judge.preemptions()
        if not counts:
            return
        yield "\n## Preemptions: simulated / published (share that swapped)\n"
        yield "| | " + " | ".join(ARMS[1:]) + " |\n|---|" + "---|" * (len(ARMS) - 1)
        by_run: dict[str, dict[str, str]] = {}
        for count in counts:
            shares = " / ".join(
                f"{swaps / total:.0%}" if total else "–"
                for swaps, total in ((count.num_swaps, count.num_preemptions), (count.published_swaps, count.published))
            )
            text = f"{count.num_preemptions:.0f} / {count.published} ({shares}){'' if count.is_inside else ' ✗'}"
            by_run.setdefault(count.run.name, {})[count.arm] = text
        for name, by_arm in by_run.items():
            yield f"| {name} | " + " | ".join(by_arm.get(arm, "–") for arm in ARMS[1:]) + " |"

    def _orderings(self) -> Iterator[str]:
        orderings = self.judge.orderings()
        if orderings:
            yield "\n## Orderings that noise does not explain\n\n| claim | ours | at least | holds |\n|---|---|---|---|"
        for ordering in orderings:
            holds = "yes" if ordering.holds else "no"
            yield f"| {ordering.claim} | {ordering.value:.2f} | {ordering.least:g} | {holds} |"

    def _ours(self) -> Iterator[str]:
        judge = self.judge
        runs = [run for run in PUBLISHED if any(judge.of(run, arm) for arm in OUR_ARMS)]
        if not runs:
            return
        yield "\n## This project's scheduler: P50 · P95 · P99 in s"
        yield (
            "\nBound: what the last chunk's prefill takes each request alone on an idle machine. It is no schedule's: "
            "under load some must wait.\n"
        )
        yield "| | " + " | ".join(OUR_ARMS) + " | bound |\n|---|" + "---|" * (len(OUR_ARMS) + 1)
        for run in runs:
            texts = [_seconds(judge.ttft_s(run, arm)) if judge.of(run, arm) else "–" for arm in OUR_ARMS]
            yield f"| {run.name} | " + " | ".join(texts) + f" | {_seconds(_bound(judge, run))} |"

    def _gains(self) -> Iterator[str]:
        found = gains(self.judge)
        if found:
            ways = " · ".join(found[0].p99_gain_by_way)
            yield "\n## Ours against the better of published FCFS and LCAS under pressure, paired"
            yield (
                "\nOurs always with its cost model. Theirs is, draw by draw, the run of least P99, whatever the policy "
                "and the way of preempting; then the same by their way of preempting, where cost is like with like.\n"
            )
            yield "Last victims: the idle stream that will be complete last loses its KV first (`LATEST_COMPLETION`).\n"
            yield f"| workload | arm | P50 | P95 | P99 | P99 by {ways} | throughput | longest wait |"
            yield "|---|---|---|---|---|---|---|---|"
        yield from map(_gain_line, found)

    # ---- parts --------------------------------------------------------------------------------------------------

    def _speed_over_real_time(self) -> float | None:
        judge = self.judge
        runs = [run for run in PUBLISHED if run.name == "H200 crawler 4/s"]
        speeds = [draw["virtual_s"] / draw["wall_s"] for run in runs for arm in ARMS for draw in judge.of(run, arm)]
        return statistics.median(speeds) if speeds else None


def _arm_names() -> list[str]:
    return ["without streaming", *ARMS[1:]]


def _cell_text(cell: CellJudgement | None) -> str:
    return "–" if cell is None else _pairs(cell.ttft_s, cell.published_s, cell.is_inside)


def _pairs(ours: Sequence[float], published: Sequence[float], is_inside: Iterable[bool] | None = None) -> str:
    marks = [True] * len(PERCENTILES) if is_inside is None else is_inside
    return " · ".join(
        f"{us:.3g}/{them:.3g}{'' if inside else ' ✗'}" for us, them, inside in zip(ours, published, marks, strict=True)
    )


def _seconds(values: Sequence[float]) -> str:
    return " · ".join(f"{value:.3g}" for value in values)


def _bound(judge: Judge, run: PublishedRun) -> tuple[float, ...]:
    draws = [draw for arm in OUR_ARMS for draw in judge.of(run, arm)]
    return tuple(statistics.median(float(draw["bound_ttft_s"][index]) for draw in draws) for index in range(3))


def _gain_line(gain: Gain) -> str:
    by_way = " · ".join(f"{gained:.2f}×" for gained in gain.p99_gain_by_way.values())
    return (
        f"| {gain.workload} | {gain.arm} | {gain.p50_ratio:.2f}× | {gain.p95_gain:.2f}× | {gain.p99_gain:.2f}× | "
        f"{by_way} | {gain.throughput_ratio:.3f}× | {gain.longest_wait_s:.1f} s |"
    )
