"""A run's folder: what is written, what survives a crash, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.pacing import allowed_lag_s
from stream2llm_sdk.traces.replay_run import ReplayRun, RunState
from stream2llm_sdk.traces.replayed_request import (
    ReplayedRequest,
    trail_counters,
    trail_events,
)
from stream2llm_sdk.traces.run_folder import EVENT_COLUMNS, REQUEST_COLUMNS, SAMPLE_COLUMNS, RunFolder
from stream2llm_sdk.traces.run_journal import RunJournal, read_journal
from stream2llm_sdk.traces.run_keeper import RunKeeper, load_run
from stream2llm_sdk.traces.run_tables import tables_of
from stream2llm_sdk.trail import EventTrail, EventType, TrailEvent

CONFIG: dict[str, Any] = {
    "schema_version": 1,
    "engine": {"limits": {"num_blocks": 100}},
    "options": {"streaming": True, "concurrency": None, "arrivals": {"rate_per_s": 2.0}},
    "traces": {"count": 2},
}


def request(name: str = "r0", arrival_s: float = 0.0, **facts: Any) -> ReplayedRequest:
    """Sent at once and a second later, answered after another half; each message 1 ms late."""
    given = {
        "request_id": name,
        "query_id": f"q-{name}",
        "arrival_due_s": arrival_s,
        "arrival_s": arrival_s,
        "context_complete_s": arrival_s + 1,
        "first_token_s": arrival_s + 1.5,
        "finished_s": arrival_s + 2,
        "send_due_s": (arrival_s, arrival_s + 0.999),
        "send_s": (arrival_s + 0.001, arrival_s + 1),
        "send_taken_s": (None, arrival_s + 1.1),
        "send_tokens": (10, 20),
        "num_prompt_tokens": 30,
        "num_output_tokens": 2,
        "finish_reason": "length",
        **facts,
    }
    return ReplayedRequest(**given)


def trail(*events: tuple[EventType, float], **end: Any) -> EventTrail:
    *others, (last, last_s) = events
    return EventTrail(
        "r0", [*(TrailEvent(kind, at_s, at_s) for kind, at_s in others), TrailEvent(last, last_s, last_s, end)]
    )


PREEMPTED = trail(
    (EventType.QUEUED, 100.0),
    (EventType.SCHEDULED, 100.25),
    (EventType.PREEMPTED_SWAP, 100.5),
    (EventType.SCHEDULED, 101.0),
    (EventType.FIRST_TOKEN, 101.5),
    (EventType.FINISHED, 102.0),
    num_tokens_computed=50,
    num_tokens_loaded=7,
)


def write_run(folder: Path, *requests: ReplayedRequest) -> RunFolder:
    with RunKeeper.begin(CONFIG, len(requests), folder, anew=False) as keeper:
        for each in requests:
            keeper.journal.request(each, trail_events(PREEMPTED, 100.0))
        for at_s in (0.1, 0.3, 0.7, 2.5):
            keeper.journal.sample(at_s, {"num_free_blocks": 75, "num_parked": 1})
    return RunFolder.open(folder)


def test_a_request_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = request(error=None, num_tokens_swapped=3)
    folder = write_run(tmp_path, written)
    (row,) = folder.requests().to_pylist()
    assert ReplayedRequest.from_row(row) == written
    assert (row["ttft_from_context_complete_s"], row["ttft_from_request_s"], row["e2e_latency_s"]) == (0.5, 1.5, 2.0)
    assert row["max_lag_s"] == pytest.approx(0.001)


def test_tables_have_the_documented_columns(tmp_path: Path) -> None:
    folder = write_run(tmp_path, request())
    assert folder.requests().column_names == list(REQUEST_COLUMNS)
    assert folder.events().column_names == list(EVENT_COLUMNS)
    assert folder.samples().column_names == list(SAMPLE_COLUMNS)
    from stream2llm_sdk.traces import run_folder

    for column in (*REQUEST_COLUMNS, *EVENT_COLUMNS, *SAMPLE_COLUMNS):
        assert column in str(run_folder.__doc__)


def test_an_empty_run_has_empty_tables_of_the_same_columns(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert folder.requests().schema == write_run(tmp_path / "other", request()).requests().schema
    assert folder.requests().num_rows == 0


def test_states_have_lengths_and_marks_have_none(tmp_path: Path) -> None:
    events = write_run(tmp_path, request()).events().to_pylist()
    assert [(event["event"], event["run_s"], event["duration_s"]) for event in events] == [
        ("QUEUED", 0.0, 0.25),
        ("SCHEDULED", 0.25, 0.25),
        ("PREEMPTED_SWAP", 0.5, 0.5),
        ("SCHEDULED", 1.0, 1.0),
        ("FIRST_TOKEN", 1.5, None),
        ("FINISHED", 2.0, None),
    ]
    assert json.loads(events[-1]["data"]) == {"num_tokens_computed": 50, "num_tokens_loaded": 7}


def test_samples_count_requests_by_their_state_at_that_time(tmp_path: Path) -> None:
    rows = write_run(tmp_path, request()).samples().to_pylist()
    counted = ("num_requests", "num_open_streams", "num_queued", "num_scheduled", "num_preempted_swap")
    assert [tuple(row[name] for name in counted) for row in rows] == [
        (1, 1, 1, 0, 0),
        (1, 1, 0, 1, 0),
        (1, 1, 0, 0, 1),
        (0, 0, 0, 0, 0),
    ]
    assert {(row["kv_usage"], row["num_parked"], row["num_host_blocks_used"]) for row in rows} == {(0.25, 1, None)}


def test_a_trail_gives_the_counters_of_its_end_and_its_preemptions_by_kind() -> None:
    counters = trail_counters(PREEMPTED)
    assert counters["num_tokens_computed"] == 50
    assert counters["num_tokens_loaded"] == 7
    assert (counters["num_swap_preemptions"], counters["num_recompute_preemptions"]) == (1, 0)
    assert trail_counters(EventTrail("r0", ())) == {}


def test_a_request_that_was_aborted_and_replayed_counts_once() -> None:
    journal = RunJournal()
    journal.request(request(finish_reason="abort", finished_s=None), trail_events(PREEMPTED, 100.0))
    journal.request(request("r1"), ())
    journal.request(request(segment=1), ())
    tables = tables_of(list(journal), CONFIG)
    assert tables["requests"].column("request_id").to_pylist() == ["r1", "r0"]
    assert tables["requests"].column("segment").to_pylist() == [0, 1]
    assert tables["events"].num_rows == 0


def test_a_crash_loses_no_more_than_the_line_being_written(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with RunJournal(file) as journal:
        journal.request(request(), ())
    with open(file, "a", encoding="utf-8") as stream:
        stream.write('{"kind": "sam')
    assert [entry["kind"] for entry in read_journal(file)] == ["segment", "request"]
    with RunJournal(file, segment=1) as journal:
        journal.request(request("r1"), ())
    assert [entry["kind"] for entry in read_journal(file)] == ["segment", "request", "segment", "request"]


def test_a_journal_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text('{"kind": "segment", "segment": 0, "start_s": 0}\nnonsense\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"journal.jsonl, line 2"):
        list(read_journal(file))


def test_a_later_segment_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    keeper = RunKeeper.begin(CONFIG, 2, tmp_path, anew=False)
    keeper.journal.request(request(), ())
    keeper.journal.sample(7.0, {})
    keeper.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert RunFolder.open(tmp_path).state == "stopped"
    keeper = RunKeeper.begin(CONFIG, 2, tmp_path, anew=False)
    assert (keeper.journal.segment, keeper.journal.start_s) == (1, 7.0)
    assert keeper.is_done("r0")
    assert not keeper.is_done("r1")
    assert not RunFolder(tmp_path).summary_file.exists()


def test_a_complete_folder_gives_its_run(tmp_path: Path) -> None:
    write_run(tmp_path, request(), request("r1", 3.0))
    run = load_run(RunFolder.open(tmp_path))
    assert run.state is RunState.COMPLETE
    assert [each.request_id for each in run.requests] == ["r0", "r1"]
    assert run.summary() == RunFolder.open(tmp_path).summary()["figures"]
    assert not (tmp_path / "journal.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("config.json", "events.parquet", "requests.parquet", "run_metrics.csv", "samples.parquet", "summary.json"),
    ]


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        RunKeeper.begin(CONFIG, 1, tmp_path, anew=False)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        RunFolder.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"schema_version": 2}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="schema_version=2"):
        RunFolder.open(tmp_path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, request())
    folder.table_file("events").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigurationError, match=r"events\.parquet"):
        folder.events()


# ---- figures --------------------------------------------------------------------------------------------------------


def a_run(*requests: ReplayedRequest, **facts: Any) -> ReplayRun:
    return ReplayRun(**{"config": CONFIG, "state": RunState.COMPLETE, "num_expected": 2, "requests": requests, **facts})


def test_figures_are_those_of_the_requests_that_were_answered() -> None:
    summary = a_run(
        request(num_recompute_preemptions=1, num_swap_preemptions=3),
        request("r1", 1.0, error="EngineBusyError: full", finish_reason="error", num_swap_preemptions=50),
        request("r2", 2.0, finish_reason="abort"),
    ).summary()
    assert (summary["num_requests"], summary["num_failed"], summary["num_aborted"]) == (1, 1, 1)
    assert summary["num_preemptions"] == 4
    assert summary["swap_share"] == 0.75
    assert summary["completion_time_s"] == 2.0
    assert summary["prompt_tokens_per_s"] == 15.0


def test_a_run_without_answers_has_no_figures_but_a_summary() -> None:
    summary = a_run().summary()
    assert summary["ttft_from_request_p50_s"] is None
    assert summary["requests_per_s"] is None
    assert summary["is_spoiled_by_lag"] is False


@pytest.mark.parametrize(
    ("median_ttft_s", "allowed_s"), [(None, 0.010), (1.0, 0.010), (0.1, 0.005), (0.001, 0.001), (0.0, 0.001)]
)
def test_lag_may_be_a_twentieth_of_the_ttft_but_neither_more_than_10_ms_nor_less_than_1(
    median_ttft_s: float | None, allowed_s: float
) -> None:
    assert allowed_lag_s(median_ttft_s) == pytest.approx(allowed_s)


@pytest.mark.parametrize(("lag_s", "spoiled"), [(0.009, False), (0.011, True)])
def test_a_run_is_spoiled_by_lag_over_what_is_allowed(lag_s: float, spoiled: bool) -> None:
    run = a_run(request(send_due_s=(0.0, 0.0), send_s=(lag_s, lag_s)))
    assert run.is_spoiled_by_lag is spoiled
    assert bool(run.warnings) is spoiled


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    config = {**CONFIG, "traces": {"count": 1}}
    with RunKeeper.begin(config, 1, tmp_path / "run", anew=True) as keeper:
        with pytest.raises(ConfigurationError, match="is in use: another run writes into it"):
            RunKeeper.begin(config, 1, tmp_path / "run", anew=True)
        keeper.journal.request(request(), ())
    assert len(load_run(RunFolder.open(tmp_path / "run")).requests) == 1
    assert RunKeeper.begin(config, 1, tmp_path / "run", anew=True).is_complete


def test_a_complete_run_that_lost_its_requests_is_not_taken_for_one(tmp_path: Path) -> None:
    with RunKeeper.begin(CONFIG, 2, tmp_path, anew=True) as keeper:
        keeper.journal.request(request(), ())
    with pytest.raises(ConfigurationError, match=r"requests\.parquet has 1 of the 2 requests of a complete run"):
        RunKeeper.begin(CONFIG, 2, tmp_path, anew=True)
    (tmp_path / "requests.parquet").unlink()
    with pytest.raises(ConfigurationError, match=r"requests\.parquet is missing"):
        RunKeeper.begin(CONFIG, 2, tmp_path, anew=True)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "request"}',
        '{"kind": "request", "row": [], "events": []}',
        '{"kind": "event", "events": [[1]]}',
        '{"kind": "event", "events": null}',
        '{"kind": "segment", "segment": "a", "start_s": 0}',
        '{"kind": "other"}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_of_a_journal_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigurationError, match=r"journal\.jsonl, line 1: no entry of a journal"):
        list(read_journal(file))


def test_a_table_that_is_missing_is_made_of_the_journal_where_there_is_one(tmp_path: Path) -> None:
    keeper = RunKeeper.begin(CONFIG, 2, tmp_path, anew=True)
    keeper.journal.request(request(), ())
    keeper.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    (tmp_path / "requests.parquet").unlink()
    assert len(load_run(RunFolder.open(tmp_path)).requests) == 1


def test_a_run_that_could_not_begin_leaves_the_folder_to_the_corrected_one(tmp_path: Path) -> None:
    keeper = RunKeeper.begin(CONFIG, 1, tmp_path / "run", anew=False)
    keeper.__exit__(ConfigurationError, ConfigurationError("no room"), None)
    assert not (tmp_path / "run").exists()
    corrected = {**CONFIG, "engine": {"limits": {"num_blocks": 200}}}
    with RunKeeper.begin(corrected, 1, tmp_path / "run", anew=False) as keeper:
        keeper.journal.request(request(), ())
    keeper = RunKeeper.begin(corrected, 2, tmp_path / "other", anew=False)
    keeper.journal.request(request(), ())
    keeper.__exit__(ConfigurationError, ConfigurationError("no room"), None)
    assert (tmp_path / "other" / "requests.parquet").is_file(), "what has ended is kept"
