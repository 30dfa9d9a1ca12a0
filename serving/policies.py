"""Scheduling policies: in which order requests get tokens and memory. They rank; they never touch KV."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.length_prediction import volume

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt

__all__ = [
    "FCFS",
    "LCAS",
    "MCPS",
    "POLICIES",
    "SJF",
    "SRPF",
    "SVF",
    "DefaultVLLM",
    "OneBitSVF",
    "SchedulingPolicy",
    "Standing",
    "make_policy",
    "policy_name",
]

Key = tuple[Any, ...]
LookingAt = Literal["all", "complete", "none"]


@dataclass(slots=True)
class Standing:
    """What a policy may rank a request by.

    Attributes:
        request: vLLM's request.
        prompt: its streaming prompt; None for a request that did not come through the SDK.
        is_admitted: whether it runs or holds KV.
        final_num_tokens: the length that its prompt is expected to end with; the length itself once it is complete.
        completion_s: when an open prompt is expected to be complete, or when it was, on the monotonic clock.
        last_chunk_s: when its last chunk arrived, on the monotonic clock.
        num_available_tokens: its first tokens of which there is KV: computed on the device, or to be loaded from host
            memory.
        num_output_tokens: the output that it is expected to give, in all.
        class_num_output_tokens: mean output of the class that it is expected to be in, long or short (1 bit).
    """

    request: Request
    prompt: StreamingPrompt | None
    is_admitted: bool
    final_num_tokens: int
    completion_s: float
    last_chunk_s: float
    num_available_tokens: int
    num_output_tokens: float
    class_num_output_tokens: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether more prompt may come."""
        return self.prompt is not None and self.prompt.is_open


class SchedulingPolicy(Protocol):
    """Ranks requests: the smallest key first. Equal keys keep the order of admission.

    A key is asked for when something happened to the request (it came, its prompt changed, it was admitted or
    preempted, its forecast changed), so it must not depend on the time of the call.

    Attributes:
        name: as in `SCHEDULER_TYPE`.
        plans_plain_requests: whether steps without any open stream are planned too. Where a policy's order of plain
            requests is vLLM's own, such steps are left to vLLM.
        plans_when_short: whether steps without any open stream are planned when memory is short.
        follows_progress: whether keys change with the prompt tokens that a step computes.
        follows_output: whether they change with its output tokens as well.
        uses_forecasts: whether keys depend on what is expected of open prompts or of outputs.
        looks_ahead: what is admitted only if it and all that were admitted can run to their ends in the memory there
            is: "all", "complete" requests (open ones give way to them anyway), or "none".
        open_share: share of a step's tokens that goes to open prompts, more only where many of them have something to
            compute. A step is not interrupted: whoever becomes complete meanwhile waits for its end. Who ends its
            prefill in a step waits for all of it, so that below 1 open prompts are put off then (`OpenShare`).
    """

    name: str
    plans_plain_requests: bool
    plans_when_short: bool
    follows_progress: bool
    follows_output: bool
    uses_forecasts: bool
    looks_ahead: LookingAt
    open_share: float

    def key(self, standing: Standing) -> Key:
        """The rank of a request."""
        ...


class _Policy:
    name: str
    plans_plain_requests = False
    plans_when_short = True
    follows_progress = False
    follows_output = False
    uses_forecasts = False
    looks_ahead: LookingAt = "none"
    open_share = 1.0


class DefaultVLLM(_Policy):
    """vLLM's own order: what runs goes before what waits; a waiting request never preempts a running one."""

    name = "DEFAULT_VLLM"
    plans_when_short = False

    def key(self, standing: Standing) -> Key:
        return (not standing.is_admitted, standing.request.priority)


class FCFS(_Policy):
    """Complete requests before open ones, each by arrival (Stream2LLM's `fcfs`)."""

    name = "FCFS"
    looks_ahead: LookingAt = "complete"

    def key(self, standing: Standing) -> Key:
        return (standing.is_open, standing.request.priority, standing.request.arrival_time)


class LCAS(_Policy):
    """Last Chunk Arrival Scheduling: complete requests before open ones, the oldest last chunk first (Stream2LLM's
    `lcas`, as its code has it: the prose says most recent first)."""

    name = "LCAS"
    looks_ahead: LookingAt = "complete"

    def key(self, standing: Standing) -> Key:
        return (standing.is_open, standing.request.priority, standing.last_chunk_s)


class MCPS(_Policy):
    """Most Chunks Processed Scheduling: most computed tokens first (Stream2LLM's `mcps`), whether their KV is on the
    device or in host memory."""

    name = "MCPS"
    plans_plain_requests = True
    follows_progress = True
    follows_output = True

    def key(self, standing: Standing) -> Key:
        return (standing.request.priority, -standing.num_available_tokens)


class SJF(_Policy):
    """Shortest Job First: the shortest expected output first, whatever the prompt; for comparison."""

    name = "SJF"
    plans_plain_requests = True
    follows_output = True
    uses_forecasts = True

    def key(self, standing: Standing) -> Key:
        return (standing.request.priority, standing.num_output_tokens)


class SVF(_Policy):
    """Smallest Volume First: the least s·o + (o² + o)/2 first, s the forecast of the prompt's final length."""

    name = "SVF"
    plans_plain_requests = True
    follows_output = True
    uses_forecasts = True
    looks_ahead: LookingAt = "all"

    def key(self, standing: Standing) -> Key:
        return (standing.request.priority, volume(standing.final_num_tokens, standing.num_output_tokens))


class OneBitSVF(SVF):
    """SVF with one bit about the output: the mean of its class, long or short, stands for its length."""

    name = "SVF_1BIT"

    def key(self, standing: Standing) -> Key:
        return (standing.request.priority, volume(standing.final_num_tokens, standing.class_num_output_tokens))


class SRPF(_Policy):
    """Shortest Remaining Prefill First: complete requests before open ones. Among complete ones the least prefill left
    first, less `ageing` tokens for each second since the prompt was complete: one with n tokens left is overtaken
    only by those that were complete at most n / `ageing` seconds after it. Open ones by when they are expected to be
    complete, in short steps, and put off where a complete one ends its prefill (`OpenShare`).
    """

    name = "SRPF"
    looks_ahead: LookingAt = "complete"
    plans_plain_requests = True
    follows_progress = True
    uses_forecasts = True

    def __init__(self, ageing: float = 2_000.0, open_share: float = 0.25) -> None:
        self.ageing = ageing
        self.open_share = open_share

    def key(self, standing: Standing) -> Key:
        request = standing.request
        if standing.is_open:
            return (True, request.priority, standing.completion_s)
        num_left = max(0, request.num_prompt_tokens - standing.num_available_tokens)
        # The time since completion is the same now for all: what it adds to a key can be left out.
        return (False, request.priority, num_left + self.ageing * standing.completion_s)


def _adaptive() -> SchedulingPolicy:
    from stream2llm_sdk.serving.adaptive import Adaptive  # it is made of the others

    return Adaptive()


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    **{policy.name: policy for policy in (DefaultVLLM, FCFS, LCAS, MCPS, SJF, SVF, OneBitSVF, SRPF)},
    "ADAPTIVE": _adaptive,
}
"""What makes each policy, by name."""

_ALIASES = {"SHORTEST_COMPLETE": "SRPF"}


def policy_name(given: str | None, default: str) -> str:
    """The name of a policy that was asked for: as an argument, else by the environment's `SCHEDULER_TYPE`."""
    return given or os.environ.get("SCHEDULER_TYPE") or default


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of a name, in any case, as `SCHEDULER_TYPE` gives it.

    Raises:
        ConfigurationError: no policy has this name.
    """
    wanted = name.strip().upper() if isinstance(name, str) else ""
    wanted = _ALIASES.get(wanted, wanted)
    if wanted not in POLICIES:
        raise ConfigurationError(
            f"unknown scheduling policy {name!r} (argument `policy` or environment SCHEDULER_TYPE): "
            f"choose one of {', '.join(sorted(POLICIES))}"
        )
    return POLICIES[wanted]()
