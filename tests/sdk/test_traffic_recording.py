"""Traffic that `StreamingRAG` records: what is kept, what is not, and that no trouble with it reaches a question."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stream2llm_sdk import Chunk, KeptTexts, Replace, SourceFailure, StreamingRAG, TrafficRecording
from stream2llm_sdk.cli import app
from stream2llm_sdk.context import Append, ContextMode
from stream2llm_sdk.errors import ConfigurationError, Stream2LLMError, TraceError
from stream2llm_sdk.prompt import PromptAssembler
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever
from stream2llm_sdk.traces import NUM_TOKENS, Trace, read_traces, write_traces
from stream2llm_sdk.traces.replay import ReplayOptions, Simulation, replay
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.synthesis_options import NUM_TEMPLATE_TOKENS
from stream2llm_sdk.traffic_recorder import TrafficRecorder

from .rag_parts import rag_of, text_in_prompt, tokenizer, until

A, B, C = (Chunk(f"text of {name}", source=name, title=name.upper()) for name in "abc")
TEXTS = list(KeptTexts)


async def recorded(folder: Path, retrievers: Any, *questions: str, texts: str = "keep", **options: Any) -> list[Trace]:
    """What is recorded of these questions, asked one after another."""
    record = options.pop("record", TrafficRecording(folder, texts=texts))
    async with rag_of(retrievers, options.pop("engine", None), record=record, **options) as rag:
        for question in questions or ("Why?",):
            with suppress(Stream2LLMError):
                await rag.ask(question)
    return list(read_traces(folder))


def sizes(trace: Trace) -> list[list[int]]:
    return [[chunk.metadata[NUM_TOKENS] for chunk in timed.update.chunks] for timed in trace.updates]


def recorder_of(rag: StreamingRAG) -> TrafficRecorder:
    assert rag.recording is not None
    return rag.recording


# ---- what a trace holds ----------------------------------------------------------------------------------------------


async def test_a_question_is_recorded_with_its_updates_at_their_times(tmp_path: Path) -> None:
    seen: list[float] = []
    retriever = ScriptedRetriever([0.02, A, 0.05, Append([B, C]), SourceFailure("http://d", "404"), 0.06])
    async with rag_of(retriever, FakeEngine("one two three"), record=tmp_path / "new" / "folder") as rag:
        for _ in range(2):
            await rag.stream("Why?", tenant="ann", observe=lambda event: seen.append(event.at_s)).answer()
    first, second = read_traces(tmp_path / "new" / "folder")
    assert (first.query, first.tenant, first.tag, first.max_tokens) == ("Why?", "ann", "ScriptedRetriever", 3)
    assert first.mode is ContextMode.APPEND
    assert [list(timed.update.chunks) for timed in first.updates][2] == []
    assert [chunk.text for chunk in first.final_chunks] == ["text of a", "text of b", "text of c"]
    assert [(chunk.source, chunk.title) for chunk in first.final_chunks] == [("a", "A"), ("b", "B"), ("c", "C")]
    assert sizes(first) == [[len(text_in_prompt(A))], [len(text_in_prompt(B)), len(text_in_prompt(C))], []]
    assert [timed.offset_s for timed in first.updates[:2]] == pytest.approx(seen[:2], abs=0.005)
    assert first.duration_s >= 0.13, "the retrieval ended later than its last update"
    assert [(failure.source, failure.reason) for failure in first.failures] == [("http://d", "404")]
    assert first.arrival_s is not None
    assert second.arrival_s is not None
    assert second.arrival_s - first.arrival_s >= 0.13


async def test_the_numbers_of_tokens_are_those_of_the_prompt(tmp_path: Path) -> None:
    engine = FakeEngine()
    (trace,) = await recorded(tmp_path, ScriptedRetriever([Append([A, B])]), engine=engine)
    head = PromptAssembler(tokenizer(), max_model_len=1000, max_answer_tokens=1, system="Answer.", markers=None)
    num_prompt = len(head.head_ids) + sum(map(sum, sizes(trace))) + (trace.num_query_tokens or 0)
    assert num_prompt == len(engine.requests[0].token_ids)


async def test_an_end_that_follows_at_once_is_no_update_of_its_own(tmp_path: Path) -> None:
    (trace,) = await recorded(tmp_path, ScriptedRetriever([0.05, A]))
    assert len(trace.updates) == 1


async def test_both_modes_at_once_are_the_contexts_that_stood_in_the_prompt(tmp_path: Path) -> None:
    web = ScriptedRetriever([0.02, A, 0.04, B])
    index = ScriptedRetriever([Replace([C]), 0.04, Replace([B, C]), 0.04], "update")
    (trace,) = await recorded(tmp_path, {"web": web, "index": index})
    assert (trace.mode, trace.tag) == (ContextMode.UPDATE, "index+web")
    pools = [[chunk.source for chunk in timed.update.chunks] for timed in trace.updates]
    assert pools == [["c"], ["a", "c"], ["a", "c", "b"], ["a", "b", "c", "b"]]


async def test_several_that_append_are_one_context_that_grows(tmp_path: Path) -> None:
    one, two = ScriptedRetriever([A, 0.03, C]), ScriptedRetriever([0.01, B])
    (trace,) = await recorded(tmp_path, [one, two])
    assert trace.mode is ContextMode.APPEND
    assert [chunk.source for chunk in trace.final_chunks] == ["a", "b", "c"]


async def test_an_update_that_changes_nothing_in_the_prompt_is_no_load_and_no_update(tmp_path: Path) -> None:
    (trace,) = await recorded(tmp_path, ScriptedRetriever([Replace([A]), 0.01, Replace([A]), 0.01], "update"))
    assert len(trace.updates) == 1


@pytest.mark.parametrize("texts", TEXTS)
async def test_what_the_budgets_left_out_of_the_prompt_is_left_out_here(texts: str, tmp_path: Path) -> None:
    long = Chunk("x" * 50 + "y" * 50, source="s")
    retriever = ScriptedRetriever(lambda query: [Append([A, long, B] if query == "Why?" else [long])])
    first, second = await recorded(tmp_path, retriever, "Why?", "How?", texts=texts, max_context_tokens=80)
    room = 80 - len(text_in_prompt(A))
    assert sizes(first) == [[len(text_in_prompt(A)), room]]
    assert sizes(second) == [[80]]
    cut, shorter = second.final_chunks[0], first.final_chunks[1]
    if texts == KeptTexts.KEEP:
        assert len(cut.text) == pytest.approx(76, abs=2)
        assert cut.text.startswith(shorter.text)
    assert (cut.text, cut.source) != (shorter.text, shorter.source), "these are not the same tokens"


async def test_metadata_that_json_does_not_hold_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = Chunk(
        "t\x00e\ud800xt", source="s", score=float("nan"), metadata={"lock": threading.Lock(), "year": 1999, 3: 4}
    )
    traces = await recorded(tmp_path, ScriptedRetriever([odd]), "Why?", "How?")
    assert [trace.final_chunks[0].metadata["year"] for trace in traces] == [1999, 1999]
    assert [record.message for record in caplog.records] == [
        "metadata that is not JSON is left out of recorded traces: 'lock', 3"
    ]
    write_traces(traces, tmp_path / "all.parquet")


async def test_a_number_that_is_too_long_for_json_is_left_out(tmp_path: Path) -> None:
    odd = Chunk("text", source="s", metadata={"huge": 10**5000, "year": 1999})
    (trace,) = await recorded(tmp_path, ScriptedRetriever([odd]))
    assert trace.final_chunks[0].metadata.keys() == {"year", NUM_TOKENS}


# ---- ends of all kinds -----------------------------------------------------------------------------------------------


async def test_a_cancelled_question_has_what_came_until_then(tmp_path: Path) -> None:
    retriever = ScriptedRetriever([A, 0.01, B, asyncio.Event()])
    async with rag_of(retriever, record=tmp_path) as rag:
        seen: list[Any] = []
        asked = asyncio.create_task(rag.ask("Why?", observe=seen.append))
        await until(lambda: len(seen) == 2)
        asked.cancel()
        await asyncio.wait({asked})
    (trace,) = read_traces(tmp_path)
    assert [chunk.source for chunk in trace.final_chunks] == ["a", "b"]
    assert trace.max_tokens is None
    assert [(failure.source, failure.reason) for failure in trace.failures] == [("answer", "cancelled")]


@pytest.mark.parametrize("texts", TEXTS)
async def test_a_deadline_is_marked_and_completes_the_context_when_it_was_reached(texts: str, tmp_path: Path) -> None:
    (trace,) = await recorded(tmp_path, ScriptedRetriever([A, asyncio.Event()]), deadline_s=0.2, texts=texts)
    assert trace.duration_s == pytest.approx(0.2, abs=0.1)
    assert [failure.reason for failure in trace.failures] == ["ended early: deadline"]
    assert trace.failures[0].source == "retrieval"
    assert trace.max_tokens == 4


async def test_a_failed_retrieval_is_recorded_with_its_reasons(tmp_path: Path) -> None:
    (trace,) = await recorded(tmp_path, {"web": ScriptedRetriever([0.01, ValueError("lost")])})
    assert [(failure.source, failure.reason) for failure in trace.failures] == [
        ("web", "ValueError: lost"),
        ("answer", "RetrievalError: no retriever gave any context: web: ValueError: lost"),
    ]
    assert sizes(trace) == [[]]


async def test_a_question_without_a_prompt_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it is empty"):
        await recorded(tmp_path, ScriptedRetriever([A]), " ")


# ---- what must not be kept -------------------------------------------------------------------------------------------

SECRETS = [
    "birch",
    "cedar",
    "chestnut",
    "cypress",
    "hawthorn",
    "juniper",
    "larch",
    "linden",
    "maple",
    "poplar",
    "rowan",
]
SECRETS += ["sequoia", "spruce", "willow", "0.125"]


@pytest.mark.parametrize("texts", ["hash", "count"])
async def test_no_word_that_came_in_is_in_the_folder(texts: str, tmp_path: Path) -> None:
    page = Chunk("birch cedar", "http://chestnut.example", "cypress", 0.125, {"hawthorn": "juniper", "list": ["larch"]})
    failure = SourceFailure("http://linden.example/maple", "no poplar there")
    retrievers = {
        "web": ScriptedRetriever([page, failure, 0.01, ValueError("rowan")]),
        "index": ScriptedRetriever([Replace([page])], "update"),
    }
    record = TrafficRecording(tmp_path, texts=texts)
    async with rag_of(retrievers, FakeEngine("sequoia"), record=record) as rag:
        await rag.ask("Which spruce?", query="willow", tenant="maple poplar")
        with suppress(KeyError):
            await rag.ask("spruce " * 10, observe=lambda event: {}["willow"])
    assert recorder_of(rag).num_written == 2
    written = b"".join(file.name.encode() + file.read_bytes() for file in tmp_path.iterdir()).lower()
    assert b"num_tokens" in written
    assert [secret for secret in SECRETS if secret.encode() in written] == []


async def test_hashed_texts_stay_equal_within_a_recording_and_with_a_key_of_ones_own_beyond(tmp_path: Path) -> None:
    async def names(folder: str, key: bytes | None) -> list[tuple[str, str, list[str]]]:
        record = TrafficRecording(tmp_path / folder, texts="hash", key=key)
        retriever = ScriptedRetriever(lambda query: [Append([A, B])] if query == "Why?" else [Append([B, C])])
        traces = await recorded(tmp_path / folder, retriever, "Why?", "How?", "Why?", record=record)
        return [(trace.query, trace.tenant, [chunk.source for chunk in trace.final_chunks]) for trace in traces]

    first = await names("one", None)
    assert first[0] == first[2]
    assert first[0][0] != first[1][0]
    assert first[0][2][1] == first[1][2][0], "the same text of two questions"
    other, own, again = await names("two", None), await names("three", b"k" * 32), await names("four", b"k" * 32)
    assert own == again
    assert not {first[0][0], *first[0][2]} & {other[0][0], *other[0][2], own[0][0], *own[0][2]}


async def test_counted_texts_are_equal_within_a_question_only(tmp_path: Path) -> None:
    retriever = ScriptedRetriever([Replace([A]), 0.01, Replace([A, B])], "update")
    first, second = await recorded(tmp_path, retriever, "Why?", "Why?", texts="count")
    before, after = (timed.update.chunks for timed in first.updates)
    assert before[0] == after[0]
    assert before[0] != after[1]
    assert not set(after) & set(second.final_chunks)


# ---- replays ---------------------------------------------------------------------------------------------------------


def crawler_and_index() -> list[ScriptedRetriever]:
    return [ScriptedRetriever([A, 0.02, B]), ScriptedRetriever([Replace([C]), 0.01, Replace([B, C])], "update")]


def crawler() -> ScriptedRetriever:
    labelled = Chunk(A.text, source="another place")  # the same text with another label: other tokens
    return ScriptedRetriever(lambda query: [0.01, A, 0.02, B, labelled] if query == "Why?" else [B, 0.05, C])


def num_final_tokens(trace: Trace) -> int:
    """The recorded length of a prompt, without its head."""
    return sum(chunk.metadata[NUM_TOKENS] for chunk in trace.final_chunks) + (trace.num_query_tokens or 0)


@pytest.mark.parametrize("texts", TEXTS)
async def test_recorded_traffic_makes_its_own_load_in_the_simulator_and_on_an_engine(
    texts: str, tmp_path: Path
) -> None:
    traces = await recorded(tmp_path, crawler(), "Why?", "How?", "Why?", texts=texts)
    simulated = simulated_requests(traces, num_template_tokens=0)
    assert [request.num_prompt_tokens for request in simulated] == [num_final_tokens(trace) for trace in traces]
    assembler = PromptAssembler(tokenizer(), max_model_len=8192, max_answer_tokens=16, system="Answer.", markers=None)
    engine = FakeEngine()
    live = await replay(traces, engine, ReplayOptions(), assembler=assembler)
    assert [request.finish_reason for request in live.requests] == ["stop"] * 3
    num_template = len(assembler.head_ids) if texts == KeptTexts.KEEP else NUM_TEMPLATE_TOKENS
    assert [len(request.token_ids) - num_template for request in engine.requests] == [
        num_final_tokens(trace) for trace in traces
    ]


@pytest.mark.slow
@pytest.mark.parametrize("retrievers", [crawler, crawler_and_index])
@pytest.mark.parametrize("texts", TEXTS)
async def test_recorded_traffic_replays_in_virtual_time(texts: str, retrievers: Any, tmp_path: Path) -> None:
    traces = await recorded(tmp_path, retrievers(), "Why?", "How?", "Why?", texts=texts)
    run = await replay(traces, Simulation("LCAS", {"num_gpu_blocks": 2000, "max_model_len": 8192}), ReplayOptions())
    assert [request.finish_reason for request in run.requests] == ["length"] * 3
    assert [request.num_prompt_tokens - NUM_TEMPLATE_TOKENS for request in run.requests] == [
        num_final_tokens(trace) for trace in traces
    ]
    assert [request.num_output_tokens for request in run.requests] == [4] * 3


@pytest.mark.parametrize("texts", TEXTS)
async def test_a_folder_becomes_a_parquet_file_by_the_convert_command(texts: str, tmp_path: Path) -> None:
    traces = await recorded(
        tmp_path / "in", ScriptedRetriever([A, SourceFailure("b", "x")]), "Why?", "How?", texts=texts
    )
    out = tmp_path / "out.parquet"
    result = CliRunner().invoke(app, ["trace", "convert", str(tmp_path / "in"), str(out)])
    assert result.exit_code == 0, result.output
    assert list(read_traces(out)) == traces
    assert CliRunner().invoke(app, ["trace", "stats", str(tmp_path / "in")]).exit_code == 0


# ---- the folder ------------------------------------------------------------------------------------------------------


async def test_a_folder_is_read_while_it_is_written(tmp_path: Path) -> None:
    async with rag_of(ScriptedRetriever([A]), record=tmp_path) as rag:
        for number in range(1, 4):
            await rag.ask("Why?")
            await until(lambda: recorder_of(rag).num_written == number)  # noqa: B023
            assert len(read_traces(tmp_path)) == number
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


async def test_several_record_into_one_folder_on_one_clock(tmp_path: Path) -> None:
    retriever = ScriptedRetriever([A])
    async with rag_of(retriever, record=tmp_path) as first, rag_of(retriever, record=tmp_path) as second:
        for number in range(6):
            await (first, second)[number % 2].ask(f"{number}?")
            await asyncio.sleep(0.002)
    assert len(list(tmp_path.iterdir())) == 2
    traces = read_traces(tmp_path)
    assert [trace.query for trace in traces] == [f"{number}?" for number in range(6)]
    assert len({trace.trace_id for trace in traces}) == 6


async def test_what_a_crash_cut_short_is_not_there_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    await recorded(tmp_path, ScriptedRetriever([A]), "One?", "Two?", "Three?")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    header, one, two, three = whole.splitlines(keepends=True)
    for length in (0, 5, len(header) - 1):
        file.write_bytes(header[:length])
        with pytest.raises(TraceError, match="no traces in it"):
            read_traces(tmp_path)
    file.write_bytes(whole[:-10])
    assert [trace.query for trace in read_traces(tmp_path)] == ["One?", "Two?"]
    for damaged in (b"{}\n", b"[1]\n", b"\xff\n", two[:40] + b"\n", two.replace(b'"mode":"append"', b'"mode":7')):
        file.write_bytes(header + one + damaged + three)
        with pytest.raises(TraceError, match="row 2"):
            read_traces(tmp_path)
        assert [trace.query for trace in read_traces(tmp_path, on_error="skip")] == ["One?", "Three?"]
    file.write_bytes(header + one + one)
    with pytest.raises(TraceError, match="already"):
        read_traces(tmp_path)
    for first_line in (b"{}\n", b"[]\n", b"7\n", header.replace(b'traffic":1', b'traffic":9'), b"x" * (1 << 17)):
        file.write_bytes(first_line + one)
        with pytest.raises(TraceError):
            read_traces(tmp_path)


def test_any_damage_of_a_byte_is_an_error_or_a_trace_and_nothing_else(tmp_path: Path) -> None:
    asyncio.run(recorded(tmp_path, ScriptedRetriever([Replace([A]), 0.001, Replace([A, B])], "update")))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for position in range(0, len(whole), 3):
        for byte in (b"\n", b"9", b'"'):
            file.write_bytes(whole[:position] + byte + whole[position + 1 :])
            with suppress(TraceError):
                read_traces(tmp_path, on_error="skip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": ""}, "record=''"),
        ({"folder": 7}, "record=7"),
        ({"texts": "none"}, "texts='none': choose one of keep, hash, count"),
        ({"sample": 0}, "sample=0"),
        ({"sample": float("nan")}, "sample=nan"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_queued": None}, "max_queued=None"),
        ({"key": b"short"}, "key must be 16 to 64 bytes"),
    ],
)
def test_a_value_that_cannot_work_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrafficRecording(**{"folder": "somewhere", **options})


def test_a_folder_that_cannot_be_recorded_into_is_named_when_the_object_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for folder, reason in ((file, "file"), (file / "below", "Not a directory"), (tmp_path, "holds 'file'")):
        with pytest.raises(ConfigurationError, match=reason):
            rag_of(ScriptedRetriever([A]), record=folder)
    assert list(tmp_path.iterdir()) == [file]


# ---- trouble ---------------------------------------------------------------------------------------------------------


async def test_a_folder_that_is_gone_costs_traces_and_no_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traffic"
    async with rag_of(ScriptedRetriever([A]), record=folder) as rag:
        recorder = recorder_of(rag)

        async def ask(question: str) -> None:
            before = recorder.num_written + recorder.num_dropped
            assert (await rag.ask(question)).sources
            await until(lambda: recorder.num_written + recorder.num_dropped > before)

        await ask("One?")
        folder.rename(tmp_path / "taken away")
        await ask("Two?")
        await ask("Three?")
        assert (recorder.num_written, recorder.num_dropped) == (1, 2)
        folder.mkdir()
        await ask("Four?")
        shutil.rmtree(folder)
        folder.mkdir()
        await ask("Five?")
    assert (recorder.num_written, recorder.num_dropped) == (3, 2)
    assert [trace.query for trace in read_traces(tmp_path / "taken away")] == ["One?"]
    assert [trace.query for trace in read_traces(folder)] == ["Five?"]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "No such file or directory" in warning.message


async def test_at_max_bytes_nothing_more_is_written_until_something_is_taken_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream2llm_sdk.traffic_recorder._SIZES_EVERY_S", 0.0)
    record = TrafficRecording(tmp_path, max_bytes=2000)
    async with rag_of(ScriptedRetriever([A]), record=record) as rag:
        recorder = recorder_of(rag)
        for _ in range(20):
            await rag.ask("Why?")
        await until(lambda: recorder.num_written + recorder.num_dropped == 20)
        num_written = recorder.num_written
        assert 2 <= num_written < 10
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3000
        for file in tmp_path.iterdir():
            file.unlink()
        await rag.ask("Why?")
    assert recorder.num_written == num_written + 1
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"{tmp_path} holds max_bytes=2,000 of recorded traffic"
    ]


class _Held(Mapping[str, Any]):
    """Metadata that cannot be looked at before `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        self.go.wait(20)
        return iter(())


async def test_traces_that_find_the_queue_full_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = _Held()
    record = TrafficRecording(tmp_path, max_queued=2)
    async with rag_of(ScriptedRetriever([Chunk("text", metadata=held)]), record=record) as rag:
        recorder = recorder_of(rag)
        await rag.ask("first")
        await until(lambda: recorder.num_queued == 0)
        for _ in range(5):
            assert (await rag.ask("Why?")).text
        assert (recorder.num_queued, recorder.num_dropped) == (2, 3)
        held.go.set()
    assert (recorder.num_written, recorder.num_dropped) == (3, 3)
    assert len([record for record in caplog.records if "wait to be written" in record.message]) == 1


async def test_a_sample_of_the_questions_is_recorded(tmp_path: Path) -> None:
    record = TrafficRecording(tmp_path, sample=0.5)
    async with rag_of(ScriptedRetriever([A]), record=record) as rag:
        await asyncio.gather(*(rag.ask("Why?") for _ in range(60)))
    recorder = recorder_of(rag)
    assert recorder.num_written + recorder.num_left_out == 60
    assert 5 < recorder.num_written < 55


async def test_after_closing_nothing_is_left_and_closing_again_is_fine(tmp_path: Path) -> None:
    rag = rag_of(ScriptedRetriever([A]), record=tmp_path)
    await rag.ask("Why?")
    await rag.aclose()
    await rag.aclose()
    assert not [thread for thread in threading.enumerate() if thread.name == "stream2llm-record"]
    assert recorder_of(rag).num_written == 1
    assert "1 traces written, 0 dropped" in repr(recorder_of(rag))
    assert rag_of(ScriptedRetriever([A])).recording is None


PROGRAM = """
import asyncio, os, resource, signal, sys, time
sys.path.insert(0, {tests!r})
from tiny_tokenizer import byte_tokenizer
from stream2llm_sdk import StreamingRAG
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever

async def main():
    rag = StreamingRAG("no-model", ScriptedRetriever(["some text"]), engine=FakeEngine(), tokenizer=byte_tokenizer(),
                       max_answer_tokens=16, record={folder!r})
    for number in range(20):
        assert (await rag.ask(f"{{number}}?")).text
    {end}

asyncio.run(main())
"""


def run_program(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder), end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    ran = run_program(tmp_path, "pass")
    assert ran.returncode == 0, ran.stderr
    assert len(read_traces(tmp_path)) == 20


def test_a_killed_program_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    wait = "while rag.recording.num_written < 20: time.sleep(0.001)"
    assert run_program(tmp_path, f"{wait}\n    os.kill(os.getpid(), signal.SIGKILL)").returncode == -9
    assert [trace.query for trace in read_traces(tmp_path)] == [f"{number}?" for number in range(20)]


def test_a_full_disk_costs_traces_and_no_answers_and_leaves_whole_lines(tmp_path: Path) -> None:
    # A file that may not grow fails as on a full disk: a line is written in part, the next ones not at all.
    more = f"""
    while rag.recording.num_queued: time.sleep(0.001)
    await asyncio.sleep(0.05)
    size = sum(file.stat().st_size for file in os.scandir({str(tmp_path)!r}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
    for number in range(20, 23):
        assert (await rag.ask(f"{{number}}?")).text
    while rag.recording.num_dropped < 3: time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert (await rag.ask("last?")).text
    await rag.aclose()
    print(rag.recording.num_written, rag.recording.num_dropped)
    """
    ran = run_program(tmp_path, more.strip())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["21", "3"]
    assert ran.stderr.count("File too large") == 1
    assert [trace.query for trace in read_traces(tmp_path)] == [*(f"{number}?" for number in range(20)), "last?"]
    for file in tmp_path.iterdir():
        assert all(json.loads(line) for line in file.read_text().splitlines())
