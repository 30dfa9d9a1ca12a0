"""The published system in virtual time: it serves, it is deterministic, and each quirk does what it says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import CostCurve
from stream2llm_sdk.serving.cost_model import CostModel
from stream2llm_sdk.serving.simulator.latency import StepLatency
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.load_result import SimulationResult
from stream2llm_sdk.serving.simulator.published_policies import QUIRKS, PublishedOptions, QuadraticCosts
from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest

POLICIES = ("DEFAULT_VLLM", "FCFS", "LCAS", "MCPS")
MODES = ("recompute", "swap", "cost")
# A step takes ten milliseconds and a millisecond a token.
EASY = StepLatency(overhead_s=0.01, flops_per_token=1.0, flops_per_pair=0.0, effective_flops_per_s=1000.0)
# Up to about 60 tokens a copy is cheaper than computing.
COSTS = CostModel(
    "h", "m", CostCurve((1, 131_072), (0.06, 131.1)), CostCurve((16,), (0.016,)), CostCurve((16,), (0.016,))
)


def appending(arrival_s: float, *chunks: tuple[float, int], first_id: int = 0, max_tokens: int = 1) -> SimulatedRequest:
    firsts = itertools.accumulate((length for _, length in chunks), initial=first_id)
    parts = (
        SimulatedChunk(offset_s, "append", ((first, length),))
        for (offset_s, length), first in zip(chunks, firsts, strict=False)
    )
    return SimulatedRequest(arrival_s, tuple(parts), max_tokens=max_tokens)


def serve(
    requests: Sequence[SimulatedRequest], *, quirks: Iterable[str] | None = None, **options: Any
) -> SimulationResult:
    mode = options.pop("mode", "recompute")
    chosen = {"preemption_mode": mode, **({} if quirks is None else {"quirks": list(quirks)})}
    sizes = {"num_gpu_blocks": 101, "max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 64}
    given = {"policy": "FCFS", "latency": EASY, "cost_model": COSTS, "scheduler_options": chosen}
    return simulate(requests, system="published", **{**sizes, **given, **options})


def crowd(num_requests: int = 24) -> list[SimulatedRequest]:
    """Streams that together want about twice the memory."""
    return [
        appending(
            0.37 * index,
            *((0.9 * chunk, 40 + 37 * ((index * 5 + chunk * 3) % 4)) for chunk in range(5)),
            first_id=10_000 * (index + 1),
        )
        for index in range(num_requests)
    ]


# ---- all of them serve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_mode_ends_every_request_and_repeats_itself(policy: str, mode: str) -> None:
    requests = crowd()
    result = serve(requests, policy=policy, mode=mode)
    assert len(result.requests) == len(requests)
    assert [r.num_prompt_tokens for r in result.requests] == [r.num_prompt_tokens for r in requests]
    assert result.total("num_preemptions") > 0
    assert (result.values("ttft_from_context_complete_s") > 0).all()
    if mode != "cost":
        assert result.total("num_swap_preemptions" if mode == "recompute" else "num_recompute_preemptions") == 0
    assert result == serve(requests, policy=policy, mode=mode)


@pytest.mark.parametrize("policy", POLICIES)
def test_changed_prompts_are_served_too(policy: str) -> None:
    def changing(index: int) -> SimulatedRequest:
        texts = [(1000 * index + 100 * part, 60) for part in range(6)]
        prompts = (((7, 30), *texts[: count + 1], texts[-1]) for count in range(4))
        chunks = tuple(SimulatedChunk(1.0 * turn, "replace", spans) for turn, spans in enumerate(prompts))
        return SimulatedRequest(0.3 * index, chunks)

    for mode in MODES:
        result = serve([changing(index) for index in range(12)], policy=policy, mode=mode, num_gpu_blocks=81)
        assert result.total("num_tokens_invalidated") > 0
        assert result.total("num_preemptions") > 0
        assert result.total("num_output_tokens") == 12


def test_without_pressure_it_serves_as_our_scheduler_does() -> None:
    requests = crowd()
    sizes = {"num_gpu_blocks": 4000, "max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 64}
    ours = simulate(requests, policy="FCFS", latency=EASY, **sizes)
    theirs = serve(requests, num_gpu_blocks=4000, quirks=())
    assert theirs.total("num_preemptions") == 0
    assert theirs.total("num_tokens_computed") == ours.total("num_tokens_computed")
    assert theirs.percentile("ttft_from_context_complete_s", 95) == pytest.approx(
        ours.percentile("ttft_from_context_complete_s", 95), rel=0.2
    )


def test_whole_prompts_and_answers_of_many_tokens() -> None:
    requests = [appending(0.1 * index, (0.0, 100), first_id=1000 * index, max_tokens=20) for index in range(8)]
    for policy in POLICIES:
        result = serve(requests, policy=policy, streaming=False, num_gpu_blocks=31)
        assert result.total("num_output_tokens") == 160


# ---- memory and its quirks ------------------------------------------------------------------------------------------


def idle_streams_and_a_large_one(last_chunk_s: float = 60.0) -> list[SimulatedRequest]:
    """Three streams of 400 tokens that wait, and a request that needs the memory of one of them."""
    idle = [appending(1.0 * i, (0.0, 400), (last_chunk_s, 16), first_id=10_000 * i) for i in range(1, 4)]
    return [*idle, appending(10.0, (0.0, 600), first_id=90_000)]


def preempted(result: SimulationResult) -> list[int]:
    return [request.num_preemptions for request in result.requests]


def test_a_swapped_stream_stays_away_and_a_dropped_one_comes_back_and_takes_the_memory_of_others() -> None:
    swapped, dropped = (serve(idle_streams_and_a_large_one(), mode=mode) for mode in ("swap", "recompute"))
    assert preempted(swapped) == [0, 0, 1, 0]  # the last one to be admitted, once
    assert sum(preempted(dropped)) > 1
    assert swapped.total("num_tokens_recomputed") == 0
    assert dropped.total("num_tokens_recomputed") > 0


def test_without_immediate_readmission_a_dropped_stream_waits_for_its_next_chunk() -> None:
    quirks = set(QUIRKS) - {"immediate_readmission"}
    assert preempted(serve(idle_streams_and_a_large_one(), quirks=quirks)) == [0, 0, 1, 0]


def test_idle_streams_are_equal_to_the_policy_unless_ties_are_off() -> None:
    """The stream that was opened first is admitted last here: it was preempted and came back."""
    early = appending(0.0, (0.0, 400), (5.0, 16), (80.0, 16), first_id=1)
    others = [appending(1.0 * i, (0.0, 400), (70.0, 16), first_id=10_000 * i) for i in (1, 2)]
    load = [early, *others, appending(10.0, (0.0, 600), first_id=90_000)]
    in_place = set(QUIRKS) - {"appends_in_place"}
    moved = serve(load, mode="swap", quirks=in_place)
    assert preempted(moved)[0] == 1  # its second chunk put it behind the others
    assert preempted(serve(load, mode="swap", quirks=in_place - {"admission_ties"})) == [0, 0, 1, 0]
    assert preempted(serve(load, mode="swap")) == [0, 0, 1, 0]


def test_preallocation_takes_memory_that_is_there() -> None:
    load = [appending(0.0, (0.0, 400), (5.0, 16), first_id=1)]
    usage = [serve(load, quirks=quirks).peak_kv_usage for quirks in (QUIRKS, ())]
    assert usage[0] - usage[1] == pytest.approx(0.04, abs=0.011)


def test_the_cost_is_asked_of_who_comes_or_of_who_goes() -> None:
    """A swap of 16 tokens is cheap here and one of 400 is not; the reverse holds for recompute."""
    load = idle_streams_and_a_large_one()
    all_new = serve(load, mode="cost", quirks=set(QUIRKS) - {"immediate_readmission"})
    assert all_new.total("num_recompute_preemptions") == 1
    small = [*load[:3], appending(9.0, (0.0, 350), (3.0, 40), (9.0, 16), first_id=80_000)]
    of_incoming = serve(small, mode="cost", quirks={"cost_of_incoming"})
    assert of_incoming.total("num_swap_preemptions") == 1
    assert serve(small, mode="cost", quirks=()).total("num_recompute_preemptions") == 1


def test_lcas_serves_the_oldest_last_chunk_first_or_the_most_recent() -> None:
    """Both have 256 tokens and become complete while a third one computes."""
    load = [
        appending(0.0, (0.0, 500), first_id=1),
        appending(0.05, (0.0, 256), first_id=10_000),
        appending(0.10, (0.0, 256), first_id=20_000),
    ]
    first, second = (serve(load, policy="LCAS", quirks=quirks).requests[1:] for quirks in (QUIRKS, ()))
    assert first[0].first_token_s < first[1].first_token_s
    assert second[1].first_token_s < second[0].first_token_s


def test_copies_take_their_time() -> None:
    load = idle_streams_and_a_large_one()
    seconds = []

    def copy_latency(num_out: int, num_in: int) -> float:
        seconds.append((num_out, num_in))
        return 0.01 * (num_out + num_in)

    slow = serve(load, mode="swap", copy_latency=copy_latency)
    assert sum(out for out, _ in seconds) == sum(back for _, back in seconds) == 25
    assert slow.busy_s == pytest.approx(serve(load, mode="swap").busy_s + 0.5)


# ---- costs and options ----------------------------------------------------------------------------------------------


def test_parabolas_through_parabolas_are_exact() -> None:
    curve = CostCurve((1, 131_072), (0.004, 1.3))
    costs = CostModel("h", "m", curve, curve, curve, seconds_per_pair=1e-9)
    fitted = QuadraticCosts(costs)
    for num_tokens in (16, 500, 20_000):
        assert fitted.recompute_s(num_tokens) == pytest.approx(costs.recompute_s(num_tokens), rel=1e-6)
        assert fitted.swap_s(num_tokens) == pytest.approx(2 * curve(num_tokens), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "SRPF"}, "no policy 'SRPF'"),
        ({"quirks": ["lcas"]}, "unknown quirk 'lcas'"),
        ({"preemption_mode": "drop"}, "preemption_mode"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PublishedOptions.parse(**options)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown system"):
        simulate([], system="other")  # type: ignore[arg-type]
