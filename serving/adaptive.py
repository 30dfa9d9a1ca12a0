"""A policy that picks between policies from what it sees, and says when and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.serving.policies import FCFS, LCAS, SRPF, SchedulingPolicy, Standing

__all__ = ["Adaptive", "Observation", "Switch"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step saw.

    Attributes:
        now_s: the monotonic clock.
        num_complete_waiting: requests with a complete prompt that wait to be served.
        free_share: free KV blocks of all, 0 to 1.
        num_computed: tokens computed since the observation before.
        num_invalidated: computed tokens that updates made void since then.
    """

    now_s: float
    num_complete_waiting: int
    free_share: float
    num_computed: int
    num_invalidated: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Another policy has taken over."""

    policy: str
    reason: str


class Adaptive:
    """FCFS while there is nothing to choose; under a backlog of complete requests the shortest remaining prefill first
    (SRPF); where updates void much of what is computed, the prompts that have been quiet for longest first (LCAS).

    It does not flap: what is seen is smoothed over `memory_s` seconds, a state is entered at a higher mark than it is
    left, and a policy stays for `dwell_s` seconds at least.

    Attributes:
        current: the policy in force.
        num_switches: how often it has changed.
        last_switch: the latest change.
    """

    name = "ADAPTIVE"
    plans_plain_requests = True
    plans_when_short = True
    follows_progress = True
    uses_forecasts = True
    looks_ahead = False

    def __init__(self, *, memory_s: float = 2.0, dwell_s: float = 5.0) -> None:
        self.current: SchedulingPolicy = FCFS()
        self.num_switches = 0
        self.last_switch: Switch | None = None
        self._choices: dict[str, SchedulingPolicy] = {policy.name: policy for policy in (self.current, SRPF(), LCAS())}
        self._memory_s, self._dwell_s = memory_s, dwell_s
        self._seen_s: float | None = None
        self._since_s = -dwell_s
        self._backlog = self._used = self._computed = self._invalidated = 0.0

    def key(self, standing: Standing) -> tuple[Any, ...]:
        return self.current.key(standing)

    @property
    def invalidated_share(self) -> float:
        """Share of the computed tokens that updates made void, of late."""
        return self._invalidated / self._computed if self._computed > 0 else 0.0

    def observe(self, seen: Observation) -> Switch | None:
        """Takes notice of a step; returns the switch if there is one."""
        if self._seen_s is None:
            self._seen_s = self._since_s = seen.now_s
        passed_s = max(0.0, seen.now_s - self._seen_s)
        self._seen_s = seen.now_s
        new = passed_s / (passed_s + self._memory_s)
        self._backlog += new * (seen.num_complete_waiting - self._backlog)
        self._used += new * (1.0 - seen.free_share - self._used)
        self._computed = self._computed * (1.0 - new) + seen.num_computed
        self._invalidated = self._invalidated * (1.0 - new) + seen.num_invalidated
        wanted, reason = self._wanted()
        if wanted == self.current.name or seen.now_s - self._since_s < self._dwell_s:
            return None
        self.current, self._since_s = self._choices[wanted], seen.now_s
        self.num_switches += 1
        self.last_switch = Switch(wanted, reason)
        return self.last_switch

    def _wanted(self) -> tuple[str, str]:
        now = self.current.name
        voided = self.invalidated_share
        if voided > (0.3 if now == LCAS.name else 0.5) and self._used > 0.5:
            return LCAS.name, f"updates make {voided:.0%} of the computed tokens void, {self._used:.0%} of memory used"
        if self._backlog > (0.5 if now == SRPF.name else 1.5):
            return SRPF.name, f"{self._backlog:.1f} complete requests wait on average"
        return FCFS.name, f"{self._backlog:.1f} complete requests wait on average, {voided:.0%} made void"
