"""Why a plan is as it is, told from the plan and from what it was made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stream2llm_sdk.serving.planner import Candidate, Limits, Plan

__all__ = ["PlanReasons"]


class PlanReasons:
    """Tells reasons of one plan.

    Args:
        plan: which.
        limits: what its step might use.
        considered: the candidates that the planner looked at.
        taken_for: by victim, the request that takes its KV.
    """

    def __init__(
        self, plan: Plan, limits: Limits, considered: Iterable[Candidate], taken_for: Mapping[str, str]
    ) -> None:
        is_open = {candidate.request.request_id for candidate in considered if candidate.num_held_back}
        num_open = sum(num_tokens for request_id, num_tokens in plan.num_tokens.items() if request_id in is_open)
        self._has_open_budget = not limits.num_open_tokens or num_open < limits.num_open_tokens
        self._plan, self._limits, self._taken_for = plan, limits, taken_for
        self._has_budget = sum(plan.num_tokens.values()) < limits.num_tokens

    def of_served(self, candidate: Candidate | None, num_granted: int) -> str:
        """Why a request gets as many tokens as it does."""
        request_id = "" if candidate is None else candidate.request.request_id
        for_it = [victim for victim, taker in self._taken_for.items() if taker == request_id]
        reasons = [f"takes the KV of request{'s' * (len(for_it) > 1)} {', '.join(for_it)}"] if for_it else []
        if candidate is not None and request_id in self._plan.trimmed:
            reasons.append(self._why_trimmed(candidate, num_granted))
        return "; ".join(reasons)

    def _why_trimmed(self, candidate: Candidate, num_granted: int) -> str:
        if num_granted == self._limits.num_tokens_per_prefill:
            return "as much as one prefill may take of a step"
        if not self._has_budget:
            return "the step's tokens are used up"
        if candidate.num_held_back and not self._has_open_budget:
            return "the share of the step for open prompts is used up"
        return "there are no more KV blocks for it"

    def of_victim(self, request_id: str, is_idle: bool, places: Mapping[str, int]) -> str:
        """Why a request loses its KV."""
        taker = self._taken_for.get(request_id, "")
        if self._plan.is_forced:
            return f"nobody could be served by the rules: request {taker} takes what it needs"
        if is_idle:
            return f"it waits for its next chunk, and request {taker} needs memory now"
        behind = f" (at place {places[taker]})" if taker in places else ""
        return f"it is behind request {taker}{behind} in the order, which needs memory now"

    def of_waiting(self, request: Any, candidate: Candidate | None) -> str:
        """Why a request that has something to compute gets nothing."""
        if request in self._plan.nothing_to_compute:
            return "the prefix cache holds all that may be computed now"
        if candidate is None:
            return (
                "the step's tokens are used up" if not self._has_budget else "kept out, to let others run to their end"
            )
        if not candidate.is_ready:
            return "it is not ready yet"
        if not self._has_budget:
            return "the step's tokens are used up"
        if candidate.num_held_back and self._plan.defers_open:
            return "a complete prompt ends its prefill in this step, and would wait for more than that"
        if candidate.num_held_back and not self._has_open_budget:
            return "the share of the step for open prompts is used up"
        if candidate.needs_slot and self._limits.num_slots <= len(self._plan.admitted):
            return "no request slot is free"
        return "the free KV blocks do not suffice, and it may take none of those before it"
