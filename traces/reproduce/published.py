"""What Stream2LLM published (MLSys 2026; the tables of its artifact), run by run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["ARMS", "PUBLISHED", "PublishedRun"]

ARMS = ("NON_STREAMING", "DEFAULT_VLLM", "FCFS", "LCAS", "MCPS")
"""Whole prompts on vLLM's own order, and streaming with each policy."""

_PERCENTILES = ("p50", "p95", "p99", "p99_9")


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One published run with all its arms.

    Attributes:
        hardware: 'h200' or 'h100', two of each with tensor parallelism.
        workload: 'crawler' or 'anns'.
        rate_per_s: queries a second.
        delay_multiplier: how much the waits of the retrieval were stretched.
        mode: how it preempted: 'cost', 'recompute' or 'swap'; '' where memory was never short.
        ttft_s: by arm, TTFT from the complete context at P50, P95, P99 and P99.9, in s.
        num_preemptions: by streaming arm, all preemptions and those that swapped; empty where none were published.
    """

    hardware: str
    workload: str
    rate_per_s: float
    delay_multiplier: float
    mode: str
    ttft_s: Mapping[str, tuple[float, ...]]
    num_preemptions: Mapping[str, tuple[int, int]]

    @property
    def is_under_pressure(self) -> bool:
        """Whether waits were stretched, so that open prompts hold more KV than there is."""
        return bool(self.mode)

    @property
    def name(self) -> str:
        """For people."""
        pressure = f", waits ×{self.delay_multiplier:g}, {self.mode}" if self.mode else ""
        return f"{self.hardware.upper()} {self.workload} {self.rate_per_s:g}/s{pressure}"


def _run(rows: Iterable[Mapping[str, str]]) -> PublishedRun:
    by_arm = {row["arm"]: row for row in rows}
    first = by_arm[ARMS[0]]
    values = {arm: tuple(float(row[percentile]) for percentile in _PERCENTILES) for arm, row in by_arm.items()}
    # Speed-ups are printed over vLLM's order with streaming.
    default = values["DEFAULT_VLLM"]
    ttft_s = {
        arm: values[arm]
        if row["kind"] == "ttft_s"
        else tuple(seconds / factor for seconds, factor in zip(default, values[arm], strict=True))
        for arm, row in by_arm.items()
    }
    return PublishedRun(
        first["hardware"],
        first["workload"],
        float(first["rate_per_s"]),
        float(first["delay_multiplier"]),
        first["mode"],
        ttft_s,
        {arm: (int(row["preemptions"]), int(row["swaps"])) for arm, row in by_arm.items() if row["preemptions"]},
    )


def _runs() -> tuple[PublishedRun, ...]:
    by_run: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    with (files(__package__) / "published.csv").open(encoding="utf-8") as table:
        for row in csv.DictReader(table):
            key = tuple(row[name] for name in ("hardware", "workload", "rate_per_s", "delay_multiplier", "mode"))
            by_run.setdefault(key, []).append(row)
    return tuple(_run(rows) for rows in by_run.values())


PUBLISHED = _runs()
"""All published runs."""
