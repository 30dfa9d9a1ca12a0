"""Replays in virtual time on vLLM's real scheduler: the same folder as an engine's, to be computed by hand."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner

from stream2llm_sdk.cli import app
from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.latency import StepLatency
from stream2llm_sdk.traces.replay import ReplayOptions, ReplayProgress, ReplayRun, Simulation, replay
from stream2llm_sdk.traces.replay_run import RunState
from stream2llm_sdk.traces.run_folder import RunFolder
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace
from stream2llm_sdk.traces.trace_set import write_traces

# A step takes ten milliseconds and one more for each token; the client sees it at once.
EASY = StepLatency(overhead_s=0.01, flops_per_token=1.0, flops_per_pair=0.0, effective_flops_per_s=1000.0)
TEMPLATE, QUESTION = 60, 10


def simulation(**arguments: Any) -> Simulation:
    sizes = {"num_gpu_blocks": 200, "max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 16}
    return Simulation("FCFS", {**sizes, "latency": EASY, **arguments})


def run(traces: list[Trace], engine: Simulation | None = None, **options: Any) -> ReplayRun:
    out = options.pop("out", None)
    return asyncio.run(replay(traces, engine or simulation(), ReplayOptions(**options), out=out))


def page(name: str, num_tokens: int) -> Chunk:
    return Chunk("", source=name, metadata={NUM_TOKENS: num_tokens})


def crawl(name: str = "a", arrival_s: float = 1.0, num_tokens: int = 100) -> Trace:
    parts = ((0.5, []), (2.0, [page(f"{name}1", 2 * num_tokens)]), (3.0, [page(f"{name}2", num_tokens)]))
    updates = tuple(TimedUpdate(offset_s, Append(chunks)) for offset_s, chunks in parts)
    return Trace(name, "", updates, arrival_s=arrival_s, num_query_tokens=QUESTION, tenant="t", tag="web")


def search(name: str = "s", arrival_s: float = 0.0) -> Trace:
    pools = ((1.0, ["x", "y"]), (2.0, ["x", "z"]))
    updates = tuple(TimedUpdate(offset_s, Replace([page(doc, 100) for doc in pool])) for offset_s, pool in pools)
    return Trace(name, "", updates, arrival_s=arrival_s, num_query_tokens=QUESTION)


def test_a_simulated_request_has_the_columns_of_a_served_one() -> None:
    (request,) = run([crawl()]).requests
    assert request.send_s == request.send_due_s == (1.5, 3.0, 4.0)
    assert request.send_tokens == (TEMPLATE, 200, 100 + QUESTION)
    assert request.num_prompt_tokens == 370
    # The last chunk, the token that was held back, and the step's own ten milliseconds.
    assert request.ttft_from_context_complete_s == pytest.approx(0.121)
    assert request.ttft_from_request_s == pytest.approx(3.121)
    assert (request.tenant, request.tag, request.finish_reason, request.max_lag_s) == ("t", "web", "length", 0.0)
    assert request.num_tokens_computed == 370
    assert request.send_taken_s[1:] == pytest.approx((3.0, 4.0))


def test_without_streaming_the_whole_prompt_is_computed_at_the_end() -> None:
    (request,) = run([crawl()], streaming=False).requests
    assert request.send_s == (4.0,)
    assert request.ttft_from_context_complete_s == pytest.approx(0.380)


def test_vllms_own_scheduler_is_simulated_without_a_trail() -> None:
    own = Simulation(None, simulation().arguments)
    (request,) = run([crawl()], own, streaming=False).requests
    assert request.ttft_from_context_complete_s == pytest.approx(0.380)
    assert (request.num_tokens_computed, request.num_recompute_preemptions) == (370, 0)


def test_options_mean_the_same_as_on_an_engine() -> None:
    found = run([crawl(), crawl("b", 2.0)], delay_multiplier=2, time_scale=10, limit=1, tenant="mine", max_tokens=2)
    (request,) = found.requests
    assert (request.arrival_s, request.tenant, request.num_output_tokens) == (10.0, "mine", 2)
    assert request.send_s == (20.0, 50.0, 70.0)
    with pytest.raises(ConfigurationError, match="concurrency=3"):
        run([crawl()], concurrency=3)


def test_the_folder_has_the_trail_the_samples_and_the_published_csv(tmp_path: Path) -> None:
    run([crawl("a", 0.0), search("s", 0.25)], out=tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    assert folder.config()["engine"]["kind"] == "simulated"
    events = [event for event in folder.events().to_pylist() if event["query_id"] == "s"]
    assert [event["run_s"] for event in events] == sorted(event["run_s"] for event in events)
    names = [event["event"] for event in events if event["source"] == "engine"]
    assert (names[0], names[-1]) == ("QUEUED", "FINISHED")
    assert {"SCHEDULED", "KV_ON_GPU", "PROMPT_UPDATED", "FIRST_TOKEN"} <= set(names)
    assert all(0 <= row["kv_usage"] < 1 for row in folder.samples().to_pylist())
    with open(folder.metrics_file, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    pools = [row for row in rows if row["event_type"] == "pipeline_pool_update"]
    assert [(row["num_documents"], row["pipeline_pool_change"]) for row in pools] == [("2", "2"), ("2", "1")]
    assert {"query_ttft", "EngineCoreEventType.KV_ON_GPU"} <= {row["event_type"] for row in rows}


def test_preemptions_are_counted_by_kind() -> None:
    # Ten open prompts of 300 tokens do not fit 90 blocks of 16.
    found = run([crawl(f"q{number}", 0.01 * number) for number in range(10)], simulation(num_gpu_blocks=90))
    assert all(request.has_succeeded for request in found.requests)
    assert found.summary()["num_recompute_preemptions"] > 0
    assert found.summary()["swap_share"] == 0.0


def test_the_same_simulation_writes_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        run([crawl(), search()], out=tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


def test_a_simulation_that_was_stopped_says_so_and_begins_anew(tmp_path: Path) -> None:
    traces = [crawl(f"q{number}", float(number)) for number in range(50)]
    seen: list[ReplayProgress] = []

    begun = threading.Event()

    def latency(facts: Any) -> float:
        begun.set()
        return EASY(facts)

    async def stopped() -> None:
        task = asyncio.ensure_future(replay(traces, simulation(latency=latency), out=tmp_path / "run"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert RunFolder.open(tmp_path / "run").state == "stopped"
    again = asyncio.run(replay(traces, simulation(latency=latency), out=tmp_path / "run", progress=seen.append))
    assert again.state is RunState.COMPLETE
    assert (len(again.requests), again.num_segments) == (50, 1)
    assert seen[-1].num_ended == 50


def test_the_command_simulates_and_writes_the_folder(tmp_path: Path) -> None:
    write_traces([crawl("a", 0.0), search("s", 0.5)], tmp_path / "traces.parquet")
    arguments = ["replay", str(tmp_path / "traces.parquet"), "--out", str(tmp_path / "run"), "--simulate"]
    result = CliRunner().invoke(app, [*arguments, "--hardware", "h100", "--num-blocks", "5000", "--policy", "LCAS"])
    assert result.exit_code == 0, result.output
    assert "2 requests, complete" in result.output
    config = RunFolder.open(tmp_path / "run").config()
    assert (config["engine"]["policy"], config["engine"]["limits"]["num_blocks"]) == ("LCAS", 5000)
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "engine." in again.output


@pytest.mark.parametrize(
    ("arrival_s", "says"),
    [
        (None, "has no arrival_s: say when questions come, like --rate 1, or --arrivals FILE"),
        (0.0, "has no num_tokens: give --model MODEL, whose tokenizer counts its text"),
    ],
)
def test_what_traces_lack_is_said_with_the_option_that_gives_it(
    tmp_path: Path, arrival_s: float | None, says: str
) -> None:
    updates = (TimedUpdate(0.5, Append(Chunk("some text", "https://a.org"))),)
    write_traces([Trace("a", "why?", updates, arrival_s=arrival_s)], tmp_path / "texts.parquet")
    command = ["replay", str(tmp_path / "texts.parquet"), "--simulate", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def invoke(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    write_traces([crawl()], tmp_path / "traces.parquet")
    command = ["replay", str(tmp_path / "traces.parquet"), "--simulate", "--out", str(tmp_path / "out"), *arguments]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400", **environment})
    return result.exit_code, result.output


def test_the_environment_chooses_the_policy_of_a_simulation(tmp_path: Path) -> None:
    code, output = invoke(tmp_path, SCHEDULER_TYPE="SJF")
    assert (code, "1 request, complete" in output) == (0, True)
    assert RunFolder.open(tmp_path / "out").config()["engine"]["policy"] == "SJF"
    code, output = invoke(tmp_path, SCHEDULER_TYPE="LIFO")
    assert (code, "LIFO" in output) == (1, True)


def test_victims_and_ways_of_preempting_reach_the_scheduler(tmp_path: Path) -> None:
    chosen = ["--victims", "LATEST_COMPLETION", "--preemption-mode", "recompute"]
    code, output = invoke(tmp_path, *chosen)
    assert code == 0, output
    options = RunFolder.open(tmp_path / "out").config()["engine"]["arguments"]["scheduler_options"]
    assert options == {"victims": "LATEST_COMPLETION", "preemption_mode": "recompute"}


def test_a_model_is_simulated_with_the_length_that_it_was_made_for(tmp_path: Path) -> None:
    model = tiny_models.make_llama_config(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    longest = config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    code, output = invoke(tmp_path, "--model", str(model), "--num-blocks", "5000")
    assert code == 0, output
    assert RunFolder.open(tmp_path / "out").config()["engine"]["limits"]["max_model_len"] == longest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variation", "2"], "--variation has no effect without --rate"),
        (["--variation", "2", "--seed", "3"], "--variation, --seed have no effect without --rate"),
        (["--arrivals-are", "times"], "--arrivals-are has no effect without --arrivals"),
        (["--policy", ""], "unknown scheduling policy ''"),
        (["--victims", "NOBODY"], "unknown order of victims 'NOBODY'"),
        (["--preemption-mode", "swap"], "--preemption-mode swap needs room in host memory: give --host-kv-gib"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size=3 does not divide the 32 attention heads"),
        (["--max-model-len", "50"], "but --max-model-len and --num-blocks allow 50"),
        (["--host-kv-gib", "-1"], "--host-kv-gib -1.0: give more than 0"),
        (["--host-kv-gib", "nan"], "--host-kv-gib nan: give more than 0"),
        (["--host-kv-gib", "1e300"], "--host-kv-gib 1e+300: give more than 0 and at most 1,000,000"),
        (["--hardware", "CALIBRATION"], "--model is missing: CALIBRATION was measured with a/model"),
        (["--hardware", "CALIBRATION", "--model", "MODEL"], "--num-blocks is missing"),
        (["--time-scale", "0"], "--time-scale=0.0: give a finite number above 0"),
        (["--rate", "-1"], "--rate=-1.0 must be finite and above 0"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_the_commands_words(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B

    calibration = tmp_path / "calibration.json"
    dataclasses.replace(H200_LLAMA_8B, model="a/model").save(calibration)
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(keys, 4)))
    replaced = {"CALIBRATION": str(calibration), "MODEL": str(tmp_path)}
    code, output = invoke(tmp_path, *(replaced.get(argument, argument) for argument in arguments))
    assert code == 1
    assert words.replace("CALIBRATION", str(calibration)) in " ".join(output.split())
    assert not (tmp_path / "out").exists()
