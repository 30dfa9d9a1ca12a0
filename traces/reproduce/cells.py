"""One cell of the matrix: a published run, an arm of it, and a draw of the arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.reproduce.bound import last_prefill_s
from stream2llm_sdk.traces.reproduce.published import PublishedRun

__all__ = [
    "ALL_ARMS",
    "CURVE_PERCENTILES",
    "NUM_QUERIES",
    "OUR_ARMS",
    "Arm",
    "Cell",
    "Figures",
    "Fit",
    "assumed",
    "run_cell",
]

Figures = Mapping[str, Any]
"""What a cell came to, by name; see `run_cell`."""

NUM_QUERIES = {"crawler": 4_309, "anns": 500}
"""Of each published run, by workload."""
_TOKEN_BUDGET = {"crawler": 2_048, "anns": 8_192}
_MAX_PROMPT_TOKENS = 131_072
_MEMORY_UTILIZATION = 0.8  # in the published configurations
# Host memory of the machines is not published; the published system took it to be unlimited.
_NUM_HOST_BLOCKS = 1_000_000
_BYTES_PER_COPY = 16_384  # keys or values of one layer's block on one of two devices
# The published costs were measured by a micro-benchmark that copies consecutive blocks in a process that does nothing
# else. There a copy takes what handing it over to the driver takes: vLLM's pull request 38460 has 2 µs, FlexKV's 193
# 2.3 µs. While requests are served it takes longer, see `Hardware.seconds_per_small_copy`.
_SECONDS_PER_COPY_IN_PROFILE = 2e-6
_CONTENT_SEED = 0
CURVE_PERCENTILES = (*range(100), *(99 + tenth / 10 for tenth in range(1, 11)))
"""Of the whole distribution of TTFT, for plots."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Who serves, and how.

    Attributes:
        name: unique in a table.
        system: 'published' for the published system's own decisions, 'stream2llm' for this project's scheduler.
        policy: the scheduling policy.
        victims: this project's order of victims.
        streaming: whether prompts are sent as they come.
    """

    name: str
    system: Literal["published", "stream2llm"]
    policy: str
    victims: str = "IDLE_FIRST"
    streaming: bool = True


PUBLISHED_ARMS = {
    "NON_STREAMING": Arm("NON_STREAMING", "published", "DEFAULT_VLLM", streaming=False),
    **{name: Arm(name, "published", name) for name in ("DEFAULT_VLLM", "FCFS", "LCAS", "MCPS")},
}
OUR_ARMS = {
    arm.name: arm
    for arm in (
        Arm("ours FCFS", "stream2llm", "FCFS"),
        Arm("ours LCAS", "stream2llm", "LCAS"),
        Arm("ours SRPF", "stream2llm", "SRPF"),
        Arm("ours SRPF, last victims", "stream2llm", "SRPF", "LATEST_COMPLETION"),
        Arm("ours ADAPTIVE, last victims", "stream2llm", "ADAPTIVE", "LATEST_COMPLETION"),
    )
}
"""What this project's scheduler runs beside the published system's decisions, by name."""
ALL_ARMS = PUBLISHED_ARMS | OUR_ARMS


@dataclass(frozen=True, slots=True)
class Fit:
    """All that was fitted to published figures.

    Attributes:
        efficiency: by hardware, share of the peak FLOP/s that linear layers reach in prefill. Fitted, with the next, to
            P50, P95 and P99 without streaming at the two lowest rates.
        num_blocks: KV blocks of the crawls under pressure. Fitted to the preemptions of one of those runs, ×10 with
            recompute only: the geometric mean of ours over the published of its four policies is 1. All other runs
            have as many as the memory of the hardware holds.
        attention_efficiency: the share that attention reaches.
    """

    efficiency: tuple[tuple[str, float], ...] = (("h200", 0.54), ("h100", 0.515))
    num_blocks: int = 78_500
    attention_efficiency: float = 0.7


def assumed() -> dict[str, Any]:
    """All numbers that figures rest on and that nothing was fitted to, by name."""
    from stream2llm_sdk.serving.simulator.hardware import PROFILES

    devices = {hardware: asdict(PROFILES[hardware]) for hardware, _ in Fit().efficiency}
    return {
        "token_budget": _TOKEN_BUDGET,
        "max_prompt_tokens": _MAX_PROMPT_TOKENS,
        "memory_utilization": _MEMORY_UTILIZATION,
        "num_host_blocks": _NUM_HOST_BLOCKS,
        "bytes_per_copy": _BYTES_PER_COPY,
        "seconds_per_copy_in_profile": _SECONDS_PER_COPY_IN_PROFILE,
        "content_seed": _CONTENT_SEED,
        **{f"{hardware}.{name}": value for hardware, device in devices.items() for name, value in device.items()},
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run once."""

    hardware: str
    workload: str
    rate_per_s: float
    delay_multiplier: float
    mode: str
    arm: str
    draw: int
    num_queries: int

    @classmethod
    def of(cls, run: PublishedRun, arm: str, draw: int, num_queries: int | None = None) -> Cell:
        """A published run's cell; a whole prompt is never preempted, so its ways of preempting are one."""
        if arm not in ALL_ARMS:
            raise ConfigurationError(f"there is no arm {arm!r}: choose one of {', '.join(ALL_ARMS)}")
        mode = run.mode if ALL_ARMS[arm].streaming else ""
        num = num_queries or NUM_QUERIES[run.workload]
        return cls(run.hardware, run.workload, run.rate_per_s, run.delay_multiplier, mode, arm, draw, num)

    @property
    def key(self) -> str:
        """The cell in one line, for the journal."""
        return "/".join(f"{value}" for value in asdict(self).values())


@lru_cache(maxsize=2)
def _traces(workload: Any, num_queries: int, delay_multiplier: float) -> Any:
    from stream2llm_sdk.traces.synthesis import synthesize
    from stream2llm_sdk.traces.synthesis_options import SynthesisOptions

    options = SynthesisOptions(delay_multiplier=delay_multiplier)
    return synthesize(workload, num_queries, seed=_CONTENT_SEED, options=options)


def _requests(cell: Cell) -> Any:
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.simulated import simulated_requests

    arrivals = Arrivals(rate_per_s=cell.rate_per_s).draw(cell.num_queries, seed=cell.draw)
    traces = _traces(cell.workload, cell.num_queries, cell.delay_multiplier)
    return simulated_requests(traces, arrivals=[float(time_s) for time_s in arrivals])


def _num_blocks(cell: Cell, fit: Fit) -> int:
    from stream2llm_sdk.serving.simulator.hardware import LLAMA_3_1_8B, PROFILES, num_kv_blocks

    if cell.delay_multiplier > 1 and cell.workload == "crawler":
        return fit.num_blocks
    return num_kv_blocks(LLAMA_3_1_8B, PROFILES[cell.hardware], 2, gpu_memory_utilization=_MEMORY_UTILIZATION)


def _device(hardware: str, fit: Fit) -> Any:
    from stream2llm_sdk.serving.simulator.hardware import PROFILES

    efficiency = dict(fit.efficiency)[hardware]
    return replace(PROFILES[hardware], efficiency=efficiency, attention_efficiency=fit.attention_efficiency)


@lru_cache(maxsize=16)
def _bound_s(hardware: str, workload: str, delay_multiplier: float, num_queries: int, fit: Fit) -> tuple[float, ...]:
    """Percentiles of the bound of a load, which is the same for all arms, rates and draws: 50, 95, 99 and 99.9."""
    from stream2llm_sdk.serving.simulator.hardware import LLAMA_3_1_8B
    from stream2llm_sdk.serving.simulator.latency import step_latency
    from stream2llm_sdk.traces.simulated import simulated_requests

    device = _device(hardware, fit)
    latency = step_latency(LLAMA_3_1_8B, device, 2)
    requests = simulated_requests(_traces(workload, num_queries, delay_multiplier), arrivals=[0.0] * num_queries)
    bound_s = [last_prefill_s(request, latency, _TOKEN_BUDGET[workload]) + device.messaging_s for request in requests]
    return tuple(float(np.percentile(bound_s, percent)) for percent in (50, 95, 99, 99.9))


def run_cell(cell: Cell, fit: Fit) -> dict[str, Any]:
    """Serves the cell's load in virtual time; gives its figures by name, times in s."""
    from stream2llm_sdk.serving.simulator import hardware as profiles
    from stream2llm_sdk.serving.simulator.latency import copy_latency, step_latency
    from stream2llm_sdk.serving.simulator.load import simulate
    from stream2llm_sdk.serving.swap import swap_config

    arm = ALL_ARMS[cell.arm]
    device = _device(cell.hardware, fit)
    latency = step_latency(profiles.LLAMA_3_1_8B, device, 2)
    # The published profile was taken with one step for the whole prompt; it copies block by block and layer by layer.
    is_published = arm.system == "published"
    bytes_per_copy = _BYTES_PER_COPY if is_published else None
    costs = profiles.cost_model(
        profiles.LLAMA_3_1_8B,
        replace(device, seconds_per_small_copy=_SECONDS_PER_COPY_IN_PROFILE),
        2,
        num_tokens_per_step=_MAX_PROMPT_TOKENS if is_published else _TOKEN_BUDGET[cell.workload],
        bytes_per_copy=bytes_per_copy,
    )
    options: dict[str, Any] = {"preemption_mode": cell.mode or "recompute"}
    extra: dict[str, Any] = {}
    if arm.system == "stream2llm":
        options["victims"] = arm.victims
        if cell.mode in ("cost", "swap"):
            extra["kv_transfer_config"] = swap_config(num_host_blocks=_NUM_HOST_BLOCKS)
    requests = _requests(cell)
    result = simulate(
        requests,
        policy=arm.policy,
        system=arm.system,
        streaming=arm.streaming,
        num_gpu_blocks=_num_blocks(cell, fit),
        max_num_batched_tokens=_TOKEN_BUDGET[cell.workload],
        max_model_len=_MAX_PROMPT_TOKENS,
        latency=latency,
        copy_latency=copy_latency(profiles.LLAMA_3_1_8B, device, 2, bytes_per_copy=bytes_per_copy),
        cost_model=costs,
        scheduler_options=options,
        **extra,
    )
    ttft = "ttft_from_context_complete_s"
    return {
        "ttft_s": [result.percentile(ttft, percent) for percent in (50, 95, 99, 99.9)],
        "ttft_curve_s": [result.percentile(ttft, percent) for percent in CURVE_PERCENTILES],
        "ttft_max_s": float(result.values(ttft).max()),
        "ttft_from_request_s": [result.percentile("ttft_from_request_s", percent) for percent in (50, 95, 99, 99.9)],
        "bound_ttft_s": list(_bound_s(cell.hardware, cell.workload, cell.delay_multiplier, cell.num_queries, fit)),
        "num_preemptions": int(result.total("num_preemptions")),
        "num_swap_preemptions": int(result.total("num_swap_preemptions")),
        "num_tokens_invalidated": int(result.total("num_tokens_invalidated")),
        "num_tokens_recomputed": int(result.total("num_tokens_recomputed")),
        "num_tokens_computed": int(result.total("num_tokens_computed")),
        "invalidated_tokens": [result.percentile("num_tokens_invalidated", percent) for percent in (50, 95)],
        "virtual_s": result.virtual_s,
        "busy_s": result.busy_s,
        "wall_s": result.wall_s,
        "peak_kv_usage": result.peak_kv_usage,
    }
