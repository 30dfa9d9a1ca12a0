"""A policy that picks between policies from what it sees, and says when and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.serving.policies import SRPF, SVF, LookingAt, SchedulingPolicy, Standing

__all__ = ["Adaptive", "Observation", "Switch"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step saw.

    Attributes:
        now_s: the monotonic clock.
        free_share: free KV blocks of all, 0 to 1.
        num_open: streams whose prompt is not complete.
        num_complete: requests whose prompt is, those that run and those that wait.
        num_waiting: those of them that wait.
        num_answering: those of them of which this step computed an output token after the first.
    """

    now_s: float
    free_share: float
    num_open: int
    num_complete: int
    num_waiting: int
    num_answering: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Another policy has taken over."""

    policy: str
    reason: str


class Adaptive:
    """The shortest remaining prefill first (SRPF), and the smallest volume first (SVF) where answers hold the memory.

    Prompts that are open, and prefill, are what SRPF is best at: an open prompt of little volume must not go before
    complete ones. Where most requests are complete, memory is full of those that are being answered and others wait
    for it, what they will hold for how long decides, and admitting more than can end only makes them evict each other:
    that is SVF with its look-ahead. It has no ageing, so neither has this policy while SVF is in force.

    It does not flap: what is seen is smoothed over `memory_s` seconds, SVF is entered at higher marks than it is left,
    and a policy stays for `dwell_s` seconds at least.

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

    def __init__(self, *, memory_s: float = 2.0, dwell_s: float = 5.0) -> None:
        self.current: SchedulingPolicy = SRPF()
        self.looks_ahead: LookingAt = self.current.looks_ahead
        self.open_share = self.current.open_share
        self.follows_output = self.current.follows_output
        self.num_switches = 0
        self.last_switch: Switch | None = None
        self._choices: dict[str, SchedulingPolicy] = {policy.name: policy for policy in (self.current, SVF())}
        self._memory_s, self._dwell_s = memory_s, dwell_s
        self._seen_s: float | None = None
        self._since_s = 0.0
        self._used = self._open = self._complete = self._waiting = self._answering = 0.0

    def key(self, standing: Standing) -> tuple[Any, ...]:
        return self.current.key(standing)

    def observe(self, seen: Observation) -> Switch | None:
        """Takes notice of a step; returns the switch if there is one."""
        if self._seen_s is None:
            self._seen_s = self._since_s = seen.now_s
        passed_s = max(0.0, seen.now_s - self._seen_s)
        self._seen_s = seen.now_s
        new = passed_s / (passed_s + self._memory_s)
        self._used += new * (1.0 - seen.free_share - self._used)
        self._open += new * (seen.num_open - self._open)
        self._complete += new * (seen.num_complete - self._complete)
        self._waiting += new * (seen.num_waiting - self._waiting)
        self._answering += new * (seen.num_answering - self._answering)
        wanted = self._wanted()
        if wanted == self.current.name or seen.now_s - self._since_s < self._dwell_s:
            return None
        self.current, self._since_s = self._choices[wanted], seen.now_s
        self.looks_ahead, self.open_share = self.current.looks_ahead, self.current.open_share
        self.follows_output = self.current.follows_output
        self.num_switches += 1
        self.last_switch = Switch(wanted, self._reason())
        return self.last_switch

    def _wanted(self) -> str:
        is_in = self.current.name == SVF.name
        is_full = self._used > (0.5 if is_in else 0.85)
        is_complete = self._complete > (1.0 if is_in else 3.0) * self._open
        is_answering = self._answering > (0.25 if is_in else 0.5) * max(1.0, self._complete - self._waiting)
        is_waiting = self._waiting > (0.5 if is_in else 1.5)
        return SVF.name if is_full and is_complete and is_answering and is_waiting else SRPF.name

    def _reason(self) -> str:
        return (
            f"{self._used:.0%} of memory used, {self._answering:.1f} requests are being answered, {self._waiting:.1f} "
            f"complete ones wait, {self._open:.1f} prompts are open, on average"
        )
