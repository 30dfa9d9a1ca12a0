"""Calibration measures a real engine core and real KV blocks, within its time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
from rich.console import Console

from stream2llm_sdk.calibrate_command import show_calibration
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.calibration import CalibrationReport, calibrate, hardware_name
from stream2llm_sdk.serving.cost_model import load_cost_model

ENGINE_ARGS = {"dtype": "float32", "max_num_batched_tokens": 128, "kv_cache_memory_bytes": 64 << 20}


@pytest.mark.parametrize("budget_s", [0.0, -1.0, 4.9, float("nan")])
def test_too_little_time_is_refused_before_anything_starts(tmp_path: Path, budget_s: float) -> None:
    with pytest.raises(ConfigurationError, match=f"budget_s.*{budget_s}"):
        calibrate("no-model", tmp_path / "costs.json", budget_s=budget_s)


def test_a_file_that_could_not_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        calibrate("no-model", tmp_path / "nowhere" / "costs.json")


@pytest.fixture(scope="module")
def progress() -> list[tuple[float, str]]:
    return []


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs") / "costs.json"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, out: Path, progress: list[tuple[float, str]]) -> CalibrationReport:
    model = tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")
    import vllm  # noqa: F401  -- its import is not what the budget is for

    return calibrate(model, out, budget_s=60, progress=lambda *step: progress.append(step), **ENGINE_ARGS)


@pytest.mark.engine
def test_the_file_holds_what_was_measured_and_how_well_it_fits(report: CalibrationReport, out: Path) -> None:
    assert load_cost_model(out) == report.model
    assert report.model.hardware == hardware_name()
    assert report.model.mismatch(hardware_name(), report.model.model) is None
    assert set(json.loads(out.read_text())["fit"]) == {"recompute", "swap_out", "swap_in"}


@pytest.mark.engine
def test_every_curve_covers_growing_lengths_and_costs_something(report: CalibrationReport) -> None:
    model = report.model
    assert report.longest_prefill == model.recompute.num_tokens[-1] <= report.max_model_len - 1
    assert len(model.recompute.num_tokens) >= 3
    assert report.longest_copy == model.swap_out.num_tokens[-1] >= report.max_model_len // 2
    for curve in (model.recompute, model.swap_out, model.swap_in):
        assert curve.seconds[-1] > curve.seconds[0] >= 0
    # Six layers run for every token; copying its KV is at least some memory traffic.
    assert model.recompute_s(512) > model.swap_out_s(512) > 0
    assert all(quality.num_samples >= 6 for quality in report.fit.values())


@pytest.mark.engine
def test_progress_goes_from_the_start_to_the_end(report: CalibrationReport, progress: list[tuple[float, str]]) -> None:
    shares = [share for share, _ in progress]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.1
    assert progress[-1] == (1.0, "done")
    assert report.elapsed_s > 0


@pytest.mark.engine
def test_the_table_names_the_machine_and_each_curve(report: CalibrationReport) -> None:
    console = Console(record=True, width=120)
    show_calibration(console, report)
    text = console.export_text()
    assert hardware_name() in text
    assert all(name in text for name in ("recompute", "swap out", "swap in", "R²"))


@pytest.mark.engine
def test_what_vllm_refuses_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no-such-folder"):
        calibrate(tmp_path / "no-such-folder", tmp_path / "costs.json")
