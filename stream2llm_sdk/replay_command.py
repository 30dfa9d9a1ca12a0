"""The command `stream2llm replay`: traces on an engine or in virtual time, with a progress bar and a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from stream2llm_sdk.console import STOPPED, counted, refuse_without, shown_errors
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.option_names import OptionNames, called_by_options
from stream2llm_sdk.trace_options import (
    SOURCE_HELP,
    ArrivalsOption,
    FromOption,
    LimitOption,
    Numbers,
    NumbersOption,
    SkipOption,
    read,
)

if TYPE_CHECKING:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.replay import ReplayOptions, ReplayProgress, ReplayRun
    from stream2llm_sdk.traces.trace import Trace

__all__ = ["replay", "show_run"]

_GIB = 1 << 30
_MOST_HOST_KV_GIB = 1_000_000

_NAMES = OptionNames(
    {
        "concurrency": "--concurrency",
        "delay_multiplier": "--delay-multiplier",
        "max_model_len": "--max-model-len",
        "max_tokens": "--max-tokens",
        "num_gpu_blocks": "--num-blocks",
        "on_error": "--on-error",
        "rate_per_s": "--rate",
        "seed": "--seed",
        "tenant": "--tenant",
        "tensor_parallel_size": "--tensor-parallel-size",
        "time_scale": "--time-scale",
        "variation": "--variation",
    },
    (
        (r"\blike arrivals=Arrivals\(rate_per_s=1\)", "like --rate 1, or --arrivals FILE"),
        (r"\bgive a tokenizer that counts its text", "give --model MODEL, whose tokenizer counts its text"),
    ),
)


@dataclass(frozen=True, slots=True)
class _Serving:
    """What serves the traces."""

    model: str | None
    policy: str | None
    hardware: str
    tensor_parallel_size: int
    num_blocks: int | None
    host_kv_bytes: int | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    victims: str
    preemption_mode: str

    def __post_init__(self) -> None:
        from stream2llm_sdk.serving.policies import make_policy
        from stream2llm_sdk.serving.preemption import PreemptionMode
        from stream2llm_sdk.serving.victims import make_victim_order

        if self.policy is not None:
            make_policy(self.policy)
        make_victim_order(self.victims)
        if PreemptionMode.parse(self.preemption_mode) is PreemptionMode.SWAP and self.host_kv_bytes is None:
            raise ConfigurationError("--preemption-mode swap needs room in host memory: give --host-kv-gib")


def replay(
    context: typer.Context,
    traces: Annotated[Path, typer.Argument(help=SOURCE_HELP)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The run's folder. A stopped run in it goes on.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub name. With --simulate its configuration; left out, Llama 3.1 8B."),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="In virtual time, without a model.")] = False,
    hardware: Annotated[
        str, typer.Option(help="What to simulate: h200, h100, a100, a40, or a file of `stream2llm calibrate`.")
    ] = "h200",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, max=1_024, help="GPUs that share the model.")] = 1,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=2, max=100_000_000, help="KV blocks. Left out, what the memory holds; a calibration does not say."
        ),
    ] = None,
    host_kv_gib: Annotated[float | None, typer.Option(help="Host memory for KV that is swapped out, in GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt and answer, in tokens.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of a step.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Scheduling policy: FCFS, DEFAULT_VLLM, LCAS, MCPS, SRPF, SJF, SVF, SVF_1BIT or ADAPTIVE. Left out, "
            "the environment's SCHEDULER_TYPE, else FCFS."
        ),
    ] = None,
    victims: Annotated[
        str, typer.Option(help="Whose KV goes first: IDLE_FIRST, LATEST_COMPLETION or ADMISSION.")
    ] = "IDLE_FIRST",
    preemption_mode: Annotated[
        str, typer.Option(help="How it goes: cost (the cheaper for each victim), recompute or swap.")
    ] = "cost",
    streaming: Annotated[bool, typer.Option(help="Send chunks as they come, or prompts whole.")] = True,
    delay_multiplier: Annotated[float, typer.Option(help="What the waits of each retrieval are multiplied by.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="What every time is multiplied by: 0.5 is twice as fast.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(metavar="PER_S", help="Draw arrivals at this rate. Left out, the traces' own.")
    ] = None,
    variation: Annotated[
        float, typer.Option(help="Of the waits between drawn arrivals, std over mean: 1 Poisson.")
    ] = 1,
    arrivals: ArrivalsOption = None,
    arrivals_are: NumbersOption = Numbers.DELAYS,
    seed: Annotated[int, typer.Option(min=0, help="Of drawn arrivals.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens, where a trace does not say.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Most requests under way at once.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose requests they are. Left out, as the traces say.")] = None,
    on_error: Annotated[str, typer.Option(help="When a request fails: continue, or stop.")] = "continue",
    form: FromOption = None,
    skip_bad: SkipOption = False,
    limit: LimitOption = None,
) -> None:
    """Replay traces on a model, or in virtual time, and keep everything that happened.

    Each question comes at its time, and its context as it was recorded. Ctrl-C stops the run; the same command
    continues it, and begins a simulation anew. The folder holds requests, events and samples as Parquet, and the
    published `run_metrics.csv`.
    """
    from stream2llm_sdk.traces.replay import ReplayOptions

    console = Console()
    with shown_errors():
        if host_kv_gib is not None and not 0 < host_kv_gib <= _MOST_HOST_KV_GIB:
            raise ConfigurationError(
                f"--host-kv-gib {host_kv_gib}: give more than 0 and at most {_MOST_HOST_KV_GIB:,}, or leave it out"
            )
        refuse_without(context, "--rate", rate is not None, ("variation", "seed"))
        refuse_without(context, "--arrivals", arrivals is not None, ("arrivals_are",))
        refuse_without(context, "--simulate", simulate, ("hardware",))
        serving = _Serving(
            model,
            policy,
            hardware,
            tensor_parallel_size,
            num_blocks,
            None if host_kv_gib is None else round(host_kv_gib * _GIB),
            max_model_len,
            max_num_batched_tokens,
            victims,
            preemption_mode,
        )
        with called_by_options(_NAMES):
            options = ReplayOptions(
                streaming=streaming,
                delay_multiplier=delay_multiplier,
                time_scale=time_scale,
                arrivals=_arrivals(rate, variation, arrivals, arrivals_are),
                seed=seed,
                max_tokens=max_tokens,
                concurrency=concurrency,
                tenant=tenant,
                on_error=on_error,
            )
        found = read(traces, form, skip_bad, limit)
        if found.skipped:
            console.print(f"[yellow]skipped {counted(len(found.skipped), 'trace')}, which cannot be read[/]")
        work = _simulated if simulate else _served
        try:
            with called_by_options(_NAMES):
                run = asyncio.run(work(console, list(found), options, serving, out))
        except KeyboardInterrupt:
            how = "begins anew" if simulate else "continues"
            console.print(f"[yellow]stopped; the same command {how} the run in {escape(str(out))}[/]")
            raise typer.Exit(STOPPED) from None
    show_run(console, run)
    console.print(f"written to {escape(str(out))}")


def _arrivals(rate: float | None, variation: float, file: Path | None, numbers: Numbers) -> Arrivals | None:
    from stream2llm_sdk.traces.arrivals import Arrivals, read_arrivals

    if rate is not None and file is not None:
        raise ConfigurationError("give either --rate or --arrivals")
    if file is not None:
        return read_arrivals(file, delays=numbers is Numbers.DELAYS)
    return None if rate is None else Arrivals(rate_per_s=rate, variation=variation)


# ---- what serves the traces -----------------------------------------------------------------------------------------


async def _served(
    console: Console, traces: list[Trace], options: ReplayOptions, serving: _Serving, out: Path
) -> ReplayRun:
    from stream2llm_sdk.prompt import PromptAssembler
    from stream2llm_sdk.serving import SchedulingOptions, Stream2LLMEngine, StreamLimits
    from stream2llm_sdk.tokenizer import load_tokenizer
    from stream2llm_sdk.traces.prompt_script import keeps_sizes_only
    from stream2llm_sdk.traces.replay import replay as replay_traces

    if serving.model is None:
        raise ConfigurationError("--model is missing: name the model to serve, or give --simulate")
    arguments: dict[str, Any] = {
        "max_model_len": serving.max_model_len,
        "max_num_batched_tokens": serving.max_num_batched_tokens,
        "num_gpu_blocks_override": serving.num_blocks,
    }
    engine = Stream2LLMEngine(
        serving.model,
        policy=serving.policy,
        scheduling=SchedulingOptions(
            victims=serving.victims, preemption_mode=serving.preemption_mode, host_kv_bytes=serving.host_kv_bytes
        ),
        limits=StreamLimits(),  # everything is let in: the load is what is being studied
        progress=console.print,
        tensor_parallel_size=serving.tensor_parallel_size,
        **{name: value for name, value in arguments.items() if value is not None},
    )
    async with engine:
        assembler = None
        if not all(map(keeps_sizes_only, traces)):
            longest = max(options.max_tokens, *(trace.max_tokens or 1 for trace in traces), 1)
            limits = engine.limits
            assembler = PromptAssembler(
                load_tokenizer(serving.model),
                max_model_len=min(limits.max_model_len, limits.max_prompt_tokens + 1),
                max_answer_tokens=longest,
                markers=None,  # a replayed prompt is what was recorded
            )
        return await _with_bar(
            console, lambda tell: replay_traces(traces, engine, options, out=out, assembler=assembler, progress=tell)
        )


async def _simulated(
    console: Console, traces: list[Trace], options: ReplayOptions, serving: _Serving, out: Path
) -> ReplayRun:
    from stream2llm_sdk.serving.policies import policy_name
    from stream2llm_sdk.serving.vllm_start import quieten
    from stream2llm_sdk.tokenizer import load_tokenizer
    from stream2llm_sdk.traces.prompt_script import keeps_sizes_only
    from stream2llm_sdk.traces.replay import replay as replay_traces
    from stream2llm_sdk.traces.simulation import Simulation

    quieten()
    needs_tokenizer = serving.model is not None and not all(map(keeps_sizes_only, traces))
    simulation = Simulation(
        policy_name(serving.policy, "FCFS"),
        _simulation_arguments(serving),
        load_tokenizer(serving.model) if needs_tokenizer and serving.model else None,
    )
    return await _with_bar(console, lambda tell: replay_traces(traces, simulation, options, out=out, progress=tell))


def _simulation_arguments(serving: _Serving) -> dict[str, Any]:
    """Arguments of `simulate` for a model on some hardware."""
    from stream2llm_sdk.serving.simulator import hardware as known
    from stream2llm_sdk.serving.simulator.latency import copy_latency, step_latency

    if serving.hardware.lower() in known.PROFILES:
        hardware = known.PROFILES[serving.hardware.lower()]
    elif Path(serving.hardware).is_file():
        hardware = known.this_machine(serving.hardware)
        measured = hardware.measured
        assert measured is not None
        if serving.model is None:
            raise ConfigurationError(f"--model is missing: {serving.hardware} was measured with {measured.model}")
        if serving.num_blocks is None:
            raise ConfigurationError(
                "--num-blocks is missing: a calibration does not say how much memory there is for KV"
            )
    else:
        raise ConfigurationError(
            f"--hardware {serving.hardware!r} is no file: choose {', '.join(known.PROFILES)}, or a file that "
            "`stream2llm calibrate` wrote"
        )
    model = known.LLAMA_3_1_8B if serving.model is None else known.ModelShape.from_config(serving.model)
    size = serving.tensor_parallel_size
    num_blocks = serving.num_blocks or known.num_kv_blocks(model, hardware, size)
    arguments: dict[str, Any] = {
        "num_gpu_blocks": num_blocks,
        "latency": step_latency(model, hardware, size),
        "cost_model": known.cost_model(model, hardware, size),
        "scheduler_options": {"victims": serving.victims, "preemption_mode": serving.preemption_mode},
    }
    if serving.host_kv_bytes is not None:
        from stream2llm_sdk.serving.swap import swap_config

        block_bytes = 16 * model.kv_bytes_per_token
        arguments["kv_transfer_config"] = swap_config(
            num_host_blocks=max(1, size * serving.host_kv_bytes // block_bytes)
        )
        arguments["copy_latency"] = copy_latency(model, hardware, size)
    # What the model was made for, as vLLM has it, unless something else is said.
    longest = serving.max_model_len or (None if serving.model is None else model.max_model_len)
    optional = {"max_model_len": longest, "max_num_batched_tokens": serving.max_num_batched_tokens}
    return arguments | {name: value for name, value in optional.items() if value is not None}


# ---- what is shown --------------------------------------------------------------------------------------------------


async def _with_bar(
    console: Console, work: Callable[[Callable[[ReplayProgress], None]], Awaitable[ReplayRun]]
) -> ReplayRun:
    with _bar(console) as tell:
        return await work(tell)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[ReplayProgress], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("preparing", total=None)

        def tell(progress: ReplayProgress) -> None:
            failed = f", [red]{progress.num_failed} failed[/]" if progress.num_failed else ""
            bar.update(
                task,
                total=progress.num_requests,
                completed=progress.num_ended,
                description=f"at {progress.run_s:,.0f} s, {progress.num_under_way} under way{failed}",
            )

        yield tell


def show_run(console: Console, run: ReplayRun) -> None:
    """Prints a run's figures, and what keeps them from being taken at face value."""
    figures = run.summary()
    table = Table(
        "seconds", "P50", "P95", "P99", title=f"{counted(figures['num_requests'], 'request')}, {run.state.value}"
    )
    for title, metric in (
        ("TTFT from complete context", "ttft_from_context_complete"),
        ("TTFT from the question", "ttft_from_request"),
        ("until the last token", "e2e_latency"),
        ("send lag", "send_lag"),
    ):
        values = [figures[f"{metric}_p{percent}_s"] for percent in (50, 95, 99)]
        table.add_row(title, *("–" if value is None else f"{value:.3f}" for value in values))
    console.print(table)
    share = figures["swap_share"]
    swapped = "" if share is None else f" ({share:.0%} swapped)"
    console.print(
        f"{figures['completion_time_s']:,.1f} s, {figures['requests_per_s'] or 0:,.2f} requests a second, "
        f"{figures['num_preemptions']:,} preemptions{swapped}, {figures['num_tokens_invalidated']:,} tokens "
        f"invalidated, {figures['num_tokens_recomputed']:,} recomputed"
    )
    for line in run.warnings:
        console.print(f"[yellow]{escape(line)}[/]")
