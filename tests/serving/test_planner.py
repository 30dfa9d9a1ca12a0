"""Planning a step: what it gives, what it takes, and that it changes nothing. The KV cache is made up."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stream2llm_sdk.serving.fair_share import BlockShares, FairShare
from stream2llm_sdk.serving.kv_blocks import CacheHit
from stream2llm_sdk.serving.planner import Candidate, Limits, Plan, Planner
from stream2llm_sdk.serving.victims import IdleFirst

BLOCK_SIZE = 4
NO_HIT = CacheHit((), 0)


@dataclass
class Blocks:
    """Blocks of 4 tokens. Each request holds blocks of its own (`held`) and blocks that it shares (`shared`)."""

    num_free: int
    held: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    no_hit: CacheHit = NO_HIT

    def cache_hit(self, request: Any) -> CacheHit:
        return CacheHit((), self.hits.get(request.request_id, 0))

    @property
    def plain_tables(self) -> tuple[dict[str, range], int]:
        names = self.held.keys() | self.shared.keys()
        return {name: range(self.held.get(name, 0) + self.shared.get(name, 0)) for name in names}, BLOCK_SIZE

    def num_needed(self, request: Any, num_computed: int, num_new: int, hit: CacheHit, lookahead: int = 0) -> int:
        has = self.held.get(request.request_id, 0) + self.shared.get(request.request_id, 0)
        has += hit.num_tokens // BLOCK_SIZE
        return max(0, -(-(num_computed + num_new + lookahead) // BLOCK_SIZE) - has)

    def num_reclaimable(self, request_id: str) -> int:
        return self.held.get(request_id, 0)


def candidate(name: str, rank: int, num_wanted: int, *, num_computed: int = 0, **changes: Any) -> Candidate:
    """A waiting request that is ready; one with computed tokens may lose its blocks."""
    is_evictable = changes.pop("is_evictable", num_computed > 0)
    request: Any = SimpleNamespace(
        request_id=name,
        num_computed_tokens=num_computed,
        num_prompt_tokens=changes.pop("num_prompt_tokens", num_computed + num_wanted),
        is_evictable=is_evictable,
    )
    values: dict[str, Any] = {
        "num_held_back": 0,
        "is_running": False,
        "is_ready": True,
        "needs_slot": not changes.get("is_running", False),
        "frees_slot": changes.get("is_running", False),
        "takes_one": changes.get("is_running", False) and changes.get("is_ready", True) and num_wanted == 1,
        **changes,
    }
    return Candidate(request, (rank,), num_wanted, **values)


def idle(name: str, rank: int, num_computed: int, **changes: Any) -> Candidate:
    return candidate(name, rank, 0, num_computed=num_computed, is_ready=False, is_idle=True, **changes)


def plan(candidates: list[Candidate], blocks: Blocks, **changes: Any) -> Plan:
    limits = {
        "num_tokens": 100,
        "num_tokens_per_prefill": 0,
        "num_slots": 8,
        "num_running": sum(candidate.is_running for candidate in candidates),
        "watermark_blocks": 0,
        "lookahead_tokens": 0,
        **changes,
    }
    return plan_of(candidates, blocks, Limits(**limits))


def plan_of(candidates: list[Candidate], blocks: Blocks, limits: Limits) -> Plan:
    planner: Any = Planner
    made: Plan = planner(blocks, IdleFirst()).plan(
        sorted((c for c in candidates if not c.is_idle), key=lambda c: c.key),
        lambda: [c for c in candidates if c.request.is_evictable],
        limits,
    )
    return made


def names(requests: list[Any]) -> list[str]:
    return [request.request_id for request in requests]


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_open_prompts_get_their_part_of_the_budget_only() -> None:
    open_ones = [candidate(name, rank, 30, num_held_back=1) for rank, name in ((1, "open"), (3, "also open"))]
    made = plan(open_ones, Blocks(90), num_tokens=100, num_open_tokens=40)
    assert made.num_tokens == {"open": 30, "also open": 10}
    assert made.trimmed == {"also open"}
    assert plan(open_ones, Blocks(90), num_tokens=100).num_tokens == {"open": 30, "also open": 30}


def test_open_prompts_get_nothing_where_a_complete_one_ends_its_prefill() -> None:
    """It would wait for theirs. Where they were put off often enough, they get what is left."""
    ends, other = candidate("ends", 1, 50), candidate("open", 2, 30, num_held_back=1)
    made = plan([ends, other], Blocks(90), num_open_tokens=40, defers_open=True)
    assert (made.num_tokens, made.defers_open) == ({"ends": 50}, True)
    made = plan([ends, other], Blocks(90), num_open_tokens=40)
    assert (made.num_tokens, made.defers_open) == ({"ends": 50, "open": 30}, False)


def test_open_prompts_get_their_part_beside_what_decodes_or_goes_on_with_its_prefill() -> None:
    other = candidate("open", 2, 30, num_held_back=1)
    decodes = candidate("decodes", 1, 1, num_computed=70, num_prompt_tokens=60, is_running=True)
    speculates = candidate("speculates", 1, 5, num_computed=70, num_prompt_tokens=60, is_running=True)
    long = candidate("long", 1, 50)
    held = {"decodes": 20, "speculates": 20}
    for beside, limits, num_granted in (
        (decodes, {}, 1),
        (speculates, {}, 5),
        (long, {"num_tokens_per_prefill": 25}, 25),
    ):
        made = plan([beside, other], Blocks(90, held=held), num_open_tokens=20, defers_open=True, **limits)
        assert made.num_tokens == {beside.request.request_id: num_granted, "open": 20}


def test_tokens_go_by_rank_until_the_budget_is_spent() -> None:
    made = plan([candidate("c", 3, 30), candidate("a", 1, 30), candidate("b", 2, 30)], Blocks(90), num_tokens=50)
    assert list(made.num_tokens.items()) == [("a", 30), ("b", 20)]
    assert made.trimmed == {"b"}


def test_equal_ranks_keep_the_order_they_come_in() -> None:
    made = plan([candidate("b", 1, 30), candidate("a", 1, 30)], Blocks(90), num_tokens=50)
    assert list(made.num_tokens) == ["b", "a"]


def test_a_long_prefill_is_cut() -> None:
    made = plan([candidate("a", 1, 30), candidate("b", 2, 5)], Blocks(90), num_tokens_per_prefill=10)
    assert made.num_tokens == {"a": 10, "b": 5}
    assert made.trimmed == {"a"}


def test_what_is_not_ready_gets_nothing() -> None:
    assert plan([candidate("a", 1, 30, is_ready=False)], Blocks(90)).num_tokens == {}


def test_tokens_in_the_prefix_cache_are_not_computed() -> None:
    blocks = Blocks(90, hits={"new": 8, "running": 8, "resumed": 8})
    made = plan(
        [
            candidate("new", 1, 30),
            candidate("running", 2, 30, is_running=True),
            candidate("resumed", 3, 30, num_computed=4),
        ],
        blocks,
    )
    assert made.num_tokens == {"new": 22, "running": 30, "resumed": 30}, "only who holds nothing looks there"


def test_an_open_prompt_that_the_cache_holds_has_nothing_to_compute() -> None:
    made = plan(
        [candidate("open", 1, 8, num_held_back=1), candidate("complete", 2, 9)],
        Blocks(9, hits={"open": 8, "complete": 8}),
    )
    assert names(made.nothing_to_compute) == ["open"]
    assert made.num_tokens == {"complete": 1}


def test_a_limit_binds_who_got_less_than_it_wanted_and_who_got_nothing() -> None:
    made = Plan(num_tokens={"whole": 5, "part": 5}, trimmed={"part"})
    assert [made.limit(name, 9) for name in ("whole", "part", "other")] == [9, 5, 0]
    assert made.limit("part", 3) == 3


# ---- blocks -------------------------------------------------------------------------------------------------------


def test_who_lacks_blocks_gets_as_many_tokens_as_there_are_blocks_for() -> None:
    made = plan([candidate("a", 1, 30, num_computed=2, is_evictable=False)], Blocks(3, held={"a": 1}))
    assert made.num_tokens == {"a": 14}
    assert made.trimmed == {"a"}


def test_idle_holders_pay_first_then_the_last_in_order() -> None:
    blocks = Blocks(0, held={"idle": 2, "b": 2, "c": 2})
    holders = [
        idle("idle", 1, 8),
        candidate("b", 3, 4, num_computed=8, is_running=True),
        candidate("c", 4, 4, num_computed=8, is_running=True),
    ]
    assert names(plan([*holders, candidate("a", 2, 8)], blocks, num_tokens=8).victims) == ["idle"]
    assert names(plan([*holders, candidate("a", 2, 12)], blocks, num_tokens=12).victims) == ["idle", "c"]


def test_nobody_takes_from_who_comes_before_it_or_is_served() -> None:
    blocks = Blocks(2, held={"first": 2})
    made = plan([candidate("first", 1, 8, num_computed=8, is_running=True), candidate("second", 2, 8)], blocks)
    assert made.num_tokens == {"first": 8}
    assert made.victims == []


def test_blocks_that_others_use_too_are_no_gain() -> None:
    blocks = Blocks(0, held={"own": 1}, shared={"shared": 3})
    made = plan([candidate("a", 1, 4), idle("shared", 2, 12), idle("own", 3, 4)], blocks)
    assert names(made.victims) == ["own"]


def test_who_cannot_be_evicted_keeps_its_blocks() -> None:
    blocks = Blocks(0, held={"b": 3})
    made = plan([candidate("a", 1, 4), idle("b", 2, 12, is_evictable=False)], blocks)
    assert (made.num_tokens, made.victims) == ({}, [])


def test_a_victim_is_not_served_in_the_same_step() -> None:
    blocks = Blocks(0, held={"b": 4})
    made = plan([candidate("a", 1, 4), candidate("b", 2, 4, num_computed=16, is_running=True)], blocks)
    assert made.num_tokens == {"a": 4}
    assert names(made.victims) == ["b"]


def test_what_eviction_leaves_over_serves_the_next() -> None:
    blocks = Blocks(0, held={"idle": 5})
    made = plan([candidate("a", 1, 8), candidate("b", 2, 12), idle("idle", 3, 20)], blocks)
    assert made.num_tokens == {"a": 8, "b": 12}


def test_the_watermark_stays_free_when_a_request_is_admitted_beside_others() -> None:
    running, waiting = candidate("running", 1, 4, is_running=True), candidate("waiting", 2, 40)
    first = candidate("first", 1, 4)
    assert plan([waiting], Blocks(8), watermark_blocks=3).num_tokens == {"waiting": 32}
    assert plan([running, waiting], Blocks(9), watermark_blocks=3).num_tokens == {"running": 4, "waiting": 20}
    assert plan([first, waiting], Blocks(9), watermark_blocks=3).num_tokens == {"first": 4, "waiting": 20}
    assert plan([running], Blocks(1), watermark_blocks=3).num_tokens == {"running": 4}
    later = candidate("running", 3, 20, is_running=True)
    assert plan([waiting, later], Blocks(13), watermark_blocks=3).num_tokens == {"waiting": 40}
    assert plan([waiting, later], Blocks(14), watermark_blocks=3).num_tokens == {"waiting": 40, "running": 4}


def test_lookahead_slots_need_blocks_too() -> None:
    assert plan([candidate("a", 1, 8)], Blocks(2), lookahead_tokens=1).num_tokens == {"a": 7}


# ---- tenants ------------------------------------------------------------------------------------------------------


def block_shares(held: dict[str, int], first: str | None = None, num_blocks: int = 20) -> BlockShares:
    """Two tenants, each with a half."""
    shares = FairShare()
    for tenant in ("many", "one"):
        shares.joined(tenant)
    return BlockShares(shares, num_blocks, lambda: held, first)


def test_a_tenant_within_its_share_takes_from_one_beyond_it_whatever_the_order() -> None:
    blocks = Blocks(0, held={"m1": 8, "m2": 8, "o1": 2})
    many = [candidate(f"m{i}", i, 0, num_computed=32, is_running=True, tenant="many") for i in (1, 2)]
    one = candidate("o1", 9, 8, num_computed=8, is_running=True, tenant="one")
    made = plan([*many, one], blocks, num_tokens=8, shares=block_shares({"many": 16, "one": 2}, first="m1"))
    assert made.num_tokens == {"o1": 8}
    assert names(made.victims) == ["m2"], "never the first of all"


def test_a_tenant_beyond_its_share_takes_nothing_from_one_within_it() -> None:
    blocks = Blocks(1, held={"m1": 16, "idle": 4})
    served = candidate("served", 0, 4, tenant="one")
    many = candidate("m1", 1, 8, num_computed=64, is_running=True, tenant="many")
    other = idle("idle", 2, 16, tenant="one")
    made = plan([served, many, other], blocks, shares=block_shares({"many": 16, "one": 4}))
    assert (made.num_tokens, made.victims) == ({"served": 4}, [])
    made = plan([served, many, other], blocks, shares=block_shares({"many": 16, "one": 4}, first="m1"))
    assert made.num_tokens == {"served": 4, "m1": 8}, "but the first of all always gets on"
    assert plan([many, other], blocks, shares=block_shares({"many": 16, "one": 4})).num_tokens, "and so does anybody"


def test_a_holder_that_has_not_got_further_since_it_lost_its_kv_is_spared() -> None:
    blocks = Blocks(1, held={"guarded": 3})
    guarded = candidate("guarded", 5, 4, num_computed=12, is_running=True, is_guarded=True)
    served, waiting = candidate("served", 1, 4), candidate("waiting", 2, 8)
    assert plan([served, waiting, guarded], blocks).victims == []
    made = plan([waiting, guarded], Blocks(0, held={"guarded": 3}))
    assert names(made.victims) == ["guarded"], "where nobody would be served otherwise it is taken"
    assert made.num_tokens == {"waiting": 8}


# ---- slots --------------------------------------------------------------------------------------------------------


def test_without_a_slot_only_an_idle_stream_makes_room() -> None:
    busy = candidate("busy", 2, 4, num_computed=8, is_running=True)
    resident, parked = idle("resident", 3, 8, frees_slot=True), idle("parked", 4, 8)
    blocks = Blocks(20, held={"busy": 2, "resident": 2, "parked": 2})
    assert names(plan([candidate("a", 1, 4), busy, parked], blocks, num_slots=0).victims) == []
    made = plan([candidate("a", 1, 4), candidate("b", 1, 4), busy, parked, resident], blocks, num_slots=0)
    assert list(made.num_tokens) == ["a", "busy"], "one slot, one new request"
    assert names(made.victims) == ["resident"]


def test_a_slot_is_not_taken_for_a_request_that_gets_no_blocks() -> None:
    blocks = Blocks(0, held={"busy": 2}, shared={"resident": 2})
    busy = candidate("busy", 1, 4, num_computed=4, is_running=True)
    made = plan([busy, candidate("a", 2, 4), idle("resident", 3, 8, frees_slot=True)], blocks, num_slots=0)
    assert made.num_tokens == {"busy": 4}
    assert made.victims == []


def test_who_waits_for_the_place_of_one_that_waits_for_its_memory_gets_it() -> None:
    """Otherwise both would wait for ever."""
    blocks = Blocks(0, held={"stream": 4, "running": 2})
    stream = candidate("stream", 1, 4, num_computed=16)
    running = candidate("running", 2, 4, num_computed=8, is_running=True)
    made = plan([stream, running], blocks, num_slots=0)
    assert made.is_forced
    assert made.num_tokens == {"stream": 4}
    assert names(made.victims) == ["running"]
    assert not plan([stream, running], Blocks(1, held=blocks.held), num_slots=0).is_forced, "running gets on by itself"


# ---- what holds of every plan -------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], Blocks, Limits]:
    """Requests of every kind in a small pool."""
    blocks = Blocks(num_free=draw(st.integers(0, 6)))
    candidates = []
    for index in range(draw(st.integers(1, 7))):
        name, kind = f"r{index}", draw(st.sampled_from(["new", "waiting", "running", "idle"]))
        num_computed = 0 if kind == "new" else draw(st.integers(0 if kind == "idle" else 1, 20))
        num_blocks = -(-num_computed // BLOCK_SIZE)
        blocks.shared[name] = draw(st.integers(0, num_blocks))
        blocks.held[name] = num_blocks - blocks.shared[name]
        is_open = kind == "idle" or draw(st.booleans())
        num_wanted = 0 if kind == "idle" else draw(st.integers(1, 20))
        if kind == "new":
            blocks.hits[name] = draw(st.integers(0, num_wanted // BLOCK_SIZE)) * BLOCK_SIZE
            if not is_open and blocks.hits[name] == num_wanted:
                num_wanted += 1  # vLLM never takes the last token from the cache
        resident = num_computed > 0 and draw(st.booleans())
        candidates.append(
            candidate(
                name,
                draw(st.integers(0, 3)) * 10 + index,
                num_wanted,
                num_computed=num_computed,
                num_held_back=int(is_open),
                is_running=kind == "running",
                is_ready=kind != "idle" and draw(st.integers(0, 5)) > 0,
                is_evictable=num_computed > 0 and draw(st.integers(0, 5)) > 0,
                needs_slot=kind != "running" and not resident,
                frees_slot=kind == "running" or resident,
                is_idle=kind == "idle",
            )
        )
    limits = Limits(
        num_tokens=draw(st.integers(1, 40)),
        num_tokens_per_prefill=draw(st.sampled_from([0, 0, 6])),
        num_slots=draw(st.integers(0, 3)),
        num_running=sum(c.is_running for c in candidates),
        watermark_blocks=draw(st.sampled_from([0, 0, 2])),
        lookahead_tokens=draw(st.sampled_from([0, 0, 2])),
    )
    return candidates, blocks, limits


def made_plan(situation: tuple[list[Candidate], Blocks, Limits]) -> tuple[Plan, dict[str, Candidate]]:
    candidates, blocks, limits = situation
    return plan_of(candidates, blocks, limits), {c.request.request_id: c for c in candidates}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(situations())
def test_a_plan_stays_within_tokens_blocks_and_slots(situation: tuple[list[Candidate], Blocks, Limits]) -> None:
    _, blocks, limits = situation
    made, by_name = made_plan(situation)
    served, victims = [by_name[name] for name in made.num_tokens], [by_name[name] for name in names(made.victims)]
    assert sum(made.num_tokens.values()) <= limits.num_tokens
    assert all(made.num_tokens[c.request.request_id] >= 1 for c in served)
    if limits.num_tokens_per_prefill:
        assert max(made.num_tokens.values(), default=0) <= limits.num_tokens_per_prefill
    needed = 0
    for c in served:
        hit = blocks.cache_hit(c.request) if c.request.num_computed_tokens == 0 and not c.is_running else NO_HIT
        num_computed = c.request.num_computed_tokens + hit.num_tokens
        num_new = made.num_tokens[c.request.request_id]
        needed += blocks.num_needed(c.request, num_computed, num_new, hit, limits.lookahead_tokens)
        assert num_new <= c.num_wanted - hit.num_tokens
        assert (num_new < c.num_wanted - hit.num_tokens) == (c.request.request_id in made.trimmed)
    reclaimed = sum(blocks.num_reclaimable(c.request.request_id) for c in victims)
    assert needed <= blocks.num_free + reclaimed
    assert sum(c.needs_slot for c in served) <= limits.num_slots + sum(c.frees_slot for c in victims)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(situations())
def test_a_plan_takes_only_from_whom_it_may(situation: tuple[list[Candidate], Blocks, Limits]) -> None:
    made, by_name = made_plan(situation)
    victims = names(made.victims)
    assert len(set(victims)) == len(victims)
    assert made.num_tokens.keys().isdisjoint(victims)
    assert not victims or made.num_tokens, "nobody loses anything for nothing"
    for victim in map(by_name.get, victims):
        assert victim is not None
        assert victim.request.is_evictable
        assert made.is_forced or victim.is_idle or any(victim.key > by_name[name].key for name in made.num_tokens)
    for name in made.num_tokens:
        assert by_name[name].is_ready
    assert all(request.num_computed_tokens == 0 for request in made.nothing_to_compute)
    assert made.num_tokens.keys().isdisjoint(names(made.nothing_to_compute))
    keys = [by_name[name].key for name in made.num_tokens]
    assert keys == sorted(keys)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(situations())
def test_who_is_first_always_gets_on(situation: tuple[list[Candidate], Blocks, Limits]) -> None:
    """If all others can be evicted, and the pool could hold it at all."""
    candidates, blocks, limits = situation
    first = min((c for c in candidates if c.is_ready), key=lambda c: c.key, default=None)
    if first is None or blocks.hits.get(first.request.request_id, 0) == first.num_wanted:
        return
    blocks.num_free = max(blocks.num_free, 6 if first.is_running else 6 + limits.watermark_blocks)
    for c in candidates:
        c.request.is_evictable = c is not first and c.request.num_computed_tokens > 0
    if first.needs_slot and limits.num_slots == 0 and not any(c.is_idle and c.frees_slot for c in candidates):
        return
    made, _ = made_plan((candidates, blocks, limits))
    assert next(iter(made.num_tokens)) == first.request.request_id


@settings(max_examples=100, deadline=None, derandomize=True)
@given(situations())
def test_planning_changes_nothing(situation: tuple[list[Candidate], Blocks, Limits]) -> None:
    candidates, blocks, _ = situation
    before = copy.deepcopy((candidates, blocks))
    made_plan(situation)
    for c in (*candidates, *before[0]):
        c.rank = 0
    assert (candidates, blocks) == before


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_the_short_way_for_those_that_decode_plans_what_the_long_way_does(
    requests: list[tuple[int, bool]], num_free: int, watermark_blocks: int, num_tokens: int
) -> None:
    candidates = [
        candidate(f"r{rank}", rank, 1 if decodes else 5, num_computed=num_computed, is_running=decodes)
        for rank, (num_computed, decodes) in enumerate(requests)
    ]
    held = {c.request.request_id: -(-c.request.num_computed_tokens // BLOCK_SIZE) for c in candidates}
    long_way = copy.deepcopy(candidates)
    for each in long_way:
        each.takes_one = False
    limits = {"num_tokens": num_tokens, "watermark_blocks": watermark_blocks}
    made, expected = (plan(each, Blocks(num_free, held), **limits) for each in (candidates, long_way))
    assert made.num_tokens == expected.num_tokens
    assert names(made.victims) == names(expected.victims)
    assert made.num_blocks_short == expected.num_blocks_short
