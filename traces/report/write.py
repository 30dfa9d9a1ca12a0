"""Writes reports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import require_own_folder, require_writable
from stream2llm_sdk.traces.extras import require_matplotlib
from stream2llm_sdk.traces.report.figures import (
    Picture,
    draw_costs,
    draw_memory,
    draw_preemptions,
    draw_queues,
    draw_ttft,
)
from stream2llm_sdk.traces.report.page import page
from stream2llm_sdk.traces.report.perfetto import write_trace
from stream2llm_sdk.traces.report.reported_run import ReportedRun, read_runs
from stream2llm_sdk.traces.report.style import own_style
from stream2llm_sdk.traces.report.timeline import draw_timeline
from stream2llm_sdk.traces.run_folder import RunFolder

__all__ = ["PAGE", "write_report"]

PAGE = "report.html"


def write_report(runs: RunFolder | str | Path | Sequence[RunFolder | str | Path], out: str | Path) -> Path:
    """Reports one run, or several side by side.

    Writes `report.html`, which holds everything but the traces; its figures as PNG files (`ttft`, `timeline`,
    `kv_occupancy`, `queues`, `preemptions`, `costs`); and `trace.json`, for ui.perfetto.dev. Of several runs each has
    its own timeline and trace, with the run's name in the file's.

    Args:
        runs: the folder that a replay wrote, or several. Runs that were stopped, or killed, are reported as far as they
            came, with a warning on the page.
        out: the report's folder; made if need be. Files of an earlier report in it are replaced.

    Returns:
        The page's file.

    Raises:
        ConfigurationError: a run cannot be reported, see `read_runs`, or the folder cannot be written.
        MissingExtraError: matplotlib or pyarrow is not installed.
    """
    require_matplotlib()
    folder = Path(out)
    found = read_runs(runs)
    _prepare(folder)
    endings = _endings([run.label for run in found])
    pictures = _pictures(found, endings)
    trace_files = {label: f"trace{ending}.json" for label, ending in endings.items()}
    try:
        for run in found:
            with _whole(folder / trace_files[run.label]) as file:
                write_trace(run, file)
        for picture in pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.png)
        with _whole(folder / PAGE) as file:
            file.write(page(found, pictures, trace_files))
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error}. Make room, or name another folder") from error
    return folder / PAGE


def _prepare(folder: Path) -> None:
    """Says before the work that its result could not be written."""
    require_own_folder(folder, (PAGE,), "report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("timeline-*.png", "trace-*.json"):  # of an earlier report, of other runs perhaps
            for file in folder.glob(pattern):
                file.unlink()
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made a folder: {error}. Name another") from error
    require_writable(folder / PAGE, "the report")


def _endings(labels: Sequence[str]) -> dict[str, str]:
    """What the names of a run's files end in, by the run's label: nothing where there is only one."""
    if len(labels) == 1:
        return {labels[0]: ""}
    safe = [re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "run" for label in labels]
    # Names that differ only in case are the same file on some systems.
    are_told_apart = len({name.lower() for name in safe}) == len(safe)
    return {
        label: f"-{name}" if are_told_apart else f"-{number}-{name}"
        for number, (label, name) in enumerate(zip(labels, safe, strict=True), 1)
    }


def _pictures(runs: Sequence[ReportedRun], endings: Mapping[str, str]) -> list[Picture]:
    with own_style():
        return [
            draw_ttft(runs),
            *(draw_timeline(run, f"timeline{endings[run.label]}") for run in runs),
            draw_memory(runs),
            draw_queues(runs),
            draw_preemptions(runs),
            draw_costs(runs),
        ]


@contextmanager
def _whole(target: Path) -> Iterator[IO[str]]:
    """A text file to write, which is there whole or not at all."""
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            yield file
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
