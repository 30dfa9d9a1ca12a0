"""The policy that picks: what it picks when, that it says why, and that it does not flap."""

from __future__ import annotations

from stream2llm_sdk.serving.adaptive import Adaptive, Observation, Switch

STEP_S = 0.1


class Steps:
    """Takes steps of 0.1 s that all see the same."""

    def __init__(self) -> None:
        self.policy = Adaptive(memory_s=1.0, dwell_s=3.0)
        self.now_s = 0.0

    def take(
        self, seconds: float, *, waiting: int = 0, free: float = 0.9, computed: int = 100, invalidated: int = 0
    ) -> list[Switch]:
        switches = []
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            seen = Observation(self.now_s, waiting, free, computed, invalidated)
            if (switch := self.policy.observe(seen)) is not None:
                switches.append(switch)
        return switches


def test_with_nothing_to_choose_it_is_fcfs() -> None:
    steps = Steps()
    assert steps.take(60, waiting=1) == []
    assert (steps.policy.current.name, steps.policy.num_switches) == ("FCFS", 0)


def test_a_backlog_of_complete_requests_brings_the_shortest_prefill_first() -> None:
    steps = Steps()
    (switch,) = steps.take(10, waiting=20)
    assert switch.policy == steps.policy.current.name == "SRPF"
    assert "complete requests wait" in switch.reason
    (back,) = steps.take(20, waiting=0)
    assert back.policy == "FCFS"


def test_updates_that_void_what_is_computed_bring_the_quiet_prompts_first_where_memory_is_short() -> None:
    steps = Steps()
    assert steps.take(20, invalidated=80, free=0.9) == []
    (switch,) = steps.take(20, invalidated=80, free=0.1)
    assert switch.policy == "LCAS"
    assert "80% of the computed tokens void" in switch.reason


def test_what_comes_and_goes_does_not_make_it_flap() -> None:
    steps = Steps()
    for _ in range(200):
        steps.take(0.2, waiting=9)
        steps.take(0.2, waiting=0)
    assert steps.policy.num_switches <= 1, "the mean is above the mark at which SRPF is left"


def test_a_policy_stays_for_a_while() -> None:
    steps = Steps()
    for _ in range(20):
        steps.take(2.0, waiting=50)
        steps.take(2.0, waiting=0)
    assert steps.policy.num_switches <= steps.now_s / 3.0


def test_the_first_step_alone_decides_nothing() -> None:
    policy = Adaptive()
    assert policy.observe(Observation(1_000.0, 500, 0.0, 1, 1)) is None
