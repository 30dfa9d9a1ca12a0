"""Scheduling policies: in which order requests get tokens and memory. They rank; they never touch KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt

__all__ = ["FCFS", "POLICIES", "DefaultVLLM", "IdleFirst", "SchedulingPolicy", "VictimOrder", "make_policy"]

Key = tuple[Any, ...]


class SchedulingPolicy(Protocol):
    """Ranks requests: the smallest key first. Equal keys keep the order of admission.

    Attributes:
        name: as in `SCHEDULER_TYPE`.
        plans_plain_requests: whether steps without any open stream are planned too. Where a policy's order of plain
            requests is vLLM's own, such steps are left to vLLM.
    """

    name: str
    plans_plain_requests: bool

    def key(self, request: Request, prompt: StreamingPrompt | None, admitted: bool) -> Key:
        """The rank of a request. `prompt` is None for a request that did not come through the SDK; `admitted` says
        whether it already runs or holds KV."""
        ...


class DefaultVLLM:
    """vLLM's own order: what runs goes before what waits; a waiting request never preempts a running one."""

    name = "DEFAULT_VLLM"
    plans_plain_requests = False

    def key(self, request: Request, prompt: StreamingPrompt | None, admitted: bool) -> Key:
        return (not admitted, request.priority)


class FCFS:
    """Complete requests before open ones, each by arrival (Stream2LLM's `fcfs`)."""

    name = "FCFS"
    plans_plain_requests = False

    def key(self, request: Request, prompt: StreamingPrompt | None, admitted: bool) -> Key:
        return (prompt is not None and prompt.is_open, request.priority, request.arrival_time)


class VictimOrder(Protocol):
    """Ranks the holders of KV that a plan leaves out: the smallest key loses its blocks first."""

    def key(self, rank: int, idle: bool) -> Key:
        """`rank` is the request's place in the policy's order (0 is served first), `idle` whether it is an open
        stream that waits for its next chunk."""
        ...


class IdleFirst:
    """Idle streams first, then whoever would be served last."""

    def key(self, rank: int, idle: bool) -> Key:
        return (not idle, -rank)


POLICIES: dict[str, type[DefaultVLLM] | type[FCFS]] = {policy.name: policy for policy in (DefaultVLLM, FCFS)}


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of a name, in any case, as `SCHEDULER_TYPE` gives it.

    Raises:
        ConfigurationError: no policy has this name.
    """
    try:
        return POLICIES[name.strip().upper()]()
    except KeyError:
        raise ConfigurationError(
            f"unknown scheduling policy {name!r} (argument `policy` or environment SCHEDULER_TYPE): "
            f"choose one of {', '.join(sorted(POLICIES))}"
        ) from None
