"""Cost models in notebooks: where swap pays, and what is drawn of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.calibration import CalibrationReport
from stream2llm_sdk.serving.cost_curve import CostCurve, FitQuality, Sample
from stream2llm_sdk.serving.cost_model import CostModel
from stream2llm_sdk.serving.simulator.hardware import H200, LLAMA_3_1_8B, cost_model


def model(recompute: CostCurve, copy: CostCurve, seconds_per_pair: float = 0.0) -> CostModel:
    return CostModel("one <GPU>", "a model", recompute, copy, copy, seconds_per_pair)


PER_TOKEN = CostCurve((1,), (1e-3,))


@pytest.mark.parametrize(
    ("costs", "ranges"),
    [
        (model(PER_TOKEN, CostCurve((1,), (1e-4,))), ((1, 5_000),)),
        (model(PER_TOKEN, CostCurve((1,), (1e-2,))), ()),
        # Copies take 0.5 s each before their first byte: 1 s is 1,000 tokens.
        (model(PER_TOKEN, CostCurve((1, 10_000), (0.5, 0.5))), ((1_001, 5_000),)),
        # Recompute takes 0.1 s whatever the length, copies 1 ms for each token both ways: they pay below 100.
        (model(CostCurve((1, 10_000), (0.1, 0.1)), CostCurve((1,), (5e-4,))), ((1, 99),)),
    ],
)
def test_where_swap_pays(costs: CostModel, ranges: tuple[tuple[int, int], ...]) -> None:
    assert costs.swap_pays(5_000) == ranges
    for length in (1, 50, 99, 100, 1_000, 1_001, 5_000):
        is_cheaper = costs.swap_out_s(length) + costs.swap_in_s(length) < costs.recompute_s(length)
        assert is_cheaper == any(first <= length <= last for first, last in ranges)


def test_small_copies_pay_for_short_and_for_long_prompts() -> None:
    device = replace(H200, seconds_per_small_copy=2.5e-6)
    published = cost_model(LLAMA_3_1_8B, device, 2, num_tokens_per_step=131_072, bytes_per_copy=16_384)
    (short, until), (since, longest) = published.swap_pays()
    assert (short, longest) == (1, 131_072)
    assert until < 1_000 < 10_000 < since


def test_numbers_that_cannot_be_drawn_are_refused() -> None:
    costs = model(PER_TOKEN, PER_TOKEN)
    for call, told in (
        (lambda: costs.swap_pays(0), "got 0"),
        (lambda: costs.plot(1), "got 1"),
        (lambda: costs.plot_decisions(31), "got 31"),
        (lambda: costs.plot_decisions(cached_shares=(1.5,)), "1.5"),
        (lambda: costs.plot_decisions(cached_shares=()), "one or more"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            call()


def test_a_cost_model_shows_itself() -> None:
    page = model(PER_TOKEN, CostCurve((1, 10_000), (0.5, 0.5)))._repr_html_()
    assert "one &lt;GPU&gt;" in page
    assert "from 1,001 tokens" in page
    assert "<svg" in page
    assert "#010203" not in page  # what stands for the page's colour has been replaced by it
    assert "currentColor" in page


def test_decisions_are_a_map_for_each_share() -> None:
    plot = cost_model(LLAMA_3_1_8B, H200, 2).plot_decisions(cached_shares=(0.0, 0.95))
    assert "0% in the prefix cache" in plot.svg
    assert "95% in the prefix cache" in plot.svg
    assert "image/png" in plot.svg  # the colours, with the page behind them


def test_a_calibration_shows_its_fit_and_its_measurements() -> None:
    good, poor = FitQuality(10, 0.999, 0.02, 0.05), FitQuality(10, 0.5, 0.4, None)
    samples = {"recompute": [Sample(length, 1e-3 * length) for length in (16, 64, 256)]}
    costs = model(PER_TOKEN, CostCurve((1,), (1e-4,)))
    report = CalibrationReport(costs, {"recompute": good, "swap_out": poor}, 256, 256, 2_048, 12.3, samples)
    page = report._repr_html_()
    for told in ("12.30 s", "good", "poor", "0.9990", "prompts up to 256 of 2,048 tokens", "a poor fit"):
        assert told in page
    assert "Dots are single measurements" in page
    assert "Sample(" not in repr(report)
