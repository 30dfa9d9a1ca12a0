"""How long one step of a model takes on a GPU, from its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.clock import StepFacts

__all__ = ["H100_LLAMA_8B", "H200_LLAMA_8B", "StepLatency"]


@dataclass(frozen=True, slots=True)
class StepLatency:
    """A `LatencyModel` for prefill, which is bound by compute.

    A step takes `overhead_s + (flops_per_token * tokens + flops_per_pair * pairs) / effective_flops_per_s`. A pair is
    one query position and one position at or before it that it attends to. Reading the weights, which bounds decode,
    is part of the overhead.

    Attributes:
        overhead_s: seconds that every step takes, whatever it computes.
        flops_per_token: twice the number of parameters.
        flops_per_pair: four times the number of layers times the width of all query heads (scores and values).
        effective_flops_per_s: of all devices together, as reached in practice.
        messaging_s: seconds between the end of a step and the client's seeing its tokens. It delays what clients see,
            not the next step.
    """

    overhead_s: float
    flops_per_token: float
    flops_per_pair: float
    effective_flops_per_s: float
    messaging_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{field.name} must be a finite number >= 0, got {value}")
        if not self.effective_flops_per_s:
            raise ConfigurationError("effective_flops_per_s must be more than 0")

    def __call__(self, facts: StepFacts) -> float:
        """Seconds that the step takes."""
        num_tokens, twice_pairs = 0, 0
        for first, stop in facts.spans:
            num_new = stop - first
            num_tokens += num_new
            twice_pairs += num_new * (first + stop + 1)
        flops = self.flops_per_token * num_tokens + self.flops_per_pair * twice_pairs / 2
        return self.overhead_s + flops / self.effective_flops_per_s


_LLAMA_8B_FLOPS_PER_TOKEN = 2 * 8.03e9
_LLAMA_8B_FLOPS_PER_PAIR = 4 * 32 * 4096
_TWO_GPUS_PEAK_FLOPS_PER_S = 2 * 989e12  # dense bfloat16, the same for H100 and H200

# Llama-3.1-8B on two GPUs (tensor parallel). Only the efficiency is fitted, to the published P50 TTFT of the crawler
# workload without streaming at 0.5 and 2 requests a second; overhead and messaging are assumed.
H200_LLAMA_8B = StepLatency(
    overhead_s=0.003,
    flops_per_token=_LLAMA_8B_FLOPS_PER_TOKEN,
    flops_per_pair=_LLAMA_8B_FLOPS_PER_PAIR,
    effective_flops_per_s=0.54 * _TWO_GPUS_PEAK_FLOPS_PER_S,
    messaging_s=0.002,
)
H100_LLAMA_8B = StepLatency(
    overhead_s=0.003,
    flops_per_token=_LLAMA_8B_FLOPS_PER_TOKEN,
    flops_per_pair=_LLAMA_8B_FLOPS_PER_PAIR,
    effective_flops_per_s=0.515 * _TWO_GPUS_PEAK_FLOPS_PER_S,
    messaging_s=0.002,
)
