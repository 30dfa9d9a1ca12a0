"""Cost models in a notebook: what recompute and swap take, and what is decided from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, block, facts, note, seconds, table
from stream2llm_sdk.display.run_view import plot_or_note

if TYPE_CHECKING:
    from stream2llm_sdk.serving.calibration import CalibrationReport
    from stream2llm_sdk.serving.cost_curve import FitQuality
    from stream2llm_sdk.serving.cost_model import CostModel

__all__ = ["calibration_html", "cost_model_html", "lengths_told", "model_name"]

_LENGTHS = (16, 256, 1_024, 4_096, 16_384, 65_536, 131_072)


def cost_model_html(model: CostModel) -> str:
    """Its costs for some lengths, and the curves."""
    return str(block(_named(model), _costs(model, _LENGTHS), plot_or_note(model.plot), title="Cost model"))


def calibration_html(report: CalibrationReport) -> str:
    """How well the measured model fits, its costs for lengths that were measured, and the curves."""
    lengths = [length for length in _LENGTHS if length <= max(report.max_model_len, _LENGTHS[0])]
    remarks = []
    if not report.is_good:
        remarks.append(note("⚠ a poor fit: something else kept the machine busy, or the time was too short"))
    if report.longest_prefill < report.max_model_len // 2:
        remarks.append(
            note(
                f"prompts up to {report.longest_prefill:,} of {report.max_model_len:,} tokens were measured; "
                "longer ones are extrapolated"
            )
        )
    return str(
        block(
            _named(report.model, ("measured in", seconds(report.elapsed_s))),
            _fits(report.fit),
            *remarks,
            _costs(report.model, lengths),
            plot_or_note(report.plot),
            title="Calibration",
        )
    )


def _named(model: CostModel, *more: tuple[object, object]) -> Markup:
    return facts(
        [("hardware", model.hardware), ("model", model_name(model)), ("swap is cheaper", lengths_told(model)), *more]
    )


def lengths_told(model: CostModel, most: int = _LENGTHS[-1]) -> str:
    """At which lengths swapping is cheaper, in words."""
    told = []
    for first, last in model.swap_pays(most):
        if (first, last) == (1, most):
            return "at any length"
        told.append(
            f"up to {last:,}" if first == 1 else f"from {first:,}" if last == most else f"{first:,} to {last:,}"
        )
    return f"{', '.join(told)} tokens" if told else "at no length"


def _costs(model: CostModel, lengths: Sequence[int]) -> Markup:
    rows = [
        (
            f"{length:,}",
            seconds(model.recompute_s(length)),
            seconds(model.swap_out_s(length)),
            seconds(model.swap_in_s(length)),
            _ratio(model.recompute_s(length), model.swap_out_s(length) + model.swap_in_s(length)),
        )
        for length in lengths
    ]
    headings = ("tokens", "recompute", "swap out", "swap in", "recompute ÷ (out + in)")
    return table(headings, rows, right=range(5))


def _ratio(dividend: float, divisor: float) -> str | None:
    if divisor <= 0:
        return None
    ratio = dividend / divisor
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def model_name(model: CostModel) -> str:
    """The model's name; of a folder only the last part."""
    return Path(model.model).name if Path(model.model).is_absolute() else model.model


def _fits(fit: Mapping[str, FitQuality]) -> Markup:
    headings = ("fitted", "samples", "R²", "error", "error between knots", "")
    return table(headings, list(_fit_rows(fit)), right=(2, 3, 4))


def _fit_rows(fit: Mapping[str, FitQuality]) -> Iterable[tuple[object, ...]]:
    for name, quality in fit.items():
        held_out = quality.held_out_relative_error
        yield (
            name.replace("_", " "),
            quality.num_samples,
            f"{quality.r_squared:.4f}",
            f"{quality.median_relative_error:.1%}",
            None if held_out is None else f"{held_out:.1%}",
            "good" if quality.is_good else "poor",
        )
