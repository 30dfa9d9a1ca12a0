"""The published system's orders, costs and quirks, as its code has them; `PublishedScheduler` acts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_model import CostModel
from stream2llm_sdk.serving.preemption import PreemptionMode

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt

__all__ = ["QUIRKS", "PublishedOptions", "QuadraticCosts", "Rank", "make_rank"]

Rank = Callable[["Request", "StreamingPrompt | None"], tuple[Any, ...]]
"""The key of a request that has tokens to compute; the smallest is served first."""

QUIRKS = (
    "appends_in_place",
    "admission_ties",
    "preallocation",
    "immediate_readmission",
    "cost_of_incoming",
    "quadratic_costs",
    "lcas_oldest_first",
)
"""What the published system does in its own way, by name; each can be switched off.

appends_in_place: a chunk changes nothing about its stream's place among the running requests. Off: the stream goes to
    the end, as one that is admitted again.
admission_ties: streams without work are all equal to the policy, and lose their KV in reverse order of admission. Off:
    in reverse order of the policy.
preallocation: a request that needs a KV block takes four more, where there are any.
immediate_readmission: a victim whose KV was dropped is computed again as soon as the token budget allows, though it has
    nothing to do before its next chunk comes. Off: it waits for that.
cost_of_incoming: recompute and swap are compared for the new tokens of the request that needs the memory. Off: for the
    computed tokens of the victim.
quadratic_costs: costs are parabolas, fitted by least squares to prefills and copies of 16 to 131,072 tokens. Off: they
    are as the cost model has them.
lcas_oldest_first: LCAS serves the oldest last chunk first, as the published code does. Off: the most recent one, as its
    documentation says.
"""

_MEASURED_TOKENS = tuple(1 << power for power in range(4, 18))
_POLICIES = ("DEFAULT_VLLM", "FCFS", "LCAS", "MCPS")


@dataclass(frozen=True, slots=True)
class PublishedOptions:
    """What `additional_config["stream2llm"]` may say to the published system.

    Attributes:
        policy: DEFAULT_VLLM, FCFS, LCAS or MCPS.
        preemption_mode: recompute, swap or cost.
        quirks: names of `QUIRKS`.

    Raises:
        ConfigurationError: a policy, mode or quirk is unknown.
    """

    policy: str = "DEFAULT_VLLM"
    preemption_mode: PreemptionMode = PreemptionMode.COST
    quirks: frozenset[str] = frozenset(QUIRKS)

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ConfigurationError(
                f"the published system has no policy {self.policy!r}: choose one of {', '.join(_POLICIES)}"
            )
        if unknown := sorted(self.quirks.difference(QUIRKS)):
            raise ConfigurationError(f"unknown quirk {unknown[0]!r}: choose from {', '.join(QUIRKS)}")

    @classmethod
    def parse(
        cls, *, policy: str | None = None, preemption_mode: str | None = None, quirks: Iterable[str] | None = None
    ) -> PublishedOptions:
        """From plain values; None leaves the default."""
        return cls(
            policy=(policy or "DEFAULT_VLLM").strip().upper(),
            preemption_mode=PreemptionMode.parse(preemption_mode or "cost"),
            quirks=frozenset(QUIRKS if quirks is None else quirks),
        )


def make_rank(options: PublishedOptions) -> Rank | None:
    """The policy's order, or None for vLLM's own."""
    if options.policy == "FCFS":
        return lambda request, prompt: (_is_open(prompt), request.arrival_time)
    if options.policy == "LCAS":
        sign = 1 if "lcas_oldest_first" in options.quirks else -1
        return lambda request, prompt: (_is_open(prompt), sign * _last_chunk_s(request, prompt))
    if options.policy == "MCPS":
        return lambda request, prompt: (-request.num_computed_tokens, request.arrival_time)
    return None


def _is_open(prompt: StreamingPrompt | None) -> bool:
    return prompt is not None and prompt.is_open


def _last_chunk_s(request: Request, prompt: StreamingPrompt | None) -> float:
    return float(request.arrival_time) if prompt is None else prompt.last_chunk_arrival_time


class QuadraticCosts:
    """Recompute against swap by parabolas, as the published system fits them to what it measures."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        recompute = [model.recompute_s(num_tokens) for num_tokens in _MEASURED_TOKENS]
        swap = [model.swap_out_s(num_tokens) + model.swap_in_s(num_tokens) for num_tokens in _MEASURED_TOKENS]
        self._recompute = np.polyfit(_MEASURED_TOKENS, recompute, 2)
        self._swap = np.polyfit(_MEASURED_TOKENS, swap, 2)

    def recompute_s(self, num_tokens: int) -> float:
        return float(np.polyval(self._recompute, num_tokens))

    def swap_s(self, num_tokens: int) -> float:
        return float(np.polyval(self._swap, num_tokens))
