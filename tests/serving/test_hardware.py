"""Latencies, memory and costs that follow from a model's shape and a piece of hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import CostCurve
from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B as H200_COSTS
from stream2llm_sdk.serving.cost_model import CostModel
from stream2llm_sdk.serving.simulator.clock import StepFacts
from stream2llm_sdk.serving.simulator.hardware import (
    A40,
    A100,
    H100,
    H200,
    PROFILES,
    Hardware,
    cost_model,
    num_kv_blocks,
    this_machine,
)
from stream2llm_sdk.serving.simulator.latency import H100_LLAMA_8B, H200_LLAMA_8B, copy_latency, step_latency
from stream2llm_sdk.serving.simulator.model_shape import LLAMA_3_1_8B, ModelShape

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
# Round numbers: 1 GFLOP/s reached, 1 GB/s of memory reached.
EASY = Hardware("easy", {"bfloat16": 2e9}, 1e9, 2e9, 1e9, efficiency=0.5, memory_efficiency=0.5, overhead_s=0.0)
SMALL = ModelShape("small", 2, 64, 4, 2, 16, 128, 1000, num_published_parameters=1e6)


def prefill(num_tokens: int, first: int = 0) -> StepFacts:
    return StepFacts(1, ((first, first + num_tokens),), 0)


# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_a_configuration_gives_the_published_numbers_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for config in (CONFIG, tmp_path, tmp_path / "config.json"):
        shape = ModelShape.from_config(config)
        assert shape.num_parameters == pytest.approx(8.03e9, rel=1e-3)
        assert shape.kv_bytes_per_token == 128 * 1024
        assert shape.flops_per_pair == LLAMA_3_1_8B.flops_per_pair == 524_288
    assert ModelShape.from_config({"text_config": CONFIG}).num_layers == 32


def test_what_a_configuration_leaves_out_is_taken_as_is_usual_or_asked_for(tmp_path: Path) -> None:
    without = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(without).num_kv_heads == 32
    tied = ModelShape.from_config({**CONFIG, "tie_word_embeddings": True})
    assert ModelShape.from_config(CONFIG).num_parameters - tied.num_parameters == 128256 * 4096
    with pytest.raises(ConfigurationError, match="no 'hidden_size'"):
        ModelShape.from_config({"num_attention_heads": 4})
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        ModelShape.from_config(tmp_path)
    with pytest.raises(ConfigurationError, match="'somebody/a-model' is no folder here, and as a name on the hub"):
        ModelShape.from_config("somebody/a-model")
    with pytest.raises(ConfigurationError, match="dtype"):
        ModelShape.from_config({**CONFIG, "torch_dtype": "int3"})


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    latency = step_latency(SMALL, EASY)
    pairs = 100 * 101 / 2
    assert latency(prefill(100)) == pytest.approx((2e6 * 100 + SMALL.flops_per_pair * pairs) / 1e9)
    # Five requests decode behind 1,000 tokens each: the weights are read once, and all their KV.
    latency = step_latency(SMALL, replace(EASY, memory_bytes_per_s=2e8))
    decode = StepFacts(1, tuple((1000, 1001) for _ in range(5)), 5)
    assert latency(decode) == pytest.approx((2e6 + SMALL.kv_bytes_per_token * 5 * 1001) / 1e8)


def test_a_step_without_tokens_takes_its_overhead() -> None:
    assert step_latency(SMALL, replace(EASY, overhead_s=0.25))(StepFacts(1, (), 0)) == 0.25


def test_two_devices_are_twice_as_fast_but_for_what_they_tell_each_other() -> None:
    one, two = (step_latency(SMALL, EASY, size)(prefill(1000)) for size in (1, 2))
    assert two == pytest.approx(one / 2)
    wired = replace(EASY, interconnect_bytes_per_s=1e6)
    exchanged = 2 * 0.5 * 2 * SMALL.num_layers * SMALL.hidden_size * 2 * 1000
    assert step_latency(SMALL, wired, 2)(prefill(1000)) == pytest.approx(two + exchanged / 1e6)
    assert step_latency(SMALL, wired, 1)(prefill(1000)) == pytest.approx(one)


def test_efficiency_may_depend_on_the_tokens_of_a_step() -> None:
    curved = step_latency(SMALL, replace(EASY, efficiency=((64, 0.25), (1024, 0.5)), memory_efficiency=1.0))
    flat = replace(EASY, efficiency=0.5, memory_efficiency=1.0)
    attention_s = SMALL.flops_per_pair * 64 * 65 / 2 / 1e9
    assert curved(prefill(64)) == pytest.approx(2e6 * 64 / 5e8 + attention_s)
    assert curved(prefill(1024)) == pytest.approx(step_latency(SMALL, flat)(prefill(1024)))


def test_attention_has_an_efficiency_of_its_own() -> None:
    alike = replace(EASY, efficiency=0.5, memory_efficiency=1.0)
    linear_s, attention_s = 2e6 * 4096 / 1e9, SMALL.flops_per_pair * 4096 * 4097 / 2 / 1e9
    assert step_latency(SMALL, alike)(prefill(4096)) == pytest.approx(linear_s + attention_s)
    faster = replace(alike, attention_efficiency=1.0)
    assert step_latency(SMALL, faster)(prefill(4096)) == pytest.approx(linear_s + attention_s / 2)
    assert cost_model(SMALL, faster).seconds_per_pair == pytest.approx(cost_model(SMALL, alike).seconds_per_pair / 2)
    with pytest.raises(ConfigurationError, match=r"efficiencies must be more than 0 and at most 1, got 1\.5"):
        replace(EASY, attention_efficiency=1.5)


def test_the_published_machines_keep_their_fitted_numbers() -> None:
    for latency, efficiency in ((H200_LLAMA_8B, 0.54), (H100_LLAMA_8B, 0.515)):
        assert latency.effective_flops_per_s == pytest.approx(efficiency * 2 * 989e12)
        assert latency.attention_flops_per_s == pytest.approx(0.7 * 2 * 989e12)
        assert (latency.overhead_s, latency.messaging_s) == (0.003, 0.002)
        assert latency.flops_per_token == pytest.approx(16.06e9)
    # One token: 3 ms, and 16 GB of weights over two devices.
    assert 0.0045 < H200_LLAMA_8B(StepFacts(1, ((500, 501),), 1)) < 0.006


@pytest.mark.parametrize("hardware", PROFILES.values(), ids=PROFILES)
def test_every_profile_serves_llama(hardware: Hardware) -> None:
    latency = step_latency(LLAMA_3_1_8B, hardware)
    decode_s = latency(StepFacts(1, ((500, 501),), 1))
    assert 0.005 < decode_s < 0.04
    assert 0.2 < latency(prefill(8192)) < 3.0


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_kv_blocks_are_what_weights_and_workspace_leave() -> None:
    blocks = num_kv_blocks(LLAMA_3_1_8B, H200, 2, gpu_memory_utilization=0.8)
    assert 95_000 < blocks < 106_000
    assert num_kv_blocks(LLAMA_3_1_8B, H200, 2, gpu_memory_utilization=0.8, block_size=32) == blocks // 2
    assert num_kv_blocks(LLAMA_3_1_8B, A40) < num_kv_blocks(LLAMA_3_1_8B, A100) < num_kv_blocks(LLAMA_3_1_8B, H200)


def test_a_model_that_does_not_fit_is_refused() -> None:
    large = replace(LLAMA_3_1_8B, num_published_parameters=70e9)
    with pytest.raises(ConfigurationError, match="does not fit 1x NVIDIA H100"):
        num_kv_blocks(large, H100)
    assert num_kv_blocks(large, H100, 4) > 0


# ---- copies and costs -----------------------------------------------------------------------------------------------


def test_the_scheduler_believes_what_it_believed_of_two_h200() -> None:
    assert cost_model(LLAMA_3_1_8B, H200, 2) == H200_COSTS


def test_copies_share_the_links_and_small_ones_waste_them() -> None:
    latency = copy_latency(LLAMA_3_1_8B, H200, 2)
    block_s = 16 * 128 * 1024 / 100e9
    assert latency(0, 0) == 0.0
    assert latency(100, 0) == latency(0, 100) == pytest.approx(1e-4 + 100 * block_s)
    assert latency(100, 50) == pytest.approx(2e-4 + 150 * block_s)
    # 16 KiB at a time: each device makes 64 copies a block.
    small = copy_latency(LLAMA_3_1_8B, H200, 2, bytes_per_copy=16 * 1024)
    assert small(100, 0) == pytest.approx(latency(100, 0) + 100 * 64 * H200.seconds_per_small_copy)
    costs = cost_model(LLAMA_3_1_8B, H200, 2, bytes_per_copy=16 * 1024)
    assert costs.swap_out_s(1600) == pytest.approx(small(100, 0))


def test_a_calibrated_machine_is_what_was_measured(tmp_path: Path) -> None:
    measured = CostModel(
        "some CPU",
        "some model",
        CostCurve((16, 512), (0.02, 0.5)),
        CostCurve((16,), (1e-3,)),
        CostCurve((16,), (2e-3,)),
    )
    measured.save(tmp_path / "costs.json")
    machine = this_machine(tmp_path / "costs.json", memory_bytes=8e9)
    assert machine.name == "some CPU"
    assert step_latency(SMALL, machine)(prefill(512)) == pytest.approx(0.5)
    assert copy_latency(SMALL, machine)(3, 2) == pytest.approx(3 * 1e-3 + 2 * 2e-3)
    assert cost_model(SMALL, machine) == measured
    assert num_kv_blocks(SMALL, machine) > 0


def test_measured_attention_counts_its_pairs(tmp_path: Path) -> None:
    curve = CostCurve((16,), (0.016,))
    CostModel("m", "m", curve, curve, curve, seconds_per_pair=1e-6).save(tmp_path / "costs.json")
    took_s = step_latency(SMALL, this_machine(tmp_path / "costs.json"))(prefill(10, first=90))
    assert took_s == pytest.approx(0.010 + 1e-6 * (10 * 90 + 55))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"efficiency": 0.0}, "efficiencies"),
        ({"efficiency": ((64, 0.5), (32, 0.6))}, "increasing"),
        ({"memory_efficiency": 1.5}, "efficiencies"),
        ({"overhead_s": -1.0}, "overhead_s"),
    ],
)
def test_hardware_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(EASY, **wrong)


def test_an_unknown_number_format_names_those_that_are_known() -> None:
    with pytest.raises(ConfigurationError, match="known are bfloat16, float16"):
        step_latency(replace(LLAMA_3_1_8B, dtype="float32"), H200)


def test_heads_are_shared_out_evenly() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel_size=3 does not divide the 32 attention heads"):
        step_latency(LLAMA_3_1_8B, H200, 3)


def test_a_configuration_says_how_long_sequences_may_be() -> None:
    assert ModelShape.from_config({**CONFIG, "max_position_embeddings": 8_192}).max_model_len == 8_192
    without = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    assert ModelShape.from_config(without).max_model_len is None
