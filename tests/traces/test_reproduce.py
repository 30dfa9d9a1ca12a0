"""The published tables run again: what is run, how it is judged, and that a stopped run goes on."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from stream2llm_sdk.cli import app
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.placement import ChunkOrder, arranged
from stream2llm_sdk.serving.simulator.clock import StepFacts
from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest
from stream2llm_sdk.traces.reproduce import matrix, runner
from stream2llm_sdk.traces.reproduce.bound import last_prefill_s
from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS, Cell, Fit, assumed
from stream2llm_sdk.traces.reproduce.gains import BEST_ARM, Gain, gains
from stream2llm_sdk.traces.reproduce.judgement import Judge, tolerances
from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun
from stream2llm_sdk.traces.reproduce.report import Reproduction
from stream2llm_sdk.traces.reproduce.runner import Journal, run_cells


def run_named(name: str) -> PublishedRun:
    (found,) = (run for run in PUBLISHED if run.name == name)
    return found


def figures_of(run: PublishedRun, arm: str, factor: float = 1.0) -> dict[str, Any]:
    """What a cell gives that comes out at `factor` of what was published."""
    published = run.ttft_s.get(arm, run.ttft_s["FCFS"])
    total, swaps = run.num_preemptions.get(arm, (0, 0))
    return {
        "ttft_s": [factor * seconds for seconds in published],
        "ttft_max_s": 10 * factor,
        "ttft_curve_s": [factor * published[0]] * 110,
        "bound_ttft_s": [0.01] * 4,
        "num_preemptions": round(factor * total),
        "num_swap_preemptions": round(factor * swaps),
        "invalidated_tokens": [0.0, 100.0],
        "virtual_s": 1_000.0,
        "wall_s": 4.0,
    }


def as_published(factor: float = 1.0, draws: int = 1) -> dict[str, Any]:
    return {
        Cell.of(run, arm, draw).key: figures_of(run, arm, factor)
        for run in PUBLISHED
        for arm in (*ARMS, *OUR_ARMS)
        for draw in range(draws)
    }


# ---- what was published ---------------------------------------------------------------------------------------------


def test_the_published_tables_are_whole() -> None:
    assert len(PUBLISHED) == 22
    assert all(set(run.ttft_s) == set(ARMS) for run in PUBLISHED)
    assert sum(len(run.num_preemptions) for run in PUBLISHED) == 24
    pressure = run_named("H200 crawler 4/s, waits ×10, recompute")
    assert pressure.num_preemptions["LCAS"] == (12_564, 0)
    assert pressure.ttft_s["FCFS"][2] == pytest.approx(0.893, abs=5e-4)
    assert run_named("H200 crawler 4/s").ttft_s["NON_STREAMING"][:3] == (0.7521, 4.3418, 5.4011)


def test_a_whole_prompt_is_one_cell_whatever_preempts() -> None:
    runs = [run for run in PUBLISHED if run.workload == "anns" and run.is_under_pressure]
    assert len({Cell.of(run, "NON_STREAMING", 0).key for run in runs}) == 1
    assert len({Cell.of(run, "FCFS", 0).key for run in runs}) == 3
    with pytest.raises(ConfigurationError, match="no arm 'SJF'"):
        Cell.of(runs[0], "SJF", 0)


# ---- judging --------------------------------------------------------------------------------------------------------


def test_what_was_published_is_judged_to_be_what_was_published() -> None:
    report = Reproduction(as_published(draws=2), range(2), Fit(), invalidated_tokens_ratio=20.0)
    figures = report.figures
    assert figures["cells_within_tolerance_crawler"] == figures["cells_within_tolerance_anns"] == 1.0
    assert figures["orderings_reproduced"] == figures["preemptions_within_factor_2"] == 1.0
    assert figures["speed_over_real_time"] == 250.0
    assert figures["invalidated_tokens_ratio"] == 20.0
    assert "✗" not in report.to_markdown().split("is marked ✗")[1]
    json.dumps(report.to_dict())


def test_what_is_beyond_the_noise_misses_and_is_listed() -> None:
    figures = as_published()
    run = run_named("H100 crawler 1/s")
    figures[Cell.of(run, "LCAS", 0).key] = figures_of(run, "LCAS", 1.6)
    judge = Judge(figures, range(1))
    (cell,) = (cell for cell in judge.cells("crawler") if not all(cell.is_inside))
    assert (cell.run, cell.arm, cell.is_inside) == (run, "LCAS", (True, False, False))
    assert judge.share_inside("crawler") == pytest.approx(1 - 2 / 120)
    assert "in H100 crawler 1/s LCAS." in Reproduction(figures, range(1), Fit()).to_markdown()


def test_tolerances_are_those_of_the_noise() -> None:
    assert tolerances(run_named("H200 crawler 0.5/s"), "NON_STREAMING") == (1.10, 1.25, 1.25)
    assert tolerances(run_named("H200 crawler 2/s"), "FCFS") == (2.0, 1.5, 1.5)
    assert tolerances(run_named("H100 crawler 4/s"), "FCFS") == (1.35, 2.0, 2.7)


def gain_of(figures: dict[str, Any]) -> Gain | None:
    found = gains(Judge(figures, range(1)))
    return next((gain for gain in found if (gain.workload, gain.arm) == ("crawler", BEST_ARM)), None)


def test_a_gain_is_against_the_best_of_both_policies_and_all_ways_of_preempting() -> None:
    figures = as_published()
    run = run_named("H200 crawler 4/s, waits ×10, cost")
    figures[Cell.of(run, BEST_ARM, 0).key] = figures_of(run, "FCFS", 0.5)
    gain = gain_of(figures)
    assert gain is not None
    ours_s = 0.5 * run.ttft_s["FCFS"][2]
    best_s = {"cost": ("LCAS", run), "swap": ("FCFS", run_named("H200 crawler 4/s, waits ×10, swap"))}
    best_s["recompute"] = ("FCFS", run_named("H200 crawler 4/s, waits ×10, recompute"))
    expected = {way: theirs.ttft_s[rival][2] / ours_s for way, (rival, theirs) in best_s.items()}
    assert gain.p99_gain_by_way == pytest.approx(expected)
    assert gain.p99_gain == pytest.approx(expected["recompute"]) == pytest.approx(min(expected.values()))
    assert gain.throughput_ratio == 1.0
    reproduction = Reproduction(figures, range(1), Fit())
    assert reproduction.figures["p99_gain_crawler"] == gain.p99_gain
    assert " · ".join(f"{expected[way]:.2f}×" for way in ("cost", "recompute", "swap")) in reproduction.to_markdown()


def test_a_gain_over_some_ways_of_preempting_is_none() -> None:
    figures = {key: value for key, value in as_published().items() if "/recompute/" not in key}
    assert gain_of(figures) is None
    assert "p99_gain_crawler" not in Reproduction(figures, range(1), Fit()).figures


# ---- the bound ------------------------------------------------------------------------------------------------------


def tokens_in_s(facts: StepFacts) -> float:
    """A thousand tokens a second, and a tenth of one for each step."""
    return 0.1 + sum(stop - start for start, stop in facts.spans) / 1_000


def test_the_bound_is_the_last_chunks_prefill_in_steps() -> None:
    first, last = SimulatedChunk(0.0, "append", ((0, 5_000),)), SimulatedChunk(1.0, "append", ((5_000, 300),))
    assert last_prefill_s(SimulatedRequest(0.0, (first, last)), tokens_in_s, 200) == pytest.approx(0.2 + 0.3)


@pytest.mark.parametrize(
    ("last", "seconds"),
    [
        (((0, 60), (100, 50), (300, 40)), 0.1 + 0.04),  # the last document differs
        (((0, 60), (300, 40), (100, 50)), 0.1 + 0.09),
        (((0, 60), (100, 50), (200, 30)), 0.1 + 0.001),  # nothing does: one token is computed again to sample from
        (((0, 60), (100, 20)), 0.1 + 0.001),  # it is cut
    ],
)
def test_the_bound_of_an_update_leaves_out_what_was_there_before(last: Any, seconds: float) -> None:
    before = SimulatedChunk(0.0, "replace", ((0, 60), (100, 50), (200, 30)))
    request = SimulatedRequest(0.0, (before, SimulatedChunk(1.0, "replace", last)))
    assert last_prefill_s(request, tokens_in_s, 2_048) == pytest.approx(seconds)


def test_stable_order_keeps_what_stays_in_its_place() -> None:
    assert arranged([3, 1, 4], [1, 2, 3], ChunkOrder.RANK) == [3, 1, 4]
    assert arranged([3, 1, 4], [1, 2, 3], ChunkOrder.STABLE) == [1, 3, 4]


# ---- running --------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    cells: list[Cell] = []

    def run_cell(cell: Cell, fit: Fit) -> dict[str, Any]:
        cells.append(cell)
        return {"ttft_s": [float(cell.draw)]}

    monkeypatch.setattr(runner, "run_cell", run_cell)
    return cells


def cells(draws: int) -> list[Cell]:
    return [Cell.of(PUBLISHED[0], arm, draw, 20) for draw in range(draws) for arm in ARMS]


def test_what_was_run_is_not_run_again(tmp_path: Path, counted: list[Cell]) -> None:
    file = tmp_path / "cells.jsonl"
    run_cells(cells(1), Fit(), Journal(file, Fit()), jobs=1)
    assert len(counted) == 5
    seen: list[tuple[int, int]] = []
    figures = run_cells(
        cells(2), Fit(), Journal(file, Fit()), jobs=1, progress=lambda done, of, name: seen.append((done, of))
    )
    assert len(counted) == 10
    assert seen[0] == (5, 10)
    assert seen[-1] == (10, 10)
    assert len(figures) == 10


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, counted: list[Cell]) -> None:
    file = tmp_path / "cells.jsonl"
    run_cells(cells(1), Fit(), Journal(file, Fit()), jobs=1)
    file.write_text(file.read_text()[:-20])
    run_cells(cells(1), Fit(), Journal(file, Fit()), jobs=1)
    assert len(counted) == 6
    assert len(Journal(file, Fit()).figures) == 5


@pytest.mark.parametrize(
    "line",
    [
        '{"x": 1}',
        "[1]",
        "5",
        "null",
        '{"cell": [1], "figures": {}}',
        '{"cell": "a", "figures": 1}',
        '{"cell": "a", "figures": {}}',
        "[" * 200_000,
        "\xff",
    ],
)
def test_a_damaged_line_of_the_journal_is_left_out_and_its_cell_runs_again(tmp_path: Path, line: str) -> None:
    file = tmp_path / "cells.jsonl"
    Journal(file, Fit()).add("before", {"value": 1.0})
    with file.open("a", encoding="latin-1") as out:
        out.write(line + "\n")
    journal = Journal(file, Fit())
    journal.add("after", {"value": 2.0})
    assert dict(Journal(file, Fit()).figures) == {"before": {"value": 1.0}, "after": {"value": 2.0}}


def test_a_journal_that_was_just_begun_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text("")
    assert not Journal(tmp_path / "cells.jsonl", Fit()).figures


def test_a_journal_is_not_lost_where_it_cannot_be_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cells.jsonl"
    Journal(file, Fit()).add("before", {"value": 1.0})
    whole = file.read_text()

    def full(path: Path, text: str, **_: object) -> int:
        with open(path, "w", encoding="utf-8") as out:
            out.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigurationError, match=r"cells.jsonl cannot be kept: .*No space left"):
        Journal(file, Fit())
    assert file.read_text() == whole


def heading(**changes: Any) -> str:
    """A journal's first line, with other numbers."""
    whole = json.loads(json.dumps({"fit": asdict(Fit()), "assumed": assumed()}))
    for part in whole.values():
        part.update({name: value for name, value in changes.items() if name in part})
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("no JSON", "it does not begin as a journal does"),
        ("[1]", "it does not begin as a journal does"),
        (json.dumps({"fit": json.loads(heading())["fit"]}), "it does not say what was assumed"),
        ('{"fit": 1}', "it does not say what was fitted"),
        (heading(num_blocks=1), f"theirs have num_blocks=1, these {Fit().num_blocks}"),
        (heading(bytes_per_copy=8), "theirs have bytes_per_copy=8, these 16384"),
    ],
)
def test_a_journal_of_something_else_is_refused_and_says_how_it_differs(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigurationError, match=rf"holds other runs \(({why})\): name another folder"):
        Journal(file, Fit())
    assert file.read_text() == line + "\n"


def test_the_command_runs_the_matrix_and_writes_it(tmp_path: Path) -> None:
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    arguments = ["--draws", "1", "--queries", "12", "--jobs", "1", "--only", "H200 crawler 2/s", "--json", str(figures)]
    result = CliRunner().invoke(app, ["reproduce", "--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    assert set(written["figures"]) == {"cells_within_tolerance_crawler"}
    assert len(written["runs"]) == len(ARMS) + len(OUR_ARMS)
    assert all(np.isfinite(run["ttft_s"]).all() for run in written["runs"])
    assert {file.suffix for file in out.iterdir()} == {".jsonl", ".json", ".md", ".png"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "H300"], "names none of the runs"),
        (["--json", "none/x.json"], "there is no folder"),
        (["--svf", "--only", "crawler"], "leave out --only and --no-ours"),
        (["--svf", "--no-ours"], "leave out --only and --no-ours"),
    ],
)
def test_the_command_says_what_cannot_work(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path / "out"), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert words in result.output
    assert not (tmp_path / "out").exists()


def test_a_reproduction_is_not_mixed_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert (
        result.exit_code,
        "holds 'config.json' and no reproduction: give an empty or new folder" in result.output,
    ) == (1, True)


def test_two_reproductions_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    lock.release()
    assert (result.exit_code, "is in use: another run" in result.output) == (1, True)


def test_a_run_that_is_stopped_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "run_cells", stop)
    result = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path / "out")], env={"COLUMNS": "300"})
    assert result.exit_code == 130
    assert "cells.jsonl; the same command goes on" in result.output
