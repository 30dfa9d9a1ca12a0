"""Reports of runs: what a request was doing, what is drawn and said of it, and what is refused."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from stream2llm_sdk.cli import app
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.traces.replayed_request import ReplayedRequest, ReplayEvent
from stream2llm_sdk.traces.report import write_report
from stream2llm_sdk.traces.report.figures import average_counts
from stream2llm_sdk.traces.report.perfetto import trace_events
from stream2llm_sdk.traces.report.phases import Mark, Phase, RequestTrail, Span, request_trail
from stream2llm_sdk.traces.report.preemptions import preemptions_of
from stream2llm_sdk.traces.report.reported_run import ReportedRun, read_runs
from stream2llm_sdk.traces.report.style import blank, own_style, panels, plain
from stream2llm_sdk.traces.report.tables import configurations, costs, figures, tenants
from stream2llm_sdk.traces.report.timeline import shown_requests
from stream2llm_sdk.traces.run_folder import RunFolder
from stream2llm_sdk.traces.run_keeper import RunKeeper
from stream2llm_sdk.trail import EventType

CONFIG: dict[str, Any] = {
    "schema_version": 1,
    "engine": {"kind": "simulated", "policy": "FCFS", "limits": {"num_blocks": 100}},
    "options": {"streaming": True, "concurrency": None, "arrivals": {"rate_per_s": 2.0}},
    "traces": {"count": 1},
}
OF_TWO = {**CONFIG, "traces": {"count": 2}}
PREEMPTED: tuple[tuple[EventType, float, dict[str, Any]], ...] = (
    (EventType.QUEUED, 1.0, {}),
    (EventType.SCHEDULED, 1.5, {}),
    (EventType.KV_ON_GPU, 2.0, {}),
    (EventType.CHUNK_ARRIVED, 3.0, {"num_tokens": 20}),
    (EventType.CONTEXT_COMPLETE, 3.0, {}),
    (EventType.PREEMPTED_SWAP, 3.5, {"num_tokens": 30, "num_blocks": 2, "predicted_s": 0.25}),
    (EventType.PROMPT_UPDATED, 4.0, {"lcp": 30, "num_tokens": 50}),
    (EventType.SCHEDULED, 4.5, {}),
    (EventType.RESUMED, 4.6, {"num_loaded": 30, "actual_s": 0.5}),
    (EventType.FIRST_TOKEN, 4.9, {}),
    (EventType.FINISHED, 5.0, {"num_tokens_computed": 50}),
)
CALM = tuple(event for event in PREEMPTED if event[0] not in (EventType.PREEMPTED_SWAP, EventType.RESUMED))


def request(name: str = "r0", **facts: Any) -> ReplayedRequest:
    """Asked at 0.5 s, answered at 4.9 s, 1.9 s after its context was complete."""
    given = {
        "query_id": f"q-{name}",
        "arrival_due_s": 0.5,
        "arrival_s": 0.5,
        "context_complete_s": 3.0,
        "first_token_s": 4.9,
        "finished_s": 5.0,
        "send_due_s": (1.0, 3.0),
        "send_s": (1.0, 3.0),
        "send_taken_s": (1.0, 3.0),
        "send_tokens": (30, 20),
        "num_prompt_tokens": 50,
        "num_output_tokens": 1,
        "finish_reason": "length",
    }
    return ReplayedRequest(request_id=name, **{**given, **facts})


def marks(events: tuple[tuple[EventType, float, dict[str, Any]], ...]) -> list[Mark]:
    return [Mark(*event) for event in events]


def write_run(
    folder: Path, *requests: ReplayedRequest, events: Any = PREEMPTED, config: dict[str, Any] = CONFIG
) -> Path:
    with RunKeeper.begin(config, len(requests), folder, anew=False) as keeper:
        for each in requests:
            told = [ReplayEvent("engine", kind.value, at_s, at_s, at_s, None, data) for kind, at_s, data in events]
            keeper.journal.request(each, told)
        for at_s in (0.5, 2.5, 5.0):
            keeper.journal.sample(at_s, {"num_free_blocks": 75, "num_parked": 1, "num_host_blocks_used": 2})
    return folder


def read_run(folder: Path, *requests: ReplayedRequest, **how: Any) -> ReportedRun:
    (run,) = read_runs([write_run(folder, *(requests or (request(),)), **how)])
    return run


# ---- what a request was doing ---------------------------------------------------------------------------------------


def phases(*events: tuple[EventType, float]) -> list[tuple[Phase, float, float]]:
    trail = request_trail(request(arrival_s=0.0), [Mark(kind, at_s) for kind, at_s in events])
    return [(span.phase, span.start_s, span.end_s) for span in trail.spans]


def test_every_state_is_told() -> None:
    trail = request_trail(request(), marks(PREEMPTED))
    assert [(span.phase, span.start_s, span.end_s) for span in trail.spans] == [
        (Phase.RETRIEVING, 0.5, 1.0),
        (Phase.QUEUED, 1.0, 1.5),
        (Phase.RUNNING, 1.5, 2.0),
        (Phase.AWAITING_CHUNK, 2.0, 3.0),
        (Phase.AWAITING_TURN, 3.0, 3.5),
        (Phase.SWAPPED, 3.5, 4.5),
        (Phase.RUNNING, 4.5, 5.0),
    ]


def test_one_that_is_scheduled_again_without_news_had_work_all_along() -> None:
    start = ((EventType.SCHEDULED, 0.0), (EventType.KV_ON_GPU, 1.0))
    assert phases(*start, (EventType.SCHEDULED, 2.0), (EventType.FINISHED, 3.0))[1] == (Phase.AWAITING_TURN, 1.0, 2.0)


def test_one_that_loses_its_kv_without_news_was_waiting_for_a_chunk() -> None:
    start = ((EventType.SCHEDULED, 0.0), (EventType.KV_ON_GPU, 1.0))
    end = ((EventType.PREEMPTED_RECOMPUTE, 2.0), (EventType.ABORTED, 3.0))
    assert phases(*start, *end)[1:] == [(Phase.AWAITING_CHUNK, 1.0, 2.0), (Phase.DROPPED, 2.0, 3.0)]


def test_one_whose_context_is_complete_waits_for_no_chunk() -> None:
    start = ((EventType.SCHEDULED, 0.0), (EventType.CONTEXT_COMPLETE, 0.5), (EventType.KV_ON_GPU, 1.0))
    end = ((EventType.PREEMPTED_RECOMPUTE, 2.0), (EventType.ABORTED, 3.0))
    assert phases(*start, *end)[1] == (Phase.AWAITING_TURN, 1.0, 2.0)


def test_a_chunk_that_is_not_applied_yet_is_work() -> None:
    start = ((EventType.SCHEDULED, 0.0), (EventType.CHUNK_ARRIVED, 0.5), (EventType.KV_ON_GPU, 1.0))
    end = ((EventType.PROMPT_UPDATED, 1.5), (EventType.SCHEDULED, 2.0), (EventType.FINISHED, 3.0))
    assert phases(*start, *end)[1] == (Phase.AWAITING_TURN, 1.0, 2.0)


def test_an_engine_without_trails_leaves_the_requests_own_times() -> None:
    spans = request_trail(request(), ()).spans
    assert [(span.phase, span.start_s, span.end_s) for span in spans] == [
        (Phase.RETRIEVING, 0.5, 1.0),
        (Phase.UNKNOWN, 1.0, 5.0),
    ]


_STATES = (EventType.QUEUED, EventType.SCHEDULED, EventType.KV_ON_GPU, EventType.PREEMPTED_SWAP)
_NEWS = (EventType.CHUNK_ARRIVED, EventType.PROMPT_UPDATED, EventType.CONTEXT_COMPLETE, EventType.RESUMED)


@given(st.lists(st.tuples(st.sampled_from(_STATES + _NEWS), st.integers(0, 5)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_phases_follow_each_other_without_gaps_or_overlaps(steps: list[tuple[EventType, int]]) -> None:
    times = np.cumsum([wait for _, wait in steps])
    events = [Mark(EventType.QUEUED, 0.0), *(Mark(kind, float(at)) for (kind, _), at in zip(steps, times, strict=True))]
    spans = request_trail(request(arrival_s=-1.0), [*events, Mark(EventType.FINISHED, float(times[-1]))]).spans
    assert [span.end_s for span in spans[:-1]] == [span.start_s for span in spans[1:]]
    assert all(span.end_s >= span.start_s for span in spans)
    assert (spans[0].start_s, max(span.end_s for span in spans)) == (-1.0, float(times[-1]))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=20))
@settings(max_examples=100, deadline=None)
def test_average_counts_add_up_to_the_time_spent(ends: list[tuple[int, int]]) -> None:
    spans = [Span(Phase.QUEUED, min(pair) / 4, max(pair) / 4) for pair in ends]
    edges = np.linspace(0, 10, 8)
    counts = average_counts(spans, edges)
    assert float(np.sum(counts[Phase.QUEUED] * np.diff(edges))) == pytest.approx(sum(span.duration_s for span in spans))
    assert not counts[Phase.RUNNING].any()


def test_an_average_is_that_of_its_interval_alone() -> None:
    counts = average_counts([Span(Phase.RUNNING, 1.0, 3.0), Span(Phase.RUNNING, 2.5, 3.0)], np.array([0.0, 2.0, 4.0]))
    assert list(counts[Phase.RUNNING]) == [0.5, 0.75]


def test_a_preemption_is_paired_with_the_resumption_before_the_next_one() -> None:
    lost = (EventType.PREEMPTED_RECOMPUTE, 6.0, {"num_tokens": 4, "predicted_s": 1.0})
    trail = RequestTrail(request(), (), tuple(marks((*PREEMPTED[:9], lost))))
    found = [(each.kind, each.run_s, each.predicted_s, each.actual_s) for each in preemptions_of([trail])]
    assert found == [(Phase.SWAPPED, 3.5, 0.25, 0.5), (Phase.DROPPED, 6.0, 1.0, None)]


def waiting(*seconds: float) -> list[RequestTrail]:
    return [
        RequestTrail(request(f"r{number}"), (Span(Phase.QUEUED, 0, each),), ()) for number, each in enumerate(seconds)
    ]


@pytest.mark.parametrize(("seconds", "first"), [((9, 0, 0, 4, 6, 0, 5), "r4"), ((2, 1, 2, 1, 2), "r0")])
def test_the_timeline_shows_the_first_requests_in_a_row_that_waited_longest(seconds: Any, first: str) -> None:
    shown = shown_requests(waiting(*seconds), most=3)
    assert (shown[0].request.request_id, len(shown)) == (first, 3)
    assert len(shown_requests(waiting(*seconds), most=100)) == len(seconds)


# ---- the page and its files -----------------------------------------------------------------------------------------


class _Links(HTMLParser):
    """What a page refers to, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


NASTY = "<script>alert('$x_1$')</script>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command, of a run with two tenants, whose names and queries are not to be trusted."""
    folder = tmp_path_factory.mktemp("nasty")
    nasty = [request("r0", tenant=NASTY, query_id=NASTY), request("r1", tenant="_b", error="<img src=x>")]
    run = write_run(folder / "<b>$x_1$", *nasty, request("r2", tenant="_b"))
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(folder / "report")])
    assert result.exit_code == 0, result.output
    return folder / "report" / "report.html"


def test_a_report_is_a_page_its_figures_and_a_trace(report: Path) -> None:
    names = ("ttft", "timeline", "kv_occupancy", "queues", "preemptions", "costs")
    assert {path.name for path in report.parent.iterdir()} == {
        *(f"{name}.png" for name in names),
        "report.html",
        "trace.json",
    }
    for name in names:
        assert (report.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(report: Path) -> None:
    links = _Links(report.read_text(encoding="utf-8")).links
    images = [link for link in links if link.startswith("data:image/png;base64,")]
    assert len(images) == 6
    assert [link for link in links if link not in images and not link.startswith("#")] == ["trace.json"]
    assert "url(" not in report.read_text(encoding="utf-8")


def test_what_comes_of_a_run_is_escaped(report: Path) -> None:
    page = _Links(report.read_text(encoding="utf-8"))
    assert NASTY in page.text
    assert page.text.count("<b>$x_1$") >= 4
    assert not {"script", "b"} & set(page.tags)
    assert page.tags.count("img") == 6


def test_every_image_says_what_it_shows(report: Path) -> None:
    images = re.findall(r"<img [^>]*>", report.read_text(encoding="utf-8"))
    assert all(re.match(r'<img alt="[^"]{40,}"', image) for image in images)


def test_several_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    other = {**CONFIG, "engine": {**CONFIG["engine"], "policy": "LCAS"}}
    runs = [write_run(tmp_path / "a" / "run", request()), write_run(tmp_path / "b" / "run", request(), config=other)]
    page = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"timeline-a-run.png", "timeline-b-run.png", "trace-a-run.json", "trace-b-run.json"} <= names
    assert '<tr class="differs"><th scope="row">engine.policy</th><td>FCFS</td><td>LCAS</td></tr>' in page
    assert page.count('class="differs"') == 1


def test_plots_with_nothing_to_show_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stream2llm_sdk.traces.report import figures as drawn

    said: list[str] = []
    monkeypatch.setattr(drawn, "blank", lambda plot, reason: said.append(reason))
    run = read_run(tmp_path / "calm", events=CALM)
    unknown = read_run(tmp_path / "unknown", events=())
    drawn.draw_preemptions([run, unknown])
    drawn.draw_costs([run, unknown])
    assert said == ["no preemptions in this run", "the engine kept no trails in this run"] * 2


def test_a_plot_with_nothing_to_show_leaves_the_ticks_of_its_neighbour() -> None:
    with own_style():
        _, (empty, drawn) = panels(2, 2.0, sharex=True, sharey=True)
        drawn.plot([0, 1], [0, 2])
        blank(empty, "nothing")
    assert len(drawn.get_xticks()) > 2
    assert all(label.get_visible() for label in drawn.get_xticklabels() + drawn.get_yticklabels())


def test_a_run_without_a_single_answer_is_reported(tmp_path: Path) -> None:
    failed = request(error="EngineError: no", first_token_s=None, finished_s=None, context_complete_s=None)
    page = write_report([write_run(tmp_path / "run", failed, events=())], tmp_path / "out")
    assert "1 of 1 requests failed" in page.read_text(encoding="utf-8")


def test_warnings_of_a_run_are_on_the_page(tmp_path: Path) -> None:
    with RunKeeper.begin(OF_TWO, 2, tmp_path / "run", anew=False) as keeper:
        keeper.journal.request(request(send_s=(1.0, 3.2)), ())
        keeper.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        (stopped,) = read_runs([tmp_path / "run"])
    assert [line.split(":")[0] for line in stopped.warnings] == ["spoiled", "stopped"]


def test_a_run_that_was_killed_is_reported_as_far_as_it_came(tmp_path: Path) -> None:
    keeper = RunKeeper.begin(OF_TWO, 2, tmp_path, anew=False)
    keeper.journal.request(request(), ())
    keeper.journal.close()
    (run,) = read_runs([tmp_path])
    assert (run.state, len(run.trails)) == ("interrupted", 1)
    assert any("was killed" in line for line in run.warnings)
    assert any("1 of 2 requests have ended" in line for line in run.warnings)


def test_the_command_shows_what_keeps_it_from_reporting(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])
    assert (result.exit_code, "ConfigurationError" in result.output) == (1, True)
    assert not (tmp_path / "out").exists()


def test_figures_are_drawn_without_a_global_state() -> None:
    code = "import sys; from stream2llm_sdk.traces.report.style import require_matplotlib, own_style\n"
    code += "with own_style(): pass\nprint('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_names_have_no_meaning_to_matplotlib() -> None:
    assert plain("_a$b$\nc") == r" _a\$b\$ c"
    assert len(plain("x" * 1000)) == 40


# ---- tables ---------------------------------------------------------------------------------------------------------


def rows(table: Any) -> dict[str, tuple[str, ...]]:
    return {row.name: row.cells for row in table.rows}


def test_tables_tell_the_figures(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    found = rows(figures([run]))
    assert found["TTFT from the complete context, P99 (s)"] == ("1.900",)
    assert found["TTFT from the question, P50 (s)"] == ("4.400",)
    assert found["state"] == ("complete",)
    assert rows(costs([run]))[Phase.SWAPPED.value] == ("1", "1", "0", "0.2500", "0.5000", "2", "2", "2", "100.0%")
    assert rows(configurations([run]))["options.arrivals.rate_per_s"] == ("2.0",)


def test_tenants_have_rows_where_there_are_several(tmp_path: Path) -> None:
    assert tenants([read_run(tmp_path / "one")]) is None
    many = [request(f"r{number}", tenant=f"t{number % 40}") for number in range(80)]
    found = rows(tenants([read_run(tmp_path / "many", *many)]))
    assert len(found) == 31
    assert found["10 others"][0] == "20"


# ---- the trace ------------------------------------------------------------------------------------------------------


def test_the_trace_is_in_the_chrome_format(report: Path) -> None:
    trace = json.loads((report.parent / "trace.json").read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in "MXiC"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_the_trace_has_a_track_a_request(tmp_path: Path) -> None:
    events = list(trace_events(read_run(tmp_path, request("r0"), request("r1"))))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["q-r0 (r0)", "q-r1 (r1)"]
    for thread in names:
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
        assert [each["name"] for each in slices][-2:] == [Phase.SWAPPED.value, Phase.RUNNING.value]
        assert [each["ts"] + each["dur"] for each in slices[:-1]] == [each["ts"] for each in slices[1:]]
        instants = [event["name"] for event in events if event["ph"] == "i" and event["tid"] == thread]
        assert instants == [
            *("CHUNK_ARRIVED", "CONTEXT_COMPLETE", "PROMPT_UPDATED", "RESUMED"),
            "FIRST_TOKEN",
            "FINISHED",
        ]
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "KV blocks in use (%)"]
    assert [(each["ts"], each["args"]) for each in counters] == [(at, {"in use": 25}) for at in (5e5, 2.5e6, 5e6)]


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_folders_that_hold_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no folder .*missing: give the folder"):
        read_runs([tmp_path / "missing"])
    with pytest.raises(ConfigurationError, match=r"holds no config\.json: give the folder"):
        read_runs([tmp_path])
    with pytest.raises(ConfigurationError, match="no run to report"):
        read_runs([])
    run = write_run(tmp_path / "run", request())
    with pytest.raises(ConfigurationError, match="given 2 times"):
        read_runs([run, RunFolder.open(tmp_path / "run" / ".." / "run")])


def test_a_run_that_has_only_begun_is_refused(tmp_path: Path) -> None:
    RunKeeper.begin(OF_TWO, 2, tmp_path, anew=False).journal.close()
    with pytest.raises(ConfigurationError, match=r"no request of this run has ended.*continue it"):
        read_runs([tmp_path])


@pytest.mark.parametrize("table", ["requests", "events", "samples"])
def test_a_table_that_is_gone_or_damaged_is_named(table: str, tmp_path: Path) -> None:
    folder = RunFolder.open(write_run(tmp_path, request()))
    file = folder.table_file(table)
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content.replace(content[4:60], bytes(56))):
        file.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=rf"{table}\.parquet"):
            read_runs([tmp_path])
    file.unlink()
    with pytest.raises(ConfigurationError, match=rf"{table}\.parquet is missing.*Restore"):
        read_runs([tmp_path])


def test_a_table_without_a_column_is_named(tmp_path: Path) -> None:
    folder = RunFolder.open(write_run(tmp_path, request()))
    pa.parquet.write_table(folder.events().drop_columns(["data"]), folder.table_file("events"))
    with pytest.raises(ConfigurationError, match=r"events\.parquet lacks the column 'data'"):
        read_runs([tmp_path])


@pytest.mark.parametrize(("column", "value"), [("event", "SLEPT"), ("run_s", None), ("run_s", np.nan), ("data", "[1")])
def test_an_event_that_cannot_be_is_named_with_its_row(column: str, value: Any, tmp_path: Path) -> None:
    folder = RunFolder.open(write_run(tmp_path, request()))
    events = folder.events().to_pylist()
    events[2][column] = value
    pa.parquet.write_table(pa.Table.from_pylist(events, folder.events().schema), folder.table_file("events"))
    with pytest.raises(ConfigurationError, match=r"events\.parquet, row 3"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("requests", {"arrival_s": None}),
        ("requests", {"first_token_s": np.inf}),
        ("requests", {"send_s": [np.nan]}),
        ("samples", {"run_s": None}),
    ],
)
def test_rows_that_cannot_be_are_an_error_of_their_folder(table: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder.open(write_run(tmp_path, request()))
    found = getattr(folder, table)()
    broken = pa.Table.from_pylist([{**row, **change} for row in found.to_pylist()], found.schema)
    pa.parquet.write_table(broken, folder.table_file(table))
    with pytest.raises(ConfigurationError, match=f"{re.escape(str(tmp_path))} is damaged.*Restore"):
        read_runs(tmp_path)


def test_a_summary_of_no_known_state_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, request())
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"summary\.json has state=None"):
        read_runs([tmp_path])


def test_a_report_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", request())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file is a file: name a folder"):
        write_report([run], tmp_path / "file")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plainly(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"stream2llm-sdk\[plots\]"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_is_not_mixed_with_something_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", request())
    before = sorted((tmp_path / "run").iterdir())
    with pytest.raises(ConfigurationError, match=r"run holds '.*' and no report: give an empty or new folder"):
        write_report([run], tmp_path / "run")
    assert sorted((tmp_path / "run").iterdir()) == before


def test_an_earlier_report_of_other_runs_leaves_nothing_behind(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, request()) for name in ("one", "two")]
    write_report(runs, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("trace-*.json"))) == 2
    write_report(runs[:1], tmp_path / "out")
    assert not [*(tmp_path / "out").glob("trace-*.json"), *(tmp_path / "out").glob("timeline-*.png")]
