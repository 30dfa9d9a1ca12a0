"""Runs cells in parallel, and keeps what has been run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import write_whole
from stream2llm_sdk.traces.reproduce.cells import Cell, Figures, Fit, assumed, run_cell
from stream2llm_sdk.worker_pool import worker_pool

__all__ = ["Journal", "run_cells"]


class Journal:
    """A file with a line for each cell that was run, so that a run that was stopped goes on where it was; without a
    file what was run is only remembered. A line that is damaged is left out, and its cell runs again.

    Raises:
        ConfigurationError: the file belongs to another fit, is none of ours, or cannot be read or written.
    """

    def __init__(self, file: Path | None, fit: Fit) -> None:
        self._file = file
        self.figures: dict[str, Figures] = {}
        if file is None:
            return
        heading = json.loads(json.dumps({"fit": asdict(fit), "assumed": assumed()}))
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
            if lines and (why := _difference(_entry(lines[0]), heading)):
                raise ConfigurationError(
                    f"{file} holds other runs ({why}): name another folder, or remove this one's journal"
                )
            self.figures.update(_kept(lines[1:]))
            kept = ({"cell": key, "figures": value} for key, value in self.figures.items())
            write_whole(file, "".join(json.dumps(entry) + "\n" for entry in [heading, *kept]))
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be kept: {error}. Give another folder") from error

    def add(self, key: str, figures: Figures) -> None:
        """Keeps the figures of a cell, or of something else that has a name."""
        self.figures[key] = figures
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"cell": key, "figures": figures}) + "\n")
        except OSError as error:
            raise ConfigurationError(f"{self._file} cannot be kept: {error}. Make room, and run again") from error


def _difference(found: object, heading: Mapping[str, Mapping[str, Any]]) -> str:
    """In what a journal's first line differs from the one that this run writes; empty if in nothing."""
    if not isinstance(found, dict):
        return "it does not begin as a journal does"
    for part, expected in heading.items():
        values = found.get(part)
        if not isinstance(values, dict):
            return f"it does not say what was {'fitted' if part == 'fit' else part}"
        for name in sorted({*expected, *values}):
            if values.get(name) != expected.get(name):
                return f"theirs have {name}={values.get(name)!r}, these {expected.get(name)!r}"
    return ""


def _kept(lines: Iterable[str]) -> Iterator[tuple[str, Figures]]:
    """What the lines hold of cells. A run that was stopped may have left a part of one."""
    for line in lines:
        match _entry(line):
            case {"cell": str(key), "figures": {"ttft_s": list()} | {"value": _} as figures}:
                yield key, figures


def _entry(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def run_cells(
    cells: Iterable[Cell],
    fit: Fit,
    journal: Journal,
    *,
    jobs: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Mapping[str, Figures]:
    """Runs the cells that the journal does not have yet, each in one of `jobs` processes.

    Args:
        cells: what to run.
        fit: what was fitted.
        journal: what was run before; it is added to.
        jobs: processes; left out, as many as there are cores. 1 runs them in this one.
        progress: called with the number of cells that are done, of all, and the latest one's name.

    Raises:
        Stream2LLMError: a cell fails; those that are done are in the journal.
    """
    wanted = list(dict.fromkeys(cells))
    left = [cell for cell in wanted if cell.key not in journal.figures]
    num_done = len(wanted) - len(left)
    if progress is not None:
        progress(num_done, len(wanted), "")
    if not left:
        return journal.figures
    # Those of one load together, so that a process need not draw it anew.
    left.sort(key=lambda cell: (cell.workload, cell.delay_multiplier, cell.draw))
    num_jobs = max(1, min(jobs or os.cpu_count() or 1, len(left)))
    for cell, figures in _in_turn(left, fit) if num_jobs == 1 else _in_parallel(left, fit, num_jobs):
        journal.add(cell.key, figures)
        num_done += 1
        if progress is not None:
            progress(num_done, len(wanted), cell.key)
    return journal.figures


def _in_turn(cells: Iterable[Cell], fit: Fit) -> Iterator[tuple[Cell, Figures]]:
    for cell in cells:
        yield cell, run_cell(cell, fit)


def _in_parallel(cells: Iterable[Cell], fit: Fit, num_jobs: int) -> Iterator[tuple[Cell, Figures]]:
    pending: dict[Future[Figures], Cell] = {}
    rest = iter(cells)
    with worker_pool(num_jobs, _quieten) as pool:
        while True:
            for cell in rest:
                pending[pool.submit(run_cell, cell, fit)] = cell
                if len(pending) >= 2 * num_jobs:
                    break
            if not pending:
                return
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()


def _quieten() -> None:
    import warnings

    from stream2llm_sdk.serving.orphans import exit_with_parent
    from stream2llm_sdk.serving.vllm_start import quieten

    exit_with_parent()
    warnings.filterwarnings("ignore")
    quieten()
    import torch

    torch.set_num_threads(1)
