"""The policy that picks: what it picks when, that it says why, and that it does not flap."""

from __future__ import annotations

from typing import Any

import pytest

from stream2llm_sdk.serving.adaptive import Adaptive, Observation, Switch
from stream2llm_sdk.serving.policies import SRPF

STEP_S = 0.1
ANSWERS_HOLD_THE_MEMORY = {"free": 0.02, "complete": 40, "waiting": 20, "answering": 20, "opened": 2}


class Steps:
    """Takes steps of 0.1 s that all see the same."""

    def __init__(self) -> None:
        self.policy = Adaptive(memory_s=1.0, dwell_s=3.0)
        self.now_s = 0.0

    def take(
        self,
        seconds: float,
        *,
        free: float = 0.9,
        opened: int = 0,
        complete: int = 1,
        waiting: int = 0,
        answering: int = 0,
    ) -> list[Switch]:
        switches = []
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            seen = Observation(self.now_s, free, opened, complete, waiting, answering)
            if (switch := self.policy.observe(seen)) is not None:
                switches.append(switch)
        return switches


def test_answers_that_hold_the_memory_bring_the_smallest_volume_first() -> None:
    steps = Steps()
    assert steps.policy.current.name == "SRPF"
    assert steps.policy.looks_ahead == "complete"
    assert steps.policy.open_share == SRPF().open_share < 1.0
    (switch,) = steps.take(10, **ANSWERS_HOLD_THE_MEMORY)
    assert switch.policy == steps.policy.current.name == "SVF"
    assert steps.policy.looks_ahead == "all"
    assert steps.policy.open_share == 1.0
    assert "92% of memory used" in switch.reason
    (back,) = steps.take(20)
    assert back.policy == "SRPF"
    assert steps.policy.looks_ahead == "complete"


@pytest.mark.parametrize(
    "other",
    [
        {"free": 0.5},  # there is memory
        {"opened": 300},  # open prompts hold it
        {"answering": 0},  # prefill does
        {"waiting": 0},  # nobody waits for it
    ],
)
def test_else_the_shortest_remaining_prefill_stays_first(other: dict[str, Any]) -> None:
    steps = Steps()
    assert steps.take(60, **(ANSWERS_HOLD_THE_MEMORY | other)) == []
    assert (steps.policy.current.name, steps.policy.num_switches) == ("SRPF", 0)


def test_what_comes_and_goes_does_not_make_it_flap() -> None:
    steps = Steps()
    for _ in range(200):
        steps.take(0.2, **ANSWERS_HOLD_THE_MEMORY)
        steps.take(0.2, **(ANSWERS_HOLD_THE_MEMORY | {"waiting": 1, "free": 0.2}))
    assert steps.policy.num_switches <= 1


def test_a_policy_stays_for_a_while() -> None:
    steps = Steps()
    for _ in range(20):
        steps.take(2.0, **ANSWERS_HOLD_THE_MEMORY)
        steps.take(2.0)
    assert steps.policy.num_switches <= steps.now_s / 3.0


def test_the_first_step_alone_decides_nothing() -> None:
    assert Adaptive().observe(Observation(1_000.0, 0.0, 0, 500, 400, 100)) is None
