"""Replays on the engine without a model, in virtual time: nothing waits, and every time can be computed by hand."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import selectors
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError, EngineDeadError, PromptTooLongError
from stream2llm_sdk.testing import FakeEngine
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.pacing import HostClock
from stream2llm_sdk.traces.prompt_script import FillerPrompts, filler_ids, script_of
from stream2llm_sdk.traces.replay import ReplayOptions, ReplayProgress, ReplayRun, replay
from stream2llm_sdk.traces.replay_run import RunState
from stream2llm_sdk.traces.run_folder import RunFolder
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace

ResultT = TypeVar("ResultT")
Virtually = Callable[[Coroutine[Any, Any, ResultT]], ResultT]
TEMPLATE, QUESTION = 60, 10


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Where others would wait, time jumps to the next timer."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for something that will never happen"
            self.loop.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Virtually[Any]:
    """Runs a coroutine in virtual time, which is what `time.monotonic` says then too."""

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        loop = VirtualLoop()
        with monkeypatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
            patch.setattr(time, "monotonic", loop.time)
            patch.setattr(time, "time", lambda: 1_700_000_000 + loop.time())
            return runner.run(work)

    return run


def engine(**options: Any) -> FakeEngine:
    """Computes a thousand tokens a second, and answers at once; its trails are in virtual time."""
    fake = FakeEngine("one two three", **{"prefill_tokens_per_s": 1000, **options})
    fake.recorder.clock = HostClock()
    return fake


def page(name: str, num_tokens: int) -> Chunk:
    return Chunk("", source=name, metadata={NUM_TOKENS: num_tokens})


def crawl(name: str = "a", arrival_s: float | None = 1.0, **fields: Any) -> Trace:
    """A search of half a second, then 200 tokens after 2 s and 100 after 3 s."""
    updates = ((0.5, Append(())), (2.0, Append([page(f"{name}1", 200)])), (3.0, Append([page(f"{name}2", 100)])))
    return Trace(
        name,
        "",
        tuple(TimedUpdate(offset_s, update) for offset_s, update in updates),
        arrival_s=arrival_s,
        num_query_tokens=QUESTION,
        **fields,
    )


def search(name: str = "s", arrival_s: float = 0.0) -> Trace:
    """Two pools; the second has one new document, at its end."""
    pools = ((1.0, ["x", "y"]), (2.0, ["x", "z"]))
    updates = tuple(TimedUpdate(offset_s, Replace([page(doc, 100) for doc in pool])) for offset_s, pool in pools)
    return Trace(name, "", updates, arrival_s=arrival_s, num_query_tokens=QUESTION)


def operations(fake: FakeEngine) -> list[tuple[str, int]]:
    return [(operation.kind, len(operation.token_ids)) for operation in fake.requests[0].operations]


# ---- what is sent, and when -----------------------------------------------------------------------------------------


def test_an_appending_trace_is_sent_chunk_by_chunk_at_its_times(virtually: Virtually[ReplayRun]) -> None:
    fake = engine()
    run = virtually(replay([crawl()], fake))
    assert operations(fake) == [("open", TEMPLATE), ("append", 200), ("finish", 100 + QUESTION)]
    (request,) = run.requests
    assert request.send_s == pytest.approx((1.5, 3.0, 4.0))
    assert request.lags_s == pytest.approx([0, 0, 0])
    assert request.send_tokens == (TEMPLATE, 200, 100 + QUESTION)
    # When the context is complete, the last chunk is left to compute, and the token that was held back.
    assert request.ttft_from_context_complete_s == pytest.approx(0.111)
    assert request.ttft_from_request_s == pytest.approx(3.111)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.finish_reason) == (370, 1, "length")


def test_without_streaming_the_whole_prompt_is_sent_with_the_last_chunk(virtually: Virtually[ReplayRun]) -> None:
    fake = engine()
    run = virtually(replay([crawl()], fake, ReplayOptions(streaming=False)))
    assert operations(fake) == [("open", 370)]
    assert not fake.requests[0].is_streaming_prompt
    (request,) = run.requests
    assert request.send_s == pytest.approx((4.0,))
    assert request.ttft_from_context_complete_s == pytest.approx(0.370)


def test_streamed_or_whole_the_final_prompt_is_the_same(virtually: Virtually[ReplayRun]) -> None:
    for trace in (crawl(), search()):
        prompts = set()
        for streaming in (True, False):
            fake = engine()
            virtually(replay([trace], fake, ReplayOptions(streaming=streaming)))
            prompts.add(fake.requests[0].token_ids)
        assert len(prompts) == 1


def test_an_updating_trace_replaces_its_prompt_and_keeps_what_is_common(virtually: Virtually[ReplayRun]) -> None:
    fake = engine()
    run = virtually(replay([search()], fake))
    assert operations(fake) == [("open", TEMPLATE + 200), ("finish", TEMPLATE + 200 + QUESTION)]
    (request,) = run.requests
    assert request.send_tokens == (TEMPLATE + 200, 100 + QUESTION)
    # The last of an open prompt's tokens is not computed.
    assert request.num_tokens_invalidated == 99
    assert request.ttft_from_context_complete_s == pytest.approx(0.110)


def test_waits_and_arrivals_are_stretched(virtually: Virtually[ReplayRun]) -> None:
    run = virtually(replay([crawl()], engine(), ReplayOptions(delay_multiplier=2, time_scale=10)))
    (request,) = run.requests
    assert request.arrival_s == pytest.approx(10.0)
    assert request.send_s == pytest.approx((20.0, 50.0, 70.0))


def test_arrivals_are_drawn_by_seed_and_go_to_the_traces_in_their_order(virtually: Virtually[ReplayRun]) -> None:
    traces = [crawl(name, None) for name in "abc"]
    arrivals = Arrivals(rate_per_s=2)
    run = virtually(replay(traces, engine(), ReplayOptions(arrivals=arrivals, seed=3)))
    found = {request.query_id: request.arrival_s for request in run.requests}
    assert [found[name] for name in "abc"] == pytest.approx(list(arrivals.draw(3, seed=3)))


def test_at_most_so_many_requests_are_under_way_as_were_allowed(virtually: Virtually[ReplayRun]) -> None:
    fake = engine()
    run = virtually(replay([crawl("a", 0.0), crawl("b", 1.0)], fake, ReplayOptions(concurrency=1)))
    first, second = run.requests
    assert second.arrival_s == pytest.approx(1.0)
    assert second.held_s == pytest.approx(first.finished_s - 1.0)
    assert second.send_s[0] == pytest.approx(first.finished_s + 0.5)
    assert second.max_lag_s == pytest.approx(0)


def test_tenant_tag_and_tokens_go_to_the_engine(virtually: Virtually[ReplayRun]) -> None:
    fake = engine()
    traces = [crawl("a", tenant="t1", tag="web", max_tokens=2), crawl("b", 2.0, tenant="t2")]
    run = virtually(replay(traces, fake, ReplayOptions(max_tokens=3, limit=2)))
    assert [(request.tenant, request.tag, request.num_output_tokens) for request in run.requests] == [
        ("t1", "web", 2),
        ("t2", "", 3),
    ]
    assert fake.requests[0].sampling == {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    run = virtually(replay(traces, engine(), ReplayOptions(tenant="mine")))
    assert {request.tenant for request in run.requests} == {"mine"}


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_filler_of_one_source_is_the_same_everywhere_and_within_the_vocabulary() -> None:
    assert filler_ids("a", 50, 1000) == filler_ids("a", 80, 1000)[:50]
    assert filler_ids("a", 50, 1000) != filler_ids("b", 50, 1000)
    assert all(250 <= token < 875 for token in filler_ids("a", 500, 1000))


def test_a_prompt_too_long_for_the_engine_is_cut_as_an_assembler_cuts_it() -> None:
    script = script_of(crawl(), FillerPrompts(1000, engine(max_model_len=300).limits))
    assert len(script.final_ids()) == 299


def test_traces_with_texts_need_an_assembler(virtually: Virtually[ReplayRun]) -> None:
    trace = Trace("t", "why?", (TimedUpdate(0.0, Append([Chunk("text")])),), arrival_s=0.0)
    with pytest.raises(ConfigurationError, match="assembler"):
        virtually(replay([trace], engine()))


def test_texts_are_assembled_as_in_an_application(virtually: Virtually[ReplayRun]) -> None:
    from tiny_tokenizer import byte_tokenizer

    from stream2llm_sdk.prompt import PromptAssembler

    assembler = PromptAssembler(byte_tokenizer(), max_model_len=2000, max_answer_tokens=1)
    updates = (TimedUpdate(0.0, Append([Chunk("first page")])), TimedUpdate(1.0, Append([Chunk("second page")])))
    fake = engine()
    virtually(replay([Trace("t", "why?", updates, arrival_s=0.0)], fake, assembler=assembler))
    prompt = assembler.begin("why?")
    for timed in updates:
        prompt.apply(timed.update)
    assert list(fake.requests[0].token_ids) == prompt.final_ids


@st.composite
def size_traces(draw: st.DrawFn) -> Trace:
    """A trace of up to six updates of up to four chunks, some of them the same, some empty."""
    kind = draw(st.sampled_from((Append, Replace)))
    chunks = st.builds(page, st.sampled_from("abcdefgh"), st.just(20)) | st.builds(page, st.just("empty"), st.just(0))
    updates = draw(st.lists(st.tuples(st.floats(0, 5), st.lists(chunks, max_size=4)), min_size=1, max_size=6))
    times_s = sorted(offset_s for offset_s, _ in updates)
    timed = (TimedUpdate(at_s, kind(parts)) for at_s, (_, parts) in zip(times_s, updates, strict=True))
    return Trace("drawn", "", tuple(timed), arrival_s=draw(st.floats(0, 5)), num_query_tokens=QUESTION)


@settings(max_examples=20, deadline=None)
@given(size_traces())
def test_each_message_builds_on_the_prompt_before(trace: Trace) -> None:
    script = script_of(trace, FillerPrompts(1000, engine().limits))
    before: list[int] = []
    for step, prompt in zip(script.steps, script.prompts(), strict=True):
        assert step.keep <= len(before)
        assert prompt[: step.keep].tolist() == before[: step.keep]
        if isinstance(trace.updates[0].update, Append):
            assert step.keep == len(before)
        before = prompt.tolist()
    assert before == script.final_ids().tolist()
    assert tuple(before[-QUESTION:]) == filler_ids("question of drawn", QUESTION, 1000)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size_traces(), st.booleans())
def test_nothing_is_sent_before_its_time_and_the_engine_gets_the_whole_prompt(
    virtually: Virtually[ReplayRun], trace: Trace, streaming: bool
) -> None:
    fake = engine()
    (request,) = virtually(replay([trace], fake, ReplayOptions(streaming=streaming))).requests
    assert request.has_succeeded
    assert list(request.send_s) == sorted(request.send_s)
    assert all(sent >= due - 1e-9 for due, sent in zip(request.send_due_s, request.send_s, strict=True))
    assert fake.requests[0].token_ids == tuple(script_of(trace, FillerPrompts(10**6, fake.limits)).final_ids().tolist())


def test_a_trace_without_any_context_is_replayed_all_the_same(virtually: Virtually[ReplayRun]) -> None:
    trace = Trace("t", "", (TimedUpdate(1.0, Append(())),), arrival_s=0.0, num_query_tokens=QUESTION)
    (request,) = virtually(replay([trace], engine())).requests
    assert (request.num_prompt_tokens, request.has_succeeded) == (TEMPLATE + QUESTION, True)


# ---- lag ------------------------------------------------------------------------------------------------------------


class _SlowClock(HostClock):
    """A host that is busy with something else."""

    async def sleep_until(self, monotonic_s: float) -> None:
        await super().sleep_until(monotonic_s + 0.050)


def test_a_run_that_could_not_keep_up_says_so(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    run = virtually(replay([crawl()], engine(), out=tmp_path / "run", clock=_SlowClock()))
    assert run.send_lag_s[95] == pytest.approx(0.1, abs=0.06)
    assert run.is_spoiled_by_lag
    assert run.summary()["is_spoiled_by_lag"]
    assert any("spoiled" in line for line in RunFolder.open(tmp_path / "run").summary()["warnings"])


def test_a_run_that_kept_up_has_no_warnings(virtually: Virtually[ReplayRun]) -> None:
    run = virtually(replay([crawl()], engine()))
    assert not run.is_spoiled_by_lag
    assert run.warnings == []


# ---- errors, stopping, going on -------------------------------------------------------------------------------------


class _Picky(FakeEngine):
    """Refuses one request."""

    async def open(self, *arguments: Any, **options: Any) -> Any:
        if options["request_id"] == "replay-00000":
            raise PromptTooLongError("too long")
        return await super().open(*arguments, **options)


def test_a_request_that_fails_is_recorded_and_the_others_go_on(virtually: Virtually[ReplayRun]) -> None:
    run = virtually(replay([crawl("a"), crawl("b")], _Picky(), ReplayOptions(on_error="continue")))
    failed, fine = sorted(run.requests, key=lambda request: request.query_id)
    assert (failed.finish_reason, failed.error) == ("error", "PromptTooLongError: too long")
    assert fine.has_succeeded
    assert run.summary()["num_failed"] == 1
    assert run.state is RunState.COMPLETE


def test_a_failing_request_ends_the_run_where_that_was_asked_for(
    virtually: Virtually[ReplayRun], tmp_path: Path
) -> None:
    fake = _Picky()
    with pytest.raises(PromptTooLongError):
        virtually(replay([crawl("a"), crawl("b")], fake, ReplayOptions(on_error="stop"), out=tmp_path / "run"))
    assert RunFolder.open(tmp_path / "run").state == "failed"
    assert fake.num_open_streams == 0


def test_an_engine_that_dies_ends_the_run(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    async def work() -> None:
        fake = engine()
        asyncio.get_running_loop().call_later(2.0, fake.die)
        await replay([crawl("a"), crawl("b", 50.0)], fake, out=tmp_path / "run")

    with pytest.raises(EngineDeadError):
        virtually(work())
    folder = RunFolder.open(tmp_path / "run")
    assert folder.state == "failed"
    assert "EngineDeadError" in folder.requests().to_pylist()[0]["error"]


async def _stopped_after(seconds: float, fake: FakeEngine, out: Path, traces: list[Trace]) -> None:
    task = asyncio.ensure_future(replay(traces, fake, out=out))
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_stopped_run_leaves_nothing_open_and_its_folder_says_that_it_was_stopped(
    virtually: Virtually[None], tmp_path: Path
) -> None:
    fake = engine()
    virtually(_stopped_after(4.5, fake, tmp_path / "run", [crawl("a", 0.0), crawl("b", 2.0), crawl("c", 90.0)]))
    assert fake.num_open_streams == 0
    assert fake.requests[1].is_aborted
    folder = RunFolder.open(tmp_path / "run")
    assert folder.state == "stopped"
    found = {row["query_id"]: row["finish_reason"] for row in folder.requests().to_pylist()}
    assert found == {"a": "length", "b": "abort"}
    assert folder.summary()["warnings"] == ["stopped: 1 of 3 requests have ended"]


def test_a_stopped_run_is_continued_with_what_had_not_ended(virtually: Virtually[Any], tmp_path: Path) -> None:
    traces = [crawl("a", 0.0), crawl("b", 2.0), crawl("c", 90.0)]
    virtually(_stopped_after(4.5, engine(), tmp_path / "run", traces))
    fake = engine()
    seen: list[ReplayProgress] = []
    run = virtually(replay(traces, fake, out=tmp_path / "run", progress=seen.append))
    assert len(fake.requests) == 2
    assert run.state is RunState.COMPLETE
    assert {request.query_id: request.finish_reason for request in run.requests} == dict.fromkeys("abc", "length")
    again = {request.query_id: request for request in run.requests}
    # The second segment begins at once with the first request that is left, where the first one ended.
    assert again["b"].segment == 1
    assert again["b"].arrival_s == pytest.approx(4.5)
    assert again["c"].arrival_s == pytest.approx(4.5 + 88.0)
    assert any("continued 1 times" in line for line in run.warnings)
    assert (seen[0].num_ended, seen[-1].num_ended, seen[-1].num_requests) == (1, 3, 3)


def test_a_complete_run_is_not_replayed_again(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    first = virtually(replay([crawl()], engine(), out=tmp_path / "run"))
    fake = engine()
    second = virtually(replay([crawl()], fake, out=tmp_path / "run"))
    assert fake.requests == []
    assert second.summary() == first.summary()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"options": ReplayOptions(seed=7)}, "options.seed=0, not 7"),
        ({"traces": [crawl("other")]}, "traces.fingerprint"),
        ({"engine": engine(max_model_len=999)}, "engine.limits"),
    ],
)
def test_another_run_is_not_continued(
    virtually: Virtually[Any], tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    virtually(_stopped_after(1.5, engine(), tmp_path / "run", [crawl()]))
    asked = {"traces": [crawl()], "engine": engine(), "options": ReplayOptions(), **changed}
    with pytest.raises(ConfigurationError, match=named):
        virtually(replay(asked["traces"], asked["engine"], asked["options"], out=tmp_path / "run"))


def test_a_run_that_was_killed_can_be_read_and_continued(virtually: Virtually[Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    traces = [crawl("a", 0.0), crawl("b", 20.0)]
    virtually(_stopped_after(19.0, engine(), folder.path, traces))
    for file in folder.path.iterdir():
        if file.name not in ("config.json", "journal.jsonl"):
            file.unlink()
    with open(folder.journal_file, "a", encoding="utf-8") as journal:
        journal.write('{"kind": "request", "row": {"request_')  # a line that was being written
    assert folder.state == "interrupted"
    assert folder.requests().to_pylist()[0]["query_id"] == "a"
    run = virtually(replay(traces, engine(), out=folder.path))
    assert [request.query_id for request in run.requests] == ["a", "b"]
    assert not folder.journal_file.exists()


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_the_folder_holds_everything_that_happened(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    options = ReplayOptions(policy="FCFS", sample_every_s=0.5)
    run = virtually(replay([crawl("a", 0.0), search("s", 1.25)], engine(), options, out=tmp_path / "run"))
    folder = RunFolder.open(tmp_path / "run")
    assert folder.config()["options"]["policy"] == "FCFS"
    assert folder.config()["engine"]["limits"]["max_model_len"] == 8192
    assert [row["query_id"] for row in folder.requests().to_pylist()] == ["a", "s"]

    events = [event for event in folder.events().to_pylist() if event["query_id"] == "a"]
    assert [event["run_s"] for event in events] == sorted(event["run_s"] for event in events)
    assert [event["event"] for event in events if event["source"] == "driver"] == [
        *("query_delay", "query_start", "query_sleep", "query_sleep", "query_sleep"),
        *("query_ttft", "query_e2e_latency"),
    ]
    names = [event["event"] for event in events if event["source"] == "engine"]
    assert names[0] == "QUEUED"
    assert names[-1] == "FINISHED"
    lengths = sum(event["duration_s"] for event in events if event["source"] == "engine" and event["duration_s"])
    assert lengths == pytest.approx(run.requests[0].finished_s - 0.5)

    samples = {round(row["run_s"], 3): row for row in folder.samples().to_pylist()}
    assert [samples[at]["num_requests"] for at in (0.5, 1.5, 3.0)] == [1, 2, 2]
    assert [samples[at]["num_open_streams"] for at in (0.0, 1.0, 2.5)] == [0, 1, 2]
    assert [samples[at]["num_kv_on_gpu"] for at in (0.0, 1.0, 2.0)] == [0, 1, 0]


def test_the_published_csv_has_its_columns_and_event_names(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    virtually(replay([crawl("a", 0.0), search("s", 1.25)], engine(), out=tmp_path / "run"))
    with open(tmp_path / "run" / "run_metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("event_timestamp", "event_type", "query_id", "request_id", "stream", "concurrency", "duration_secs"),
        *("details", "request_size", "concurrent_requests", "replay_rate", "prev_event_type"),
        *("num_documents", "pipeline_pool_change"),
    ]
    kinds = {row["event_type"] for row in rows}
    assert {"replay_start", "query_delay", "query_start", "query_sleep", "pipeline_pool_update"} <= kinds
    assert {"query_ttft", "query_e2e_latency", "replay_end", "EngineCoreEventType.SCHEDULED"} <= kinds
    assert not any("FINISHED" in kind or "CHUNK_ARRIVED" in kind for kind in kinds)
    (ttft,) = (row for row in rows if row["event_type"] == "query_ttft" and row["query_id"] == "s")
    assert float(ttft["duration_secs"]) == pytest.approx(0.110)
    assert (ttft["stream"], ttft["request_size"]) == ("True", str(TEMPLATE + 200 + QUESTION))
    pools = [row for row in rows if row["event_type"] == "pipeline_pool_update"]
    assert [(row["num_documents"], row["pipeline_pool_change"]) for row in pools] == [("2", "2"), ("2", "1")]
    # An interval's time is its end.
    engine_rows = [row for row in rows if row["query_id"] == "a" and row["event_type"].startswith("Engine")]
    for before, row in itertools.pairwise(engine_rows):
        assert float(row["event_timestamp"]) - float(row["duration_secs"]) == pytest.approx(
            float(before["event_timestamp"])
        )
        assert row["prev_event_type"] == before["event_type"]


def test_the_same_replay_gives_the_same_journal(virtually: Virtually[ReplayRun], tmp_path: Path) -> None:
    tables = []
    for name in ("one", "two"):
        virtually(replay([crawl(), search()], engine(), out=tmp_path / name))
        folder = RunFolder.open(tmp_path / name)
        tables.append((folder.requests(), folder.events(), folder.samples(), folder.summary()))
    assert tables[0] == tables[1]


def test_the_summary_gives_both_ttfts_and_what_they_cost(virtually: Virtually[ReplayRun]) -> None:
    summary = virtually(replay([crawl("a", 0.0), crawl("b", 100.0)], engine())).summary()
    assert summary["ttft_from_context_complete_p50_s"] == pytest.approx(0.111)
    assert summary["ttft_from_request_p99_s"] == pytest.approx(3.111)
    assert summary["completion_time_s"] == pytest.approx(103.111)
    assert summary["requests_per_s"] == pytest.approx(2 / 103.111)
    assert summary["num_preemptions"] == 0
    assert summary["swap_share"] is None
    json.dumps(summary)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"streaming": 1},
        {"delay_multiplier": -1},
        {"time_scale": 0},
        {"time_scale": float("nan")},
        {"arrivals": "poisson"},
        {"seed": -1},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"concurrency": 0},
        {"limit": True},
        {"tenant": 3},
        {"policy": None},
        {"sample_every_s": 0},
        {"on_error": "ignore"},
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        ReplayOptions(**wrong)


def test_a_trace_without_an_arrival_needs_arrivals() -> None:
    with pytest.raises(ConfigurationError, match="arrival_s"):
        ReplayOptions().applied_to([crawl(arrival_s=None)])
