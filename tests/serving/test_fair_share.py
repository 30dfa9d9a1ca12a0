"""Tenants: counters, shares, and the order that they give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.fair_share import BlockShares, FairShare
from stream2llm_sdk.serving.look_ahead import fits_to_the_end
from stream2llm_sdk.serving.request_order import RequestOrder


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def names(entries: Any) -> list[str]:
    return [entry[1].request_id for entry in entries]


# ---- counters -----------------------------------------------------------------------------------------------------


def test_a_tenant_is_charged_by_its_weight() -> None:
    shares = FairShare({"paying": 4.0})
    for tenant in ("paying", "other"):
        shares.joined(tenant)
    for tenant in ("paying", "other"):
        shares.charge(tenant, 100)
    assert (shares.counter("paying"), shares.counter("other")) == (25.0, 100.0)
    assert (shares.share("paying"), shares.share("other")) == (0.8, 0.2)


def test_who_has_work_again_has_saved_nothing_up() -> None:
    shares = FairShare()
    for tenant in ("idle", "busy"):
        shares.joined(tenant)
        shares.has_work_again(tenant)
    for _ in range(10):
        shares.charge("busy", 100)
        shares.advance(100, ["busy"])
    shares.has_work_again("idle")
    assert shares.counter("idle") == shares.counter("busy") == 1_000.0


def test_those_who_wait_are_not_overtaken_by_newcomers_for_ever() -> None:
    shares = FairShare()
    shares.joined("waits")
    shares.charge("waits", 500)
    for index in range(20):
        newcomer = f"newcomer-{index}"
        shares.joined(newcomer)
        shares.has_work_again(newcomer)
        if shares.counter(newcomer) >= shares.counter("waits"):
            break
        shares.charge(newcomer, 100)
        shares.advance(100, ["waits", newcomer])
    assert index == 10, "500 tokens at half of 100 a turn"


def test_who_leaves_and_comes_back_does_not_get_rid_of_what_it_used() -> None:
    shares = FairShare()
    shares.joined("a")
    shares.joined("b")
    shares.charge("a", 500)
    shares.left("a")
    shares.joined("a")
    shares.has_work_again("a")
    assert (shares.counter("a"), shares.counter("b")) == (500.0, 0.0)


@pytest.mark.parametrize("weight", [0, -1, 1e-310, 10**400, float("inf"), float("nan"), True, "2"])
def test_a_weight_that_cannot_work_is_named(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match="tenant 'a'"):
        FairShare({"a": weight})


def test_blocks_beyond_the_share_are_too_many() -> None:
    shares = FairShare({"a": 3.0})
    shares.joined("a")
    shares.joined("b")
    blocks = BlockShares(shares, 100, lambda: {"a": 75, "b": 20}, "first")
    assert not blocks.is_over("a")
    assert blocks.is_over("a", 1)
    assert not blocks.is_over("b", 5)
    blocks.moved("b", 6)
    assert blocks.is_over("b")


# ---- the order ----------------------------------------------------------------------------------------------------


def test_tenants_take_turns_by_their_counters_and_pay_at_once() -> None:
    order, shares = RequestOrder(), FairShare()
    for tenant, count in (("many", 4), ("one", 1)):
        for index in range(count):
            shares.joined(tenant)
            order.put(request(f"{tenant}-{index}"), (index,), tenant)
    shares.charge("many", 10)
    served = {"one-0": 50, "many-0": 30}
    assert names(order.by_share(shares, lambda name: served.get(name, 0), lambda request: False)) == [
        "one-0",
        "many-0",
        "many-1",
        "many-2",
        "many-3",
    ]
    assert names(order) == ["many-0", "one-0", "many-1", "many-2", "many-3"]


def test_what_can_wait_comes_after_the_others_whoever_it_belongs_to() -> None:
    order, shares = RequestOrder(), FairShare()
    for tenant, kinds in (("used little", ("open", "open")), ("used much", ("complete", "open"))):
        for index, kind in enumerate(kinds):
            shares.joined(tenant)
            order.put(request(f"{tenant}, {kind} {index}"), (index,), tenant)
    shares.charge("used much", 1_000)
    assert names(order.by_share(shares, lambda name: 0, lambda request: "open" in request.request_id)) == [
        "used much, complete 0",
        "used little, open 0",
        "used little, open 1",
        "used much, open 1",
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5), st.sampled_from(["x", "y"]), st.booleans()),
        max_size=40,
    )
)
def test_an_order_is_always_sorted_whatever_happens_to_it(changes: list[tuple[str, int, str, bool]]) -> None:
    order, expected = RequestOrder(), dict[str, tuple[int, str]]()
    for name, key, tenant, removed in changes:
        if removed:
            order.discard(name)
            expected.pop(name, None)
        else:
            order.put(request(name), (key, name), tenant)
            expected[name] = key, name
    assert names(order) == sorted(expected, key=expected.__getitem__)
    assert len(order) == len(expected)
    assert all((name in order) == (name in expected) for name in "abcdefgh")


def test_of_equal_counters_the_one_whose_request_comes_first_goes_next() -> None:
    order, shares = RequestOrder(), FairShare()
    for key, tenant in ((2, "aaa"), (1, "zzz")):
        shares.joined(tenant)
        order.put(request(tenant), (key,), tenant)
    assert names(order.by_share(shares, lambda name: 0, lambda request: False)) == ["zzz", "aaa"]


# ---- the look-ahead -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=5), st.integers(0, 120))
def test_what_fits_to_the_end_is_what_a_run_to_the_end_never_exceeds(
    requests: list[tuple[int, int]], capacity: int
) -> None:
    peak = 0
    for step in range(1, 11):
        peak = max(peak, sum(now + step for now, to_come in requests if to_come >= step))
    assert fits_to_the_end(requests, capacity) == (peak <= capacity)


def test_counters_are_not_kept_of_those_who_are_gone() -> None:
    shares = FairShare()
    shares.joined("stays")
    for index in range(5_000):
        tenant = f"tenant-{index}"
        shares.joined(tenant)
        shares.charge(tenant, 5)
        shares.left(tenant)
        shares.charge("stays", 10)
    assert shares.num_tenants == 1
    assert len(shares._counters) < 2_000
