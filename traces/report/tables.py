"""The tables of a report: figures of the runs beside each other, tenants, costs, configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stream2llm_sdk.traces.replayed_request import ReplayedRequest
from stream2llm_sdk.traces.report.preemptions import KINDS, Preemption
from stream2llm_sdk.traces.report.reported_run import ReportedRun

__all__ = ["Row", "Table", "configurations", "costs", "figures", "tenants"]

_UNKNOWN = "–"
_PERCENTS = (50, 95, 99)
_MOST_TENANTS = 30
_LONGEST_VALUE = 160
_OTHERS = " others"
_TIMES = (
    ("TTFT from the complete context", "ttft_from_context_complete"),
    ("TTFT from the question", "ttft_from_request"),
    ("until the last token", "e2e_latency"),
    ("send lag", "send_lag"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        name: its heading.
        cells: as many as the table has columns.
        stands_out: whether it is to be emphasised.
    """

    name: str
    cells: tuple[str, ...]
    stands_out: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report.

    Attributes:
        corner: heading of the rows' names.
        columns: headings of the others.
        rows: its rows.
        note: how it is read, "" for nothing to say.
        is_numeric: whether its cells are numbers.
    """

    corner: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    is_numeric: bool = True


def figures(runs: Sequence[ReportedRun]) -> Table:
    """What runs are compared by, a column each."""
    found = [run.run.summary() for run in runs]
    rows = [("state", [run.state for run in runs])]
    rows += [(title, [_number(each[name]) for each in found]) for title, name in _counts()]
    for title, name in _TIMES:
        for percent in _PERCENTS:
            rows.append((f"{title}, P{percent} (s)", [_seconds(each[f"{name}_p{percent}_s"]) for each in found]))
    rows += [(title, [_number(each[name]) for each in found]) for title, name in _totals()]
    rows.append(("share swapped", [_share(each["swap_share"]) for each in found]))
    return Table(
        "figure",
        tuple(run.label for run in runs),
        tuple(Row(title, tuple(cells)) for title, cells in rows),
        "Figures are those of the requests that were answered.",
    )


def _counts() -> Iterator[tuple[str, str]]:
    yield from (("requests answered", "num_requests"), ("failed", "num_failed"), ("aborted", "num_aborted"))


def _totals() -> Iterator[tuple[str, str]]:
    yield "first arrival to last token (s)", "completion_time_s"
    yield "requests per second", "requests_per_s"
    yield "prompt tokens per second", "prompt_tokens_per_s"
    for what in ("computed", "recomputed", "invalidated", "cached", "loaded", "swapped"):
        yield f"tokens {what}", f"num_tokens_{what}"
    yield "preemptions", "num_preemptions"


def tenants(runs: Sequence[ReportedRun]) -> Table | None:
    """Both TTFTs of each tenant of each run that has several; None if no run has."""
    rows = [row for run in runs for row in _tenant_rows(run, with_label=len(runs) > 1)]
    columns = ("answered", *(f"{name}, P{percent} (s)" for name, _ in _TIMES[:2] for percent in _PERCENTS))
    is_cut = any(row.name.endswith(_OTHERS) for row in rows)
    note = f"Only the {_MOST_TENANTS} tenants with the most requests have a row of their own." if is_cut else ""
    return Table("tenant", columns, tuple(rows), note) if rows else None


def _tenant_rows(run: ReportedRun, *, with_label: bool) -> Iterator[Row]:
    by_tenant: dict[str, list[ReplayedRequest]] = defaultdict(list)
    for request in run.run.succeeded:
        by_tenant[request.tenant].append(request)
    if len(by_tenant) < 2:
        return
    ranked = sorted(by_tenant.items(), key=lambda item: (-len(item[1]), item[0]))
    shown = [(name or "(none named)", requests) for name, requests in ranked[:_MOST_TENANTS]]
    if others := ranked[_MOST_TENANTS:]:
        shown.append((f"{len(others):,}{_OTHERS}", [request for _, requests in others for request in requests]))
    for name, requests in shown:
        cells = [f"{len(requests):,}"]
        for _, metric in _TIMES[:2]:
            cells += _percentiles([getattr(request, f"{metric}_s") for request in requests])
        yield Row(f"{run.label}: {name}" if with_label else name, tuple(cells))


def costs(runs: Sequence[ReportedRun]) -> Table | None:
    """How the costs of preemptions compare with what was predicted; None where there were no preemptions."""
    rows = []
    for run in runs:
        for kind in KINDS:
            found = [preemption for preemption in run.preemptions if preemption.kind is kind]
            if found:
                name = f"{run.label}: {kind.value}" if len(runs) > 1 else kind.value
                rows.append(Row(name, _cost_cells(found)))
    columns = ("number", "came back", "at once", "predicted, P50 (s)", "real, P50 (s)")
    ratios = ("real / predicted, P5", "P50", "P95", "within a factor 2")
    note = "At once: the KV was back within the step in which the request was admitted, a real time of 0. "
    note += "Ratios are those of the others."
    return Table("preemptions", columns + ratios, tuple(rows), note) if rows else None


def _cost_cells(found: Sequence[Preemption]) -> tuple[str, ...]:
    returned = [preemption for preemption in found if preemption.actual_s is not None]
    timed = [
        (preemption.predicted_s, preemption.actual_s)
        for preemption in returned
        if preemption.predicted_s and preemption.actual_s
    ]
    ratios = np.array([actual_s / predicted_s for predicted_s, actual_s in timed])
    return (
        f"{len(found):,}",
        f"{len(returned):,}",
        f"{sum(preemption.actual_s == 0 for preemption in returned):,}",
        _seconds(_percentile([each.predicted_s for each in found], 50)),
        _seconds(_percentile([each.actual_s for each in returned], 50)),
        *(_number(_percentile(ratios, percent)) for percent in (5, 50, 95)),
        _share(float(np.mean((ratios >= 0.5) & (ratios <= 2))) if len(ratios) else None),
    )


def configurations(runs: Sequence[ReportedRun]) -> Table:
    """What was replayed, and how; rows in which the runs differ stand out."""
    flat = [dict(_flat(run.config)) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = []
    for name in names:
        cells = tuple(each.get(name, _UNKNOWN) for each in flat)
        rows.append(Row(name, tuple(map(_shortened, cells)), stands_out=len(set(cells)) > 1))
    note = "Rows in which the runs differ are marked." if len(runs) > 1 else ""
    return Table("setting", tuple(run.label for run in runs), tuple(rows), note, is_numeric=False)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, _UNKNOWN if value is None else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"


# ---- cells ----------------------------------------------------------------------------------------------------------


def _percentiles(values: Iterable[float | None]) -> list[str]:
    known = list(values)
    return [_seconds(_percentile(known, percent)) for percent in _PERCENTS]


def _percentile(values: Iterable[float | None], percent: float) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _seconds(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.4f}" if value < 1 else f"{value:,.3f}"


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"
