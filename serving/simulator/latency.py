"""How long one step of a model takes on a GPU, from its arithmetic and its memory traffic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import CostCurve
from stream2llm_sdk.serving.simulator.clock import StepFacts
from stream2llm_sdk.serving.simulator.hardware import (
    H100,
    H200,
    LLAMA_3_1_8B,
    Hardware,
    ModelShape,
    copy_seconds_per_byte,
    linear_curve,
)

__all__ = ["H100_LLAMA_8B", "H200_LLAMA_8B", "StepLatency", "copy_latency", "step_latency"]


@dataclass(frozen=True, slots=True)
class StepLatency:
    """A `LatencyModel`: a step's overhead, its linear layers and its attention, one after another.

    The linear layers take `flops_per_token * tokens / effective_flops_per_s`, or `weights_s` where reading the weights
    takes longer; attention takes `flops_per_pair * pairs / attention_flops_per_s`, or `kv_s_per_token` for each token
    of context where reading the KV takes longer (each a roofline). So prefill is bound by compute and decode by memory.
    A pair is one query position and one position at or before it that it attends to.

    Attributes:
        overhead_s: seconds that every step takes, whatever it computes.
        flops_per_token: twice the number of parameters.
        flops_per_pair: four times the number of layers times the width of all query heads (scores and values).
        effective_flops_per_s: of all devices together, as reached in practice.
        attention_flops_per_s: the same in attention; 0 for `effective_flops_per_s`.
        messaging_s: seconds between the end of a step and the client's seeing its tokens. It delays what clients see,
            not the next step.
        weights_s: seconds to read all weights; 0 where that is part of the overhead.
        kv_s_per_token: seconds to read one token's KV; 0 to leave it out.
        linear_s: seconds of the linear layers by the tokens of a step, in place of the first formula.
    """

    overhead_s: float
    flops_per_token: float
    flops_per_pair: float
    effective_flops_per_s: float
    attention_flops_per_s: float = 0.0
    messaging_s: float = 0.0
    weights_s: float = 0.0
    kv_s_per_token: float = 0.0
    linear_s: CostCurve | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "linear_s" and not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{field.name} must be a finite number >= 0, got {value}")
        if not self.effective_flops_per_s:
            raise ConfigurationError("effective_flops_per_s must be more than 0")

    def __call__(self, facts: StepFacts) -> float:
        """Seconds that the step takes."""
        num_tokens, twice_pairs, num_context = 0, 0, 0
        for first, stop in facts.spans:
            num_new = stop - first
            num_tokens += num_new
            twice_pairs += num_new * (first + stop + 1)
            num_context += stop
        speed = self.effective_flops_per_s
        linear_s = self.flops_per_token * num_tokens / speed if self.linear_s is None else self.linear_s(num_tokens)
        if num_tokens and linear_s < self.weights_s:
            linear_s = self.weights_s
        attention_s = self.flops_per_pair * twice_pairs / 2 / (self.attention_flops_per_s or speed)
        kv_s = self.kv_s_per_token * num_context
        return self.overhead_s + linear_s + (attention_s if attention_s > kv_s else kv_s)


def step_latency(model: ModelShape, hardware: Hardware, tensor_parallel_size: int = 1) -> StepLatency:
    """The latency of a model's steps on so many devices.

    With tensor parallelism every layer has two all-reduces of its tokens' hidden states, in which each device sends and
    receives 2 (t - 1) / t of them; they are charged with the linear layers where the interconnect's speed is given.

    Raises:
        ConfigurationError: the hardware's peak is not known for the model's number format, or its heads cannot be
            shared out.
    """
    if tensor_parallel_size < 1:
        raise ConfigurationError(f"tensor_parallel_size must be 1 or more, got {tensor_parallel_size}")
    if model.num_heads % tensor_parallel_size:
        raise ConfigurationError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {model.num_heads} attention heads of "
            f"{model.name}: choose a size that does"
        )
    measured = hardware.measured
    if measured is not None:
        return StepLatency(
            overhead_s=hardware.overhead_s,
            flops_per_token=0.0,
            flops_per_pair=measured.seconds_per_pair,
            effective_flops_per_s=1.0,
            messaging_s=hardware.messaging_s,
            linear_s=measured.recompute,
        )
    peak = tensor_parallel_size * hardware.peak(model.dtype)
    flops_per_s = peak * hardware.best_efficiency
    bytes_per_s = tensor_parallel_size * hardware.memory_bytes_per_s * hardware.memory_efficiency
    exchanged = 2 * (tensor_parallel_size - 1) / tensor_parallel_size * 2 * model.num_layers * model.hidden_size
    exchange_s = exchanged * model.dtype_bytes / hardware.interconnect_bytes_per_s
    return StepLatency(
        overhead_s=hardware.overhead_s,
        flops_per_token=model.flops_per_token + exchange_s * flops_per_s,
        flops_per_pair=model.flops_per_pair,
        effective_flops_per_s=flops_per_s,
        attention_flops_per_s=peak * hardware.best_attention_efficiency,
        messaging_s=hardware.messaging_s,
        weights_s=model.weight_bytes / bytes_per_s,
        kv_s_per_token=model.kv_bytes_per_token / bytes_per_s,
        linear_s=linear_curve(model, hardware, tensor_parallel_size),
    )


def copy_latency(
    model: ModelShape,
    hardware: Hardware,
    tensor_parallel_size: int = 1,
    *,
    block_size: int = 16,
    bytes_per_copy: float | None = None,
) -> Callable[[int, int], float]:
    """Seconds that a step's copies of KV blocks take, from the numbers of blocks out and in: `simulate`'s
    `copy_latency`. Blocks out and blocks in follow each other, and the forward pass follows them.

    Args:
        model: whose KV it is.
        hardware: each of the devices.
        tensor_parallel_size: devices; each copies its share of the heads over a link of its own.
        block_size: tokens per KV block.
        bytes_per_copy: how large single copies are, where they are small; None for copies that fill the link.
    """
    if (measured := hardware.measured) is not None:

        def measured_latency(num_out: int, num_in: int) -> float:
            return measured.swap_out_s(num_out * block_size) + measured.swap_in_s(num_in * block_size)

        return measured_latency
    per_block = copy_seconds_per_byte(hardware, tensor_parallel_size, bytes_per_copy)
    per_block *= block_size * model.kv_bytes_per_token
    overhead_s = hardware.copy_overhead_s

    def latency(num_out: int, num_in: int) -> float:
        return overhead_s * ((num_out > 0) + (num_in > 0)) + per_block * (num_out + num_in)

    return latency


# Llama-3.1-8B on two GPUs, as in the published runs: `H200` and `H100` say what of it is fitted.
H200_LLAMA_8B = step_latency(LLAMA_3_1_8B, H200, tensor_parallel_size=2)
H100_LLAMA_8B = step_latency(LLAMA_3_1_8B, H100, tensor_parallel_size=2)
