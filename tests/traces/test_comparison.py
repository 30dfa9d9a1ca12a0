"""Runs beside each other, alone, and as timelines: their figures, and how they show themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.load_result import RequestResult, SimulationResult
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.comparison import Comparison
from stream2llm_sdk.traces.replay import ReplayOptions, ReplayRun, Simulation, replay
from stream2llm_sdk.traces.replay_run import RunState
from stream2llm_sdk.traces.run_folder import RunFolder
from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize

REQUEST = RequestResult(
    arrival_s=1.0,
    context_complete_s=3.0,
    first_token_s=3.5,
    finished_s=4.0,
    tenant="",
    tag="",
    num_prompt_tokens=100,
    num_output_tokens=1,
    num_tokens_computed=150,
    num_tokens_recomputed=50,
    num_tokens_invalidated=0,
    num_tokens_cached=0,
    num_recompute_preemptions=1,
    num_swap_preemptions=2,
)


def result(*requests: RequestResult) -> SimulationResult:
    return SimulationResult(requests, 10, 9.0, 4.5, 0.75, 0.1)


def unanswered() -> ReplayRun:
    return ReplayRun({"engine": {}, "options": {}}, RunState.STOPPED, (), 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
async def runs(folders: Path) -> dict[str, ReplayRun]:
    options = SynthesisOptions(
        delay_multiplier=10, arrivals=Arrivals(rate_per_s=2.0), max_prompt_tokens=20_000, update_share=0.3
    )
    traces = synthesize("mixed", 12, seed=3, options=options)
    return {
        policy: await replay(
            traces, Simulation(policy, {"num_gpu_blocks": 2_000}), ReplayOptions(), out=folders / policy
        )
        for policy in ("FCFS", "SRPF")
    }


def test_rows_are_the_figures_of_the_runs() -> None:
    slower = replace(REQUEST, arrival_s=2.0, first_token_s=7.0, finished_s=8.0)
    (one, both) = Comparison({"one": result(REQUEST), "both": result(REQUEST, slower)}).rows()
    assert (one["name"], one["num_requests"], one["completion_time_s"]) == ("one", 1, 3.0)
    assert one["ttft_from_context_complete_p95_s"] == pytest.approx(0.5)
    assert both["ttft_from_context_complete_p50_s"] == pytest.approx((0.5 + 4.0) / 2)
    assert both["ttft_from_request_p50_s"] == pytest.approx((2.5 + 5.0) / 2)
    assert (both["num_recompute_preemptions"], both["num_swap_preemptions"]) == (2, 4)
    assert (both["num_tokens_computed"], both["num_tokens_recomputed"]) == (300, 100)
    assert both["completion_time_s"] == 7.0


def test_replays_and_simulated_loads_agree(runs: dict[str, ReplayRun]) -> None:
    for row, run in zip(Comparison(runs).rows(), runs.values(), strict=True):
        figures = run.summary()
        shared = [name for name in row if name in figures]
        assert len(shared) > 8
        assert {name: row[name] for name in shared} == pytest.approx({name: figures[name] for name in shared})


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no run"):
        Comparison({})
    with pytest.raises(ConfigurationError, match="'stopped' was answered"):
        Comparison({"stopped": unanswered()})
    with pytest.raises(ConfigurationError, match="answered"):
        unanswered().plot()


def test_a_comparison_shows_both_ttfts_and_preemptions() -> None:
    page = Comparison({"<a>": result(REQUEST), "_b": result(REQUEST, REQUEST)})._repr_html_()
    assert "&lt;a&gt;" in page
    for told in ("From the complete context", "From the question", "KV dropped", "KV to the host", "currentColor"):
        assert told in page
    calm = replace(REQUEST, num_recompute_preemptions=0, num_swap_preemptions=0)
    assert ">Preemptions<" not in Comparison({"a": result(calm), "b": result(calm)}).plot().svg


def test_single_runs_show_themselves(runs: dict[str, ReplayRun]) -> None:
    page = runs["SRPF"]._repr_html_()
    for told in ("Replay in virtual time, SRPF, streamed", "12 of 12", "TTFT from the question", "<svg"):
        assert told in page
    assert "stopped: 0 of 3 requests have ended" in unanswered()._repr_html_()
    tenants = result(replace(REQUEST, tenant="<t>"), REQUEST)._repr_html_()
    for told in ("&lt;t&gt;", "(none named)", "most KV in use", "75%", "<svg"):
        assert told in tenants
    assert "it has no requests" in result()._repr_html_()


def test_a_folder_shows_its_timeline(runs: dict[str, ReplayRun], folders: Path) -> None:
    folder = RunFolder.open(folders / "FCFS")
    page = folder._repr_html_()
    for told in ("FCFS: Replay in virtual time", "preempted, KV dropped", "waits for a chunk", "All 12 requests"):
        assert told in page
    few = folder.plot(most=5)
    assert few.caption.startswith("5 of 12 requests")
    assert few.svg.count("first token") == 1
    with pytest.raises(ConfigurationError, match="got 0"):
        folder.plot(most=0)
