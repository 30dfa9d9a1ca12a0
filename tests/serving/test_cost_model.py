"""Cost curves, their fit, cost models and the files they are read from."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import (
    CostCurve,
    FitQuality,
    Sample,
    fit_curve,
    fit_quality,
    fit_recompute,
    num_pairs,
)
from stream2llm_sdk.serving.cost_model import (
    H200_LLAMA_8B,
    UNMEASURED_CPU,
    CostModel,
    default_cost_model,
    load_cost_model,
    model_flops,
)

MODEL = CostModel(
    hardware="a machine",
    model="a model",
    recompute=CostCurve((16, 1024, 4096), (0.004, 0.03, 0.11)),
    swap_out=CostCurve((16, 4096), (0.001, 0.02)),
    swap_in=CostCurve((16, 4096), (0.0005, 0.01)),
    seconds_per_pair=2e-9,
)


@st.composite
def curves(draw: st.DrawFn) -> CostCurve:
    num_tokens = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=12)))
    seconds = draw(st.lists(st.floats(0, 1e3), min_size=len(num_tokens), max_size=len(num_tokens)))
    return CostCurve(tuple(num_tokens), tuple(sorted(seconds)))


# ---- curves -------------------------------------------------------------------------------------------------------


def test_a_curve_is_linear_between_knots_and_goes_on_beyond_them() -> None:
    curve = CostCurve((100, 200, 400), (1.0, 2.0, 6.0))
    assert [curve(n) for n in (100, 150, 200, 300, 400)] == pytest.approx([1, 1.5, 2, 4, 6])
    assert curve(1400) == pytest.approx(26)
    assert curve(50) == pytest.approx(0.5)


def test_no_tokens_cost_nothing_even_where_one_has_a_fixed_cost() -> None:
    curve = CostCurve((100, 200), (1.0, 1.1))
    assert curve(0) == curve(-5) == 0.0
    assert curve(1) == pytest.approx(0.901)


def test_a_single_knot_is_a_cost_in_proportion() -> None:
    assert CostCurve((100,), (1.0,))(250) == 2.5


@given(curves(), st.floats(0, 2e6), st.floats(0, 2e6))
def test_a_curve_is_never_negative_and_never_falls(curve: CostCurve, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= curve(less) <= curve(more) * (1 + 1e-9) + 1e-9


@given(curves())
def test_a_curve_goes_through_its_knots(curve: CostCurve) -> None:
    assert [curve(n) for n in curve.num_tokens] == pytest.approx(curve.seconds)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "message"),
    [
        ((), (), "at least one"),
        ((1, 2), (1.0,), "2 numbers of tokens and 1 of seconds"),
        ((0, 2), (1.0, 2.0), "positive, got 0"),
        ((5, 5), (1.0, 2.0), "increase, got 5 after 5"),
        ((1, 2), (-1.0, 2.0), "cost of 1 tokens.*-1.0"),
        ((1, 2), (1.0, float("nan")), "cost of 2 tokens.*nan"),
        ((1, 2), (2.0, 1.0), "1.0 s after 2.0 s"),
    ],
)
def test_an_impossible_curve_is_refused(num_tokens: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CostCurve(num_tokens, seconds)


# ---- fit ----------------------------------------------------------------------------------------------------------


def measured(seconds: Any, num_tokens: int, start: int = 0, *, rng: random.Random, noise: float = 0.03) -> Sample:
    return Sample(num_tokens, seconds(num_tokens, start) * rng.lognormvariate(0, noise), start)


def step_seconds(num_tokens: int, start: int) -> float:
    return 0.003 + 1.5e-5 * num_tokens + 5e-10 * num_pairs(num_tokens, start)


def prefill_seconds(num_tokens: int, start: int) -> float:
    """In steps of 2,048 tokens."""
    begins = range(start, start + num_tokens, 2048)
    return sum(step_seconds(min(2048, start + num_tokens - begin), begin) for begin in begins)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=60))
def test_whatever_is_measured_the_curve_does_not_fall(values: list[tuple[int, float]]) -> None:
    curve = fit_curve([Sample(num_tokens, seconds) for num_tokens, seconds in values])
    assert set(curve.num_tokens) == {num_tokens for num_tokens, _ in values}
    assert min(s for _, s in values) - 1e-9 <= curve.seconds[0] <= curve.seconds[-1] <= max(s for _, s in values) + 1e-9


def test_a_curve_goes_through_medians_so_a_minority_of_outliers_does_not_count() -> None:
    samples = [Sample(n, 9.9 if repeat < 2 else n / 1000) for n in (10, 20, 40) for repeat in range(5)]
    assert fit_curve(samples).seconds == pytest.approx((0.01, 0.02, 0.04))


def test_medians_that_fall_are_pooled() -> None:
    curve = fit_curve([Sample(1, 1.0), Sample(2, 4.0), Sample(3, 2.0), Sample(4, 9.0)])
    assert curve.seconds == (1.0, 3.0, 3.0, 9.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_attention_is_found_and_extrapolates_to_long_contexts(seed: int) -> None:
    rng = random.Random(seed)
    chunks = [measured(step_seconds, 2048, 2048 * k, rng=rng) for k in range(16) for _ in range(3)]
    chunks += [measured(step_seconds, 2**k, rng=rng) for k in range(4, 12) for _ in range(5)]
    chunks = [replace(chunk, seconds=chunk.seconds * 8) if rng.random() < 0.1 else chunk for chunk in chunks]
    prefills = [measured(prefill_seconds, 2**k, rng=rng) for k in range(4, 16) for _ in range(5)]
    curve, seconds_per_pair = fit_recompute(prefills, chunks)
    assert seconds_per_pair == pytest.approx(5e-10, rel=0.1)
    model = replace(MODEL, recompute=curve, seconds_per_pair=seconds_per_pair)
    assert model.recompute_s(131072) == pytest.approx(prefill_seconds(131072, 0), rel=0.15)
    assert model.recompute_s(2048, 98304) == pytest.approx(step_seconds(2048, 98304), rel=0.15)


def test_too_few_kinds_of_chunks_tell_nothing_of_attention() -> None:
    samples = [Sample(16, 0.1), Sample(32, 0.2)]
    assert fit_recompute(samples, samples) == (CostCurve((16, 32), (0.1, 0.2)), 0.0)


def test_without_measurements_there_is_no_fit() -> None:
    with pytest.raises(ConfigurationError, match="at least one measurement"):
        fit_curve([])


def curve_quality(samples: Sequence[Sample]) -> FitQuality:
    def fit(samples: Sequence[Sample]) -> Any:
        curve = fit_curve(samples)
        return lambda sample: curve(sample.num_tokens)

    return fit_quality(fit, samples)


def test_a_straight_line_is_fitted_well_and_scatter_badly() -> None:
    rng = random.Random(1)
    straight = curve_quality([measured(step_seconds, 2**k, rng=rng) for k in range(4, 12) for _ in range(5)])
    assert straight.is_good
    assert straight.r_squared > 0.99
    assert straight.held_out_relative_error is not None
    assert straight.held_out_relative_error < 0.1
    scatter = curve_quality([Sample(2**k, rng.uniform(0.1, 1.0)) for k in range(4, 12) for _ in range(5)])
    assert not scatter.is_good


def test_a_curve_whose_knots_do_not_tell_what_lies_between_them_is_not_good() -> None:
    steps = curve_quality([Sample(2**k, 10.0 ** (k - 4)) for k in range(4, 12) for _ in range(3)])
    assert steps.median_relative_error == pytest.approx(0)
    assert steps.held_out_relative_error is not None
    assert steps.held_out_relative_error > 0.5
    assert not steps.is_good


# ---- models -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000))
def test_recomputing_in_two_parts_counts_every_pair_once(start: int, first: int, second: int) -> None:
    assert num_pairs(first + second, start) == num_pairs(first, start) + num_pairs(second, start + first)


def test_recompute_costs_its_tokens_and_their_attention_to_the_context() -> None:
    assert MODEL.recompute_s(1024) == pytest.approx(0.03 + 2e-9 * 1024 * 1025 / 2)
    assert MODEL.recompute_s(1024, 50_000) == pytest.approx(0.03 + 2e-9 * (1024 * 50_000 + 1024 * 1025 / 2))
    assert MODEL.recompute_s(0, 50_000) == 0.0


def test_a_step_costs_its_tokens_together_and_each_requests_attention() -> None:
    step = MODEL.step_s([(1000, 0), (24, 9000)])
    assert step == pytest.approx(MODEL.recompute(1024) + 2e-9 * (1000 * 1001 / 2 + 24 * 9000 + 24 * 25 / 2))
    assert MODEL.step_s([]) == 0.0


def test_a_model_measured_elsewhere_says_so() -> None:
    assert MODEL.mismatch("a machine", "a model") is None
    assert "'a model' on 'a machine'" in str(MODEL.mismatch("another machine", "a model"))


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_an_impossible_cost_of_attention_is_refused(value: float) -> None:
    with pytest.raises(ConfigurationError, match="seconds_per_pair"):
        replace(MODEL, seconds_per_pair=value)


def test_the_published_set_up_costs_what_its_fitted_step_model_says() -> None:
    linear, attention = 0.54 * 1978e12, 0.7 * 1978e12
    for num_tokens, num_steps in ((16, 1), (1000, 1), (8192, 1), (4 * 8192, 4)):
        compute = 2 * 8.03e9 * num_tokens / linear + 4 * 32 * 4096 * num_pairs(num_tokens) / attention
        assert H200_LLAMA_8B.recompute_s(num_tokens) == pytest.approx(num_steps * 3e-3 + compute)
    assert H200_LLAMA_8B.swap_out_s(10_000) == pytest.approx(1e-4 + 10_000 * 128 * 1024 / 100e9)


def test_attention_outweighs_the_rest_at_a_hundred_thousand_tokens() -> None:
    attention = H200_LLAMA_8B.seconds_per_pair * num_pairs(100_000)
    assert attention > 0.5 * H200_LLAMA_8B.recompute_s(100_000)


def test_a_models_operations_follow_from_its_configuration() -> None:
    llama_8b = SimpleNamespace(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
    )
    per_token, per_pair = model_flops(llama_8b)
    # 8.03e9 parameters, of which embeddings and output layer are 2 × 128,256 × 4,096.
    assert per_token == pytest.approx(2 * (8.03e9 - 2 * 128_256 * 4096), rel=0.001)
    assert per_pair == 4 * 32 * 4096


@pytest.mark.parametrize(
    ("config", "per_pair"),
    [
        ({"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_dim": 3072}, 4 * 12 * 768),
        ({"n_layer": 6, "n_embd": 512, "n_head": 8}, 4 * 6 * 512),
        (
            {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": [4, 8], "intermediate_size": [9, 99]},
            1024,
        ),
        ({}, 4 * 1024),
    ],
)
def test_a_model_described_in_another_way_is_estimated_too(config: dict[str, Any], per_pair: float) -> None:
    per_token, pairs = model_flops(SimpleNamespace(**config))
    assert pairs == per_pair
    assert per_token > 0


def test_an_estimate_is_for_the_device_it_names() -> None:
    estimate = default_cost_model(1000, flops_per_token=1e9, flops_per_pair=1e4, device=UNMEASURED_CPU, model="m")
    assert (estimate.hardware, estimate.model) == (UNMEASURED_CPU.hardware, "m")
    assert estimate.recompute_s(512) > 512 * 1e9 / UNMEASURED_CPU.peak_flops_per_s


# ---- own files ----------------------------------------------------------------------------------------------------


@given(curves(), curves(), curves(), st.floats(0, 1e-3))
def test_a_model_is_the_same_after_json(one: CostCurve, two: CostCurve, three: CostCurve, per_pair: float) -> None:
    model = CostModel("hardware", "model", one, two, three, per_pair)
    assert json.loads(json.dumps(model.to_dict())) == model.to_dict()


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MODEL.save(path, fit={"recompute": FitQuality(10, 0.99, 0.01, None)})
    assert load_cost_model(path) == load_cost_model([path]) == MODEL
    document = json.loads(path.read_text())
    assert document["hardware"] == "a machine"
    assert document["fit"]["recompute"]["r_squared"] == 0.99


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        MODEL.save(tmp_path / "nowhere" / "costs.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"hardware": ""}, "hardware must be a name, got ''"),
        ({"model": None}, "model must be a name, got None"),
        ({"recompute": None}, "recompute must be an object, got None"),
        ({"swap_in": {"num_tokens": [1]}}, "swap_in.seconds must be a list, got None"),
        ({"swap_in": {"num_tokens": [1.5], "seconds": [1]}}, "swap_in.num_tokens.*1.5"),
        ({"swap_in": {"num_tokens": [1], "seconds": [-1]}}, "swap_in.seconds.*-1"),
        ({"swap_in": {"num_tokens": [1], "seconds": ["1"]}}, "swap_in.seconds.*'1'"),
        ({"swap_in": {"num_tokens": [1, 2], "seconds": [2, 1]}}, "swap_in: more tokens cannot cost less"),
        ({"swap_in": {"num_tokens": [1], "seconds": [float("nan")]}}, "swap_in.seconds.*nan"),
        ({"swap_in": {"num_tokens": [1], "seconds": [10**400]}}, "swap_in.seconds.*1000"),
        ({"swap_in": {"num_tokens": [1], "seconds": [True]}}, "swap_in.seconds.*True"),
    ],
)
def test_a_broken_file_is_refused_with_its_path_and_value(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**MODEL.to_dict(), **change}))
    with pytest.raises(ConfigurationError, match=rf"broken\.json: {message}"):
        load_cost_model(path)


@pytest.mark.parametrize("key", ["version", "hardware", "model", "recompute", "swap_out", "swap_in"])
def test_a_file_that_lacks_a_part_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({name: value for name, value in MODEL.to_dict().items() if name != key}))
    with pytest.raises(ConfigurationError, match=rf"broken\.json: {key}"):
        load_cost_model(path)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[]", "a JSON object, got a list")])
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"broken\.json: .*{message}"):
        load_cost_model(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json: .*cannot be read"):
        load_cost_model(tmp_path / "absent.json")


# ---- the artifact's files -----------------------------------------------------------------------------------------

METADATA = {"model_name": "llama", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}
LENGTHS = [2**k for k in range(4, 18)]


def artifact(seconds: Any, *, warm_up: bool = False) -> dict[str, list[float]]:
    """Five repeats in milliseconds around a cost, behind two slow ones if `warm_up`."""
    around = [0.97, 0.99, 1.0, 1.01, 1.04]
    return {
        str(n): [1000 * seconds(n) * factor for factor in ([9.0, 3.0, *around] if warm_up else around)] for n in LENGTHS
    }


def write_artifact(folder: Path, *, warm_up: bool = False, **changes: Any) -> list[Path]:
    recompute = {
        "recomputation_latencies": artifact(lambda n: step_seconds(n, 0), warm_up=warm_up),
        "metadata": METADATA,
    }
    swap = {
        "swap_in_latency": artifact(lambda n: 1e-4 + 2e-6 * n, warm_up=warm_up),
        "swap_out_latency": artifact(lambda n: 1e-4 + 1e-6 * n, warm_up=warm_up),
        "metadata": METADATA,
    }
    paths = [folder / "recompute.json", folder / "swap.json"]
    for path, document in zip(paths, (recompute, swap), strict=True):
        path.write_text(json.dumps({**document, **{key: changes[key] for key in changes.keys() & document.keys()}}))
    return paths


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_artifacts_two_files_make_a_model(tmp_path: Path, warm_up: bool) -> None:
    model = load_cost_model(write_artifact(tmp_path, warm_up=warm_up), hardware="2x H200")
    assert (model.hardware, model.model) == ("2x H200", "llama")
    assert model.seconds_per_pair == pytest.approx(5e-10, rel=1e-3)
    for num_tokens in (16, 1000, 5000, 100_000):
        assert model.recompute_s(num_tokens) == pytest.approx(step_seconds(num_tokens, 0), rel=1e-3)
        assert model.swap_in_s(num_tokens) == pytest.approx(1e-4 + 2e-6 * num_tokens)
        assert model.swap_out_s(num_tokens) == pytest.approx(1e-4 + 1e-6 * num_tokens)


def test_the_artifacts_files_come_in_any_order_and_do_not_know_their_hardware(tmp_path: Path) -> None:
    paths = write_artifact(tmp_path)
    assert load_cost_model(paths) == load_cost_model(paths[::-1])
    assert load_cost_model(paths).hardware == "unknown"


@pytest.mark.parametrize("chosen", [[], [0], [1], [0, 0], [1, 1], [0, 1, 1]])
def test_other_combinations_of_files_are_refused(tmp_path: Path, chosen: list[int]) -> None:
    paths = write_artifact(tmp_path)
    with pytest.raises(ConfigurationError, match="the artifact's two"):
        load_cost_model([paths[index] for index in chosen])


def test_own_and_artifact_files_do_not_mix(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "own.json")
    with pytest.raises(ConfigurationError, match="the artifact's two"):
        load_cost_model([tmp_path / "own.json", write_artifact(tmp_path)[0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recomputation_latencies": {"16": [1.0, -2.0]}}, r"recompute\.json: recomputation_latencies.16.*-2.0"),
        ({"recomputation_latencies": {"16": []}}, r"recompute\.json: recomputation_latencies.16.*\[\]"),
        ({"recomputation_latencies": {"some": [1.0]}}, r"recompute\.json: recomputation_latencies.*'some'"),
        ({"recomputation_latencies": {}}, r"recompute\.json: recomputation_latencies holds no measurement"),
        ({"swap_in_latency": {"16": ["1"]}}, r"swap\.json: swap_in_latency.16.*'1'"),
        ({"swap_out_latency": None}, r"swap\.json: swap_out_latency must be an object, got None"),
        ({"metadata": None}, r"recompute\.json: metadata must be an object"),
    ],
)
def test_broken_artifact_files_are_refused_with_path_and_value(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_cost_model(write_artifact(tmp_path, **change))


def test_files_of_different_models_are_refused(tmp_path: Path) -> None:
    paths = write_artifact(tmp_path)
    document = json.loads(paths[1].read_text())
    paths[1].write_text(json.dumps({**document, "metadata": {**METADATA, "model_name": "qwen"}}))
    with pytest.raises(ConfigurationError, match="model_name is 'llama' and 'qwen'"):
        load_cost_model(paths)
