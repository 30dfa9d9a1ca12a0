"""Distributions through known quantiles, and draws that have them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.distributions import QuantileCurve, generator, normal_scores, stratified


@given(size=st.integers(0, 500), seed=st.integers(0, 1_000))
def test_one_draw_falls_into_each_equally_probable_interval(size: int, seed: int) -> None:
    drawn = stratified(generator(seed, "anything"), size)
    assert np.floor(np.sort(drawn) * size).astype(int).tolist() == list(range(size))


def test_normal_scores_are_normal_and_in_random_order() -> None:
    scores = normal_scores(generator(0, "scores"), 10_000)
    assert (scores.mean(), scores.std()) == (pytest.approx(0, abs=0.01), pytest.approx(1, rel=0.01))
    assert np.percentile(scores, [5, 50, 97.5]) == pytest.approx([-1.645, 0, 1.960], abs=0.01)
    assert abs(np.corrcoef(scores[1:], scores[:-1])[0, 1]) < 0.05


def test_quantities_of_one_seed_do_not_follow_each_other() -> None:
    one, other = (normal_scores(generator(0, name), 10_000) for name in ("one", "other"))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_a_curve_goes_through_its_quantiles_and_never_beyond_its_extremes() -> None:
    curve = QuantileCurve.of_sample(1_000, {0.25: 2.0, 0.5: 3.0, 0.9: 40.0}, minimum=0.1, maximum=500.0)
    values = curve(normal_scores(generator(1, "values"), 20_000))
    assert np.percentile(values, [25, 50, 90]) == pytest.approx([2, 3, 40], rel=0.01)
    assert (values.min(), values.max()) == (pytest.approx(0.1), pytest.approx(500))


def test_a_curve_of_two_quantiles_is_lognormal() -> None:
    curve = QuantileCurve(((0.5, 7.0), (0.975, 7.0 * np.e**1.95996)))
    assert curve(np.array([0.0, 1.0])) == pytest.approx([7.0, 7.0 * np.e], rel=1e-4)


@pytest.mark.parametrize(
    "quantiles",
    [
        ((0.5, 1.0),),
        ((0.5, 1.0), (0.4, 2.0)),
        ((0.5, 2.0), (0.9, 1.0)),
        ((0.0, 1.0), (0.5, 2.0)),
        ((0.1, 0.0), (0.5, 1.0)),
    ],
)
def test_quantiles_that_cannot_be_are_refused(quantiles: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match="quantiles="):
        QuantileCurve(quantiles)
