"""Runs published runs again, all or some of them, and reads what such a run has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import read_json_object
from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS, Cell, Fit
from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun
from stream2llm_sdk.traces.reproduce.report import Reproduction
from stream2llm_sdk.traces.reproduce.runner import Journal, run_cells
from stream2llm_sdk.value_checks import is_whole

__all__ = ["JOURNAL_NAME", "load_reproduction", "published_runs", "reproduce"]

JOURNAL_NAME, REPORT_NAME = "cells.jsonl", "reproduction.json"
_RATIO = "invalidated_tokens_ratio"


def published_runs(*parts: str) -> list[PublishedRun]:
    """The published runs whose name holds any of these `parts`, such as 'crawler', 'H200 anns' or '×10'; without any,
    all.

    Raises:
        ConfigurationError: there is none.
    """
    runs = [run for run in PUBLISHED if not parts or any(part in run.name for part in parts)]
    if not runs:
        names = ", ".join(run.name for run in PUBLISHED)
        raise ConfigurationError(f"{' '.join(parts)!r} names none of the runs: {names}")
    return runs


def reproduce(
    runs: Sequence[PublishedRun] = PUBLISHED,
    *,
    arms: Iterable[str] | None = None,
    num_draws: int = 5,
    num_queries: int | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    measure_invalidation: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Reproduction:
    """Serves published runs in virtual time: on the published system's own decisions, and on this project's scheduler.

    Args:
        runs: which; see `published_runs`.
        arms: names of `ARMS` and `OUR_ARMS`; left out, all of them. Under pressure ours run with their cost model only.
        num_draws: of the arrivals; figures are medians over them.
        num_queries: of each run; left out, as many as were published: a run of crawls then takes minutes.
        out: a folder for the journal `cells.jsonl`, with which a run that was stopped goes on; None to keep nothing.
        jobs: processes; left out, as many as there are cores. 1 runs all in this one.
        measure_invalidation: whether real searches of a real index show what the gate and a stable order keep valid;
            it takes about a minute and the extra `diskann`.
        progress: called with the number of cells that are done, of all, and the latest one's name.

    Raises:
        ConfigurationError: an arm is unknown, a number is below 1, or the journal is another run's.
        Stream2LLMError: a cell failed; those that are done are in the journal.
    """
    chosen = (*ARMS, *OUR_ARMS) if arms is None else tuple(arms)
    for name, value in (("num_draws", num_draws), ("num_queries", num_queries), ("jobs", jobs)):
        if not is_whole(value, 1) and (value is not None or name == "num_draws"):
            raise ConfigurationError(f"{name}={value!r:.80} must be a whole number, at least 1")
    if not runs or not chosen:
        raise ConfigurationError("there must be runs and arms")
    cells = [
        Cell.of(run, arm, draw, num_queries)
        for draw in range(num_draws)
        for run in runs
        for arm in chosen
        if arm not in OUR_ARMS or run.mode in ("", "cost")
    ]
    fit = Fit()
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    journal = Journal(None if out is None else Path(out) / JOURNAL_NAME, fit)
    run_cells(cells, fit, journal, jobs=jobs, progress=progress)
    wanted = {cell.key: journal.figures[cell.key] for cell in cells}
    return Reproduction(
        wanted, range(num_draws), fit, num_queries, _kept_ratio(journal) if measure_invalidation else None
    )


def _kept_ratio(journal: Journal) -> float:
    """The ratio of the tokens that updates make void, measured once for each journal."""
    from stream2llm_sdk.traces.reproduce.invalidation import invalidated_tokens_ratio

    if _RATIO not in journal.figures:
        journal.add(_RATIO, {"value": invalidated_tokens_ratio()})
    return float(journal.figures[_RATIO]["value"])


def load_reproduction(folder: str | os.PathLike[str]) -> Reproduction:
    """What `stream2llm reproduce --out folder` came to.

    Args:
        folder: where it was written.

    Raises:
        ConfigurationError: the folder has no `reproduction.json`, or one that cannot be read.
    """
    file = Path(folder) / REPORT_NAME
    if not file.is_file():
        ended = "was stopped: run the same command again" if (Path(folder) / JOURNAL_NAME).is_file() else "is not there"
        raise ConfigurationError(f"{file} is missing: `stream2llm reproduce --out {folder}` writes it, and {ended}")
    document = read_json_object(file, "a reproduction")
    try:
        found = _reproduction(document)
        found.to_markdown()  # looks at everything that was run
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} is damaged ({type(error).__name__}: {error}): run `stream2llm reproduce --out {folder}` again"
        ) from error
    return found


def _reproduction(document: dict[str, Any]) -> Reproduction:
    fit = document["fit"]
    efficiency = tuple((str(hardware), float(share)) for hardware, share in fit["efficiency"])
    figures = {run["cell"]: {name: value for name, value in run.items() if name != "cell"} for run in document["runs"]}
    ratio = document["figures"].get(_RATIO)
    return Reproduction(
        figures,
        [int(draw) for draw in document["draws"]],
        Fit(efficiency, int(fit["num_blocks"]), float(fit["attention_efficiency"])),
        document.get("num_queries"),
        None if ratio is None else float(ratio),
    )
