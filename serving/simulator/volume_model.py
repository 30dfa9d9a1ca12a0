"""Smallest volume first in the model in which its bound is proved: unit steps, one memory, no preemption.

The model (arXiv 2606.22327): all requests are there at time 0. A request of s prompt and o output tokens, once
admitted, runs for o steps without a break, and holds s + j tokens of memory in its j-th, so s·o + (o² + o)/2
token-steps in all: its volume. It is admitted at the start of a step if all that run and it fit into the memory M in
every step until each has ended. Smallest volume first admits in the order of volumes, and waits where the next one
does not fit.

A lower bound on what any schedule can do, the optimal one included: when its k-th request ends, at least k requests
have used their volumes up, and so at least the k smallest volumes together, V_k; a step has room for M; so its k-th
end is not before V_k / M. Nor is it before the k-th smallest output. The sum over k is a bound on the total latency.

What smallest volume first reaches, with p = s + o, α = max p / M and requests numbered by volume: let request i start
after S_i steps. At each step t before that, the request at the head of the queue, h ≤ i, does not fit: at some step τ
≥ t those that were admitted by t, all of them before i in the order, would hold more than M - p_h ≥ (1 - α)·M. Memory
of a request that runs all the way from t to τ grows linearly, so over these steps it holds on average at least half
of what it holds at τ: the steps t … τ use at least (1 - α)·M / 2 each. Steps 0 … S_i - 1 are covered by such
stretches one behind the other, and what they use belongs to requests before i: S_i·(1 - α)·M / 2 ≤ V_(i-1). Therefore

    latency_i = S_i + o_i ≤ 2 / (1 - α) · V_(i-1) / M + o_i,

and the total is at most 2 / (1 - α) · Σ V_k / M + Σ o_k. Both sums are lower bounds on the optimum, which gives the
published 1 + 2 / (1 - α): 5 at α = ½, towards 3 where requests are small. The 1 comes from Σ o_k, so the ratio holds
against the optimum and against `LatencyBound.combined`; it does not hold against the sum of volumes alone, which is
far below any schedule where little of the memory is used (one request of volume v takes o steps, not v / M). The
argument is ours, reconstructed from the published constant; the paper's own text was not at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.length_prediction import volume
from stream2llm_sdk.serving.look_ahead import fits_to_the_end

__all__ = ["LatencyBound", "VolumeRequest", "by_volume", "latency_bound", "run_in_order"]


@dataclass(frozen=True, slots=True)
class VolumeRequest:
    """A request of the model.

    Attributes:
        num_prompt_tokens: s, which it holds from its first step on.
        num_output_tokens: o, the steps that it runs.

    Raises:
        ConfigurationError: the prompt is shorter than 0 tokens, or the output than 1.
    """

    num_prompt_tokens: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0 or self.num_output_tokens < 1:
            raise ConfigurationError(f"{self}: a prompt has 0 tokens or more, an output at least 1")

    @property
    def volume(self) -> int:
        """Token-steps of memory that it uses."""
        return round(volume(self.num_prompt_tokens, self.num_output_tokens))

    @property
    def peak(self) -> int:
        """Tokens that it holds in its last step."""
        return self.num_prompt_tokens + self.num_output_tokens


def by_volume(requests: Sequence[VolumeRequest]) -> list[int]:
    """The requests' places, the smallest volume first; equal ones as they come."""
    return sorted(range(len(requests)), key=lambda index: requests[index].volume)


def run_in_order(requests: Sequence[VolumeRequest], order: Sequence[int], memory: int) -> list[int]:
    """Serves requests in an order, each as soon as it fits to the end, and gives the steps until each has ended.

    Args:
        requests: all there at time 0.
        order: their places in the order of admission, such as `by_volume` gives.
        memory: M, in tokens.

    Raises:
        ConfigurationError: a request is larger than the memory, or the order leaves one out.
    """
    if sorted(order) != list(range(len(requests))):
        raise ConfigurationError(f"the order must name each of {len(requests)} requests once")
    for index, request in enumerate(requests):
        if request.peak > memory:
            raise ConfigurationError(f"request {index} needs {request.peak} tokens, more than the memory of {memory}")
    ends = [0] * len(requests)
    running: list[int] = []
    num_admitted, step = 0, 0
    while running or num_admitted < len(order):
        while num_admitted < len(order):
            index = order[num_admitted]
            ends[index] = step + requests[index].num_output_tokens
            if not fits_to_the_end(_needs(requests, ends, [*running, index], step), memory):
                break
            running.append(index)
            num_admitted += 1
        step += 1
        running = [index for index in running if ends[index] > step]
    return ends


def _needs(
    requests: Sequence[VolumeRequest], ends: Sequence[int], running: Sequence[int], step: int
) -> list[tuple[int, int]]:
    """`(tokens now, tokens to come)` of those that run at the start of a step."""
    return [(requests[index].peak - (ends[index] - step), ends[index] - step) for index in running]


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """What bounds the total latency of requests that are all there at time 0, in steps.

    Attributes:
        volume: Σ V_k / M, below any schedule's total.
        output: Σ o_k, likewise.
        combined: Σ max(V_k / M, k-th smallest o), likewise, and the best of the three.
        alpha: the largest request's share of the memory.
    """

    volume: float
    output: int
    combined: float
    alpha: float

    @property
    def ratio(self) -> float:
        """1 + 2 / (1 - α): how many times `combined` smallest volume first takes at most; infinite at α = 1."""
        return 1 + 2 / (1 - self.alpha) if self.alpha < 1 else float("inf")

    @property
    def smallest_volume_first(self) -> float:
        """Above smallest volume first's total: 2 / (1 - α) · Σ V_k / M + Σ o_k."""
        return (self.ratio - 1) * self.volume + self.output


def latency_bound(requests: Sequence[VolumeRequest], memory: int) -> LatencyBound:
    """The bounds for these requests, at least one, in a memory of so many tokens."""
    if not requests or memory < 1:
        raise ConfigurationError(f"need a request and a memory of at least 1, got {len(requests)} and {memory}")
    ends = [total / memory for total in accumulate(sorted(request.volume for request in requests))]
    outputs = sorted(request.num_output_tokens for request in requests)
    return LatencyBound(
        volume=sum(ends),
        output=sum(outputs),
        combined=sum(map(max, ends, outputs)),
        alpha=max(request.peak for request in requests) / memory,
    )
