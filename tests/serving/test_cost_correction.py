"""A cost model follows what steps and copies really take, and is not carried away by outliers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_correction import CostTerm, OnlineCorrection
from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B

RECOMPUTE, SWAP_OUT, SWAP_IN = CostTerm.RECOMPUTE, CostTerm.SWAP_OUT, CostTerm.SWAP_IN
RATIOS = st.floats(1e-6, 1e6)


def observe(correction: OnlineCorrection, *ratios: float, term: CostTerm = RECOMPUTE) -> None:
    for ratio in ratios:
        correction.observe(term, 0.5, 0.5 * ratio)


def test_predictions_are_the_models_until_enough_was_measured() -> None:
    correction = OnlineCorrection(H200_LLAMA_8B, min_observations=8)
    observe(correction, *[2.0] * 7)
    assert correction.recompute_s(4096, 100) == H200_LLAMA_8B.recompute_s(4096, 100)
    observe(correction, 2.0)
    assert correction.recompute_s(4096, 100) == pytest.approx(2 * H200_LLAMA_8B.recompute_s(4096, 100))


@pytest.mark.parametrize("term", CostTerm)
def test_each_term_is_corrected_by_its_own_measurements_only(term: CostTerm) -> None:
    correction = OnlineCorrection(H200_LLAMA_8B)
    observe(correction, *[1.5] * 20, term=term)
    predictions: dict[CostTerm, tuple[Callable[[int], float], Callable[[int], float]]] = {
        RECOMPUTE: (correction.recompute_s, H200_LLAMA_8B.recompute_s),
        SWAP_OUT: (correction.swap_out_s, H200_LLAMA_8B.swap_out_s),
        SWAP_IN: (correction.swap_in_s, H200_LLAMA_8B.swap_in_s),
    }
    for other, (corrected, plain) in predictions.items():
        factor = 1.5 if other is term else 1.0
        assert corrected(1000) == pytest.approx(factor * plain(1000))
        assert correction.factor(other) == pytest.approx(factor)


@given(st.lists(RATIOS, min_size=1, max_size=200), st.sampled_from([1.0, 1.3, 4.0]))
def test_factors_stay_within_their_bounds(ratios: list[float], limit: float) -> None:
    correction = OnlineCorrection(H200_LLAMA_8B, window=16, min_observations=1, limit=limit)
    for ratio in ratios:
        observe(correction, ratio)
        assert 1 / limit <= correction.factor(RECOMPUTE) <= limit


@given(st.lists(RATIOS, min_size=1, max_size=120), st.integers(1, 20))
def test_the_factor_is_the_median_of_the_window(ratios: list[float], window: int) -> None:
    correction = OnlineCorrection(H200_LLAMA_8B, window=window, min_observations=1, limit=1e9)
    observe(correction, *ratios)
    expected = median(math.log(ratio) for ratio in ratios[-window:])
    assert math.log(correction.factor(RECOMPUTE)) == pytest.approx(expected, abs=1e-9)


@given(st.randoms(use_true_random=False), st.floats(0.3, 3.5), st.integers(0, 31))
def test_outliers_fewer_than_half_a_window_leave_the_factor_among_the_others(
    rng: random.Random, true_factor: float, num_outliers: int
) -> None:
    usual = [true_factor * rng.uniform(0.95, 1.05) for _ in range(64 - num_outliers)]
    ratios = usual + [rng.choice([1e-4, 1e4]) for _ in range(num_outliers)]
    rng.shuffle(ratios)
    correction = OnlineCorrection(H200_LLAMA_8B, window=64)
    observe(correction, *ratios)
    assert min(usual) * 0.999 <= correction.factor(RECOMPUTE) <= max(usual) * 1.001


def test_a_change_of_the_machine_is_followed_within_a_window() -> None:
    correction = OnlineCorrection(H200_LLAMA_8B, window=32)
    observe(correction, *[0.5] * 1000)
    assert correction.factor(RECOMPUTE) == pytest.approx(0.5)
    observe(correction, *[2.0] * 32)
    assert correction.factor(RECOMPUTE) == pytest.approx(2.0)


def test_a_frozen_correction_keeps_what_it_learned_and_can_be_thawed() -> None:
    correction = OnlineCorrection(H200_LLAMA_8B)
    observe(correction, *[2.0] * 20)
    correction.frozen = True
    before = correction.states()
    observe(correction, *[0.5] * 200)
    assert correction.states() == before
    assert correction.factor(RECOMPUTE) == pytest.approx(2.0)
    correction.frozen = False
    observe(correction, *[0.5] * 200)
    assert correction.factor(RECOMPUTE) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("predicted_s", "measured_s"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.inf), (1.0, math.nan), (math.nan, 1.0)],
)
def test_what_is_no_measurement_is_counted_and_not_learned(predicted_s: float, measured_s: float) -> None:
    correction = OnlineCorrection(H200_LLAMA_8B, min_observations=1)
    correction.observe(SWAP_IN, predicted_s, measured_s)
    state = correction.states()[SWAP_IN]
    assert (state.factor, state.num_observed, state.num_ignored) == (1.0, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0.5}, "limit.*0.5"),
        ({"limit": math.nan}, "limit.*nan"),
        ({"window": 4}, "min_observations.*8 of 4"),
        ({"min_observations": 0}, "min_observations.*0 of 64"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OnlineCorrection(H200_LLAMA_8B, **options)  # type: ignore[arg-type]
