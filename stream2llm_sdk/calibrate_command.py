"""The command `stream2llm calibrate`: measure this machine's cost model with a progress bar, and say how it fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stream2llm_sdk.console import shown_errors

if TYPE_CHECKING:
    from stream2llm_sdk.serving.calibration import CalibrationReport

__all__ = ["calibrate", "show_calibration"]

_SHOWN_LENGTHS = (1_024, 8_192, 32_768, 131_072)


def calibrate(
    model: Annotated[str, typer.Option(help="Model folder or hub name.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    budget: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=20.0, help="Time for all of it; the engine's start is not cut short."),
    ] = 240.0,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer. Left out, the longest that fits this machine.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
) -> None:
    """Measure what preemption costs on this machine, for the scheduler to choose between recompute and swap.

    Prefills prompts of growing length and copies KV blocks to host memory and back, in under five minutes.
    """
    from stream2llm_sdk.serving.calibration import calibrate as measure

    console = Console()
    engine_args: dict[str, Any] = {"max_model_len": max_model_len, "tensor_parallel_size": tensor_parallel_size}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with shown_errors():
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task("calibrating", total=1.0)
            report = measure(
                model,
                out,
                budget_s=budget,
                progress=lambda share, line: bar.update(task, completed=share, description=escape(line)),
                **engine_args,
            )
    show_calibration(console, report)
    console.print(f"written to {escape(str(out))}")


def show_calibration(console: Console, report: CalibrationReport) -> None:
    """Prints how well each curve fits, and what it says for some lengths."""
    model = report.model
    console.print(f"[bold]{escape(model.model)}[/] on [bold]{escape(model.hardware)}[/], {report.elapsed_s:.0f} s")
    fit = Table("", "samples", "R²", "error", "error between knots", "", title="How well the curves fit")
    for name, quality in report.fit.items():
        held_out = quality.held_out_relative_error
        fit.add_row(
            name.replace("_", " "),
            str(quality.num_samples),
            f"{quality.r_squared:.4f}",
            f"{quality.median_relative_error:.1%}",
            "–" if held_out is None else f"{held_out:.1%}",
            "[green]good[/]" if quality.is_good else "[yellow]poor[/]",
        )
    console.print(fit)
    costs = Table("tokens", "recompute", "swap out", "swap in", title="What it says")
    for num_tokens in _SHOWN_LENGTHS:
        if num_tokens <= max(report.max_model_len, _SHOWN_LENGTHS[0]):
            seconds = (model.recompute_s(num_tokens), model.swap_out_s(num_tokens), model.swap_in_s(num_tokens))
            costs.add_row(f"{num_tokens:,}", *(f"{1000 * value:.2f} ms" for value in seconds))
    console.print(costs)
    if report.longest_prefill < report.max_model_len // 2:
        console.print(
            f"[yellow]Prompts up to {report.longest_prefill:,} of {report.max_model_len:,} tokens were measured; "
            f"longer ones are extrapolated. A larger --budget measures more of them.[/]"
        )
    if not report.is_good:
        console.print("[yellow]A poor fit: something else kept the machine busy, or the time was too short.[/]")
