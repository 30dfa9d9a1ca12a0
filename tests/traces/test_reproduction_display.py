"""Published runs run again from Python: which are run, what is kept and loaded, and how it shows itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.reproduce import (
    ARMS,
    OUR_ARMS,
    PUBLISHED,
    Reproduction,
    load_reproduction,
    published_runs,
    reproduce,
)
from stream2llm_sdk.traces.reproduce.cells import Cell, Fit

PRESSURE = "H200 crawler 4/s, waits ×10"


def figures_of(factor: float, published: tuple[float, ...]) -> dict[str, Any]:
    return {
        "ttft_s": [factor * seconds for seconds in published],
        "ttft_max_s": 9.0,
        "bound_ttft_s": [0.01, 0.1, 0.2, 0.3],
        "num_preemptions": 3,
        "num_swap_preemptions": 1,
        "virtual_s": 100.0,
        "wall_s": 1.0,
    }


def reproduction(arms: tuple[str, ...], *parts: str, num_queries: int | None = None) -> Reproduction:
    figures = {
        Cell.of(run, arm, 0, num_queries).key: figures_of(0.5, run.ttft_s.get(arm, run.ttft_s["FCFS"]))
        for run in published_runs(*parts)
        for arm in arms
    }
    return Reproduction(figures, range(1), Fit(), num_queries)


def test_runs_are_chosen_by_their_names() -> None:
    assert published_runs() == list(PUBLISHED)
    assert [run.name for run in published_runs("anns 1/s")] == ["H200 anns 1/s", "H100 anns 1/s"]
    with pytest.raises(ConfigurationError, match="'H300' names none of the runs"):
        published_runs("H300")


def test_what_is_run_again_is_loaded_again(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    runs = published_runs("H200 anns 0.25/s")
    made = reproduce(
        runs,
        arms=("NON_STREAMING", "ours SRPF, last victims"),
        num_draws=1,
        num_queries=10,
        out=tmp_path,
        jobs=1,
        progress=lambda done, of, name: seen.append((done, of)),
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert len(made.judge.of(runs[0], "NON_STREAMING")) == 1
    with pytest.raises(ConfigurationError, match="run the same command again"):
        load_reproduction(tmp_path)
    (tmp_path / "reproduction.json").write_text(json.dumps(made.to_dict()), encoding="utf-8")
    loaded = load_reproduction(tmp_path)
    assert loaded.to_dict() == made.to_dict()
    assert loaded.fit == made.fit
    damaged = made.to_dict()
    del damaged["runs"][0]["ttft_s"]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "reproduction.json").write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"is damaged \(KeyError: 'ttft_s'\)"):
        load_reproduction(tmp_path / "damaged")
    again = reproduce(runs, arms=("NON_STREAMING",), num_draws=1, num_queries=10, out=tmp_path, jobs=1)
    assert again.figures_by_cell.items() <= json.loads(json.dumps(made.figures_by_cell)).items()


def test_what_cannot_be_run_or_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no arm 'SJF'"):
        reproduce(published_runs("anns"), arms=("SJF",), num_draws=1)
    for name, wrong in (("num_draws", 0), ("num_draws", "5"), ("num_draws", None), ("num_queries", 2.5), ("jobs", 0)):
        with pytest.raises(ConfigurationError, match=f"{name}={wrong!r} must be a whole number"):
            reproduce(**{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is not there"):
        load_reproduction(tmp_path)
    (tmp_path / "reproduction.json").write_text('{"fit": 3}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is damaged"):
        load_reproduction(tmp_path)


def test_a_reproduction_shows_what_was_fitted_and_the_bound() -> None:
    report = reproduction((*ARMS, *OUR_ARMS), "H200 anns")
    page = report._repr_html_()
    for told in ("retrieval is not in it", "without streaming", "0.50", "over the bound", "prediction", "500 searches"):
        assert told in page.replace("How far from the bound", "over the bound")
    assert page.count("<caption") >= 4
    assert "cells within tolerance anns" in page
    assert report.plot("0.25/s").svg.count("H200 anns 0.25/s") == 1
    with pytest.raises(ConfigurationError, match="'crawler'"):
        report.plot("crawler")
    assert "nothing was run" in Reproduction({}, range(1), Fit())._repr_html_()


def test_a_part_of_the_queries_is_not_judged() -> None:
    page = reproduction(ARMS, "H200 crawler 1/s", num_queries=500)._repr_html_()
    assert "500 queries in each run; published were 4,309 crawls" in page
    assert "within tolerance" not in page.partition("<details")[0]


def test_runs_that_share_an_arm_are_shown_where_they_were_run() -> None:
    # Whole prompts are never preempted: that cell is the same for all ways of preempting.
    cells = {
        **reproduction(ARMS, f"{PRESSURE}, recompute").figures_by_cell,
    }
    page = Reproduction(cells, range(1), Fit())._repr_html_()
    assert f"{PRESSURE}, recompute" in page
    assert f"{PRESSURE}, swap" not in page
