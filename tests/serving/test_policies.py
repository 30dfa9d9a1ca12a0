"""Orders: whom a policy serves first, and who loses its blocks first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.lcp import token_array
from stream2llm_sdk.serving.policies import FCFS, POLICIES, DefaultVLLM, IdleFirst, SchedulingPolicy, make_policy
from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt


def prompt(*, is_open: bool) -> StreamingPrompt:
    flags = {"is_streaming_prompt": True, "is_streaming_prompt_finished": not is_open}
    return StreamingPrompt.from_flags(flags, token_array([1]), 0.0)


OPEN, FINISHED, PLAIN = prompt(is_open=True), prompt(is_open=False), None


def order(policy: SchedulingPolicy, *requests: tuple[str, StreamingPrompt | None, int, float, bool]) -> list[str]:
    """Names by rank, of `(name, prompt, priority, arrival, admitted)`."""

    def key(request: tuple[str, StreamingPrompt | None, int, float, bool]) -> Any:
        _, streaming, priority, arrival, admitted = request
        return policy.key(SimpleNamespace(priority=priority, arrival_time=arrival), streaming, admitted)

    return [request[0] for request in sorted(requests, key=key)]


def test_fcfs_serves_complete_requests_by_arrival_then_open_ones_by_arrival() -> None:
    assert order(
        FCFS(),
        ("open, late", OPEN, 0, 9.0, True),
        ("open, early", OPEN, 0, 1.0, True),
        ("plain, late", PLAIN, 0, 8.0, False),
        ("finished", FINISHED, 0, 2.0, False),
        ("plain, early", PLAIN, 0, 3.0, True),
    ) == ["finished", "plain, early", "plain, late", "open, early", "open, late"]


def test_fcfs_puts_priority_before_arrival_but_not_before_completeness() -> None:
    assert order(
        FCFS(),
        ("open, urgent", OPEN, 0, 1.0, True),
        ("plain", PLAIN, 5, 1.0, True),
        ("plain, urgent", PLAIN, 0, 9.0, False),
    ) == ["plain, urgent", "plain", "open, urgent"]


def test_vllms_order_keeps_what_is_admitted_in_front_and_does_not_look_at_arrival() -> None:
    assert order(
        DefaultVLLM(),
        ("waiting, urgent", PLAIN, 0, 1.0, False),
        ("admitted", OPEN, 5, 9.0, True),
        ("admitted, urgent", PLAIN, 1, 9.0, True),
        ("waiting", PLAIN, 3, 2.0, False),
        ("waiting too", PLAIN, 3, 1.0, False),
    ) == ["admitted, urgent", "admitted", "waiting, urgent", "waiting", "waiting too"]


def test_idle_streams_are_evicted_first_then_who_would_be_served_last() -> None:
    holders = [(0, False), (1, True), (2, False), (3, True), (4, False)]
    evicted = sorted(holders, key=lambda holder: IdleFirst().key(*holder))
    assert evicted == [(3, True), (1, True), (4, False), (2, False), (0, False)]


@pytest.mark.parametrize("name", ["FCFS", "fcfs", " Fcfs\n"])
def test_a_policy_is_found_by_its_name_in_any_case(name: str) -> None:
    assert isinstance(make_policy(name), FCFS)


def test_every_policy_has_the_name_it_is_found_by() -> None:
    assert {name: make_policy(name).name for name in POLICIES} == {name: name for name in POLICIES}


@pytest.mark.parametrize("name", ["", "FIFO"])
def test_an_unknown_policy_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'.*DEFAULT_VLLM, FCFS"):
        make_policy(name)
