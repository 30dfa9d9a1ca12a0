"""Runs as a report needs them: read, checked and named."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.replay_run import ReplayRun, RunState
from stream2llm_sdk.traces.replayed_request import ENGINE, ReplayedRequest
from stream2llm_sdk.traces.report.phases import Mark, RequestTrail, request_trail
from stream2llm_sdk.traces.report.preemptions import Preemption, preemptions_of
from stream2llm_sdk.traces.run_folder import (
    EVENT_COLUMNS,
    REQUEST_COLUMNS,
    SAMPLE_COLUMNS,
    TABLES,
    WAY_OUT,
    RunFolder,
)
from stream2llm_sdk.traces.run_keeper import load_run
from stream2llm_sdk.trail import EventType

__all__ = ["ReportedRun", "read_runs"]

_COLUMNS = {"requests": REQUEST_COLUMNS, "events": EVENT_COLUMNS, "samples": SAMPLE_COLUMNS}


@dataclass(frozen=True)
class ReportedRun:
    """A run to be reported.

    Attributes:
        label: its name in the report, unlike any other's.
        folder: where it was read.
        run: its requests and figures.
        state: 'complete', 'stopped', 'failed' or 'interrupted'.
        warnings: what keeps its figures from being taken at face value.
        trails: of its requests, in the order of their arrivals.
        samples: how the engine stood; a column each, NaN where unknown.
    """

    label: str
    folder: RunFolder
    run: ReplayRun
    state: str
    warnings: Sequence[str]
    trails: Sequence[RequestTrail]
    samples: Mapping[str, npt.NDArray[np.float64]]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.run.config

    @cached_property
    def preemptions(self) -> list[Preemption]:
        return preemptions_of(self.trails)

    @cached_property
    def end_s(self) -> float:
        """When the last request or sample was; 0 for an empty run."""
        sampled = self.samples["run_s"]
        ends = [trail.end_s for trail in self.trails]
        return max([*ends, float(sampled.max()) if sampled.size else 0.0], default=0.0)

    @property
    def has_trails(self) -> bool:
        """Whether its engine told what its requests were doing."""
        return any(trail.marks for trail in self.trails)


def read_runs(runs: RunFolder | str | Path | Iterable[RunFolder | str | Path]) -> list[ReportedRun]:
    """Reads one run or several; each gets the shortest name that tells it from the others.

    Raises:
        ConfigurationError: none is given, one is given twice, or one cannot be reported: it is no run's folder, not a
            single request of it has ended, or its files are damaged.
        MissingExtraError: pyarrow is not installed.
    """
    several = [runs] if isinstance(runs, (RunFolder, str, Path)) else runs
    folders = [run if isinstance(run, RunFolder) else RunFolder.open(run) for run in several]
    if not folders:
        raise ConfigurationError("there is no run to report: give the folder that a replay wrote, or several")
    paths = [folder.path.resolve() for folder in folders]
    for path, times in Counter(paths).items():
        if times > 1:
            raise ConfigurationError(f"the run {path} is given {times} times: give each once")
    return [_read(folder, label) for folder, label in zip(folders, _labels(paths), strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    labels = [path.name or str(path) for path in paths]
    length = 1
    while len(set(labels)) < len(labels):
        length += 1
        labels = ["/".join(path.parts[-length:]) for path in paths]
    return labels


def _read(folder: RunFolder, label: str) -> ReportedRun:
    if not folder.path.is_dir():
        raise ConfigurationError(f"{folder.path} is no folder: give the folder that a replay wrote")
    summary = folder.summary()
    state = summary.get("state")
    if state not in (*RunState, "interrupted"):
        raise ConfigurationError(f"{folder.summary_file} has state={state!r}, which no run has. {WAY_OUT}")
    tables = {name: _table(folder, name) for name in TABLES}
    try:
        run = load_run(folder)
        for request in run.requests:
            _require_times(request)
        samples = _samples(tables["samples"])
        marks = _marks(tables["events"], folder)
        trails = [request_trail(request, marks.get(request.request_id, ())) for request in run.requests]
        trails.sort(key=lambda trail: trail.request.arrival_s)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{folder.path} is damaged: {type(error).__name__} {error} while reading it. {WAY_OUT}"
        ) from error
    if not trails and state == "interrupted":
        raise ConfigurationError(
            f"{folder.path}: no request of this run has ended. Wait for it, or continue it with the same replay"
        )
    warnings = dict.fromkeys([*map(str, summary.get("warnings") or ()), *run.warnings])
    return ReportedRun(label, folder, run, str(state), list(warnings), trails, samples)


def _require_times(request: ReplayedRequest) -> None:
    optional = (request.context_complete_s, request.first_token_s, request.finished_s)
    for at_s in (request.arrival_s, *request.send_s, *(at_s for at_s in optional if at_s is not None)):
        if not math.isfinite(at_s):
            raise ValueError(f"a time of request {request.request_id!r} is {at_s}")


def _table(folder: RunFolder, name: str) -> Any:
    file = folder.table_file(name)
    try:
        table = getattr(folder, name)()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}. {WAY_OUT}") from error
    missing = [column for column in _COLUMNS[name] if column not in table.column_names]
    if missing:
        raise ConfigurationError(f"{file} lacks the column {missing[0]!r}. {WAY_OUT}")
    return table


def _marks(events: Any, folder: RunFolder) -> dict[str, list[Mark]]:
    """Each request's trail."""
    found: dict[str, list[Mark]] = defaultdict(list)
    columns = ("request_id", "source", "event", "run_s", "data")
    for row, (request_id, source, event, run_s, data) in enumerate(
        zip(*(events[column].to_pylist() for column in columns), strict=True), 1
    ):
        if source != ENGINE:
            continue
        try:
            if not math.isfinite(run_s):
                raise ValueError(f"run_s={run_s!r}")
            # JSON has no number for what Python writes as NaN: it stays a word.
            figures = {} if data == "{}" else dict(json.loads(data, parse_constant=str))
            mark = Mark(EventType(event), run_s, figures)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{folder.table_file('events')}, row {row}: no event of a trail ({error}). {WAY_OUT}"
            ) from error
        found[request_id].append(mark)
    for marks in found.values():
        marks.sort(key=lambda mark: (mark.run_s, mark.type.is_terminal))
    return found


def _samples(table: Any) -> dict[str, npt.NDArray[np.float64]]:
    columns = {name: np.array(table[name].to_pylist(), dtype=np.float64) for name in SAMPLE_COLUMNS}
    if not np.isfinite(columns["run_s"]).all():
        raise ValueError("a sample has no time")
    order = np.argsort(columns["run_s"], kind="stable")
    return {name: values[order] for name, values in columns.items()}
