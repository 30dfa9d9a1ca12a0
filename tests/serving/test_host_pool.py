"""The book of host blocks: what is held is right, nothing is held twice, and everything comes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.swap import HostPool

SIZES = (4, 8)
WINDOW = 10


def out(pool: HostPool, request_id: str, num_blocks: int, num_tokens: int, first_device_block: int = 100) -> Any:
    """Swaps out a request with one group of blocks of four tokens."""
    return pool.plan_out(request_id, [range(first_device_block, first_device_block + num_blocks)], num_tokens, [4])


def test_what_goes_out_comes_in_from_the_same_blocks() -> None:
    pool = HostPool(8)
    saved = dict(out(pool, "a", 3, 10))
    assert saved.keys() == {100, 101, 102}
    assert pool.num_valid("a") == 10
    pool.end_step()
    loaded = pool.plan_in("a", 4, 10, [[7, 8, 9]])
    assert loaded == [(saved[101], 8), (saved[102], 9)]


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    pool = HostPool(4)
    out(pool, "a", 3, 12)
    assert out(pool, "b", 2, 8) is None
    assert pool.num_valid("b") == 0
    assert pool.num_free == 1
    pool.check()


def test_a_second_preemption_copies_only_what_is_new() -> None:
    pool = HostPool(8)
    first = dict(out(pool, "a", 3, 10))
    pool.end_step()
    pool.plan_in("a", 0, 10, [[1, 2, 3]])
    pool.end_step()
    assert out(pool, "a", 3, 10) == []
    assert out(pool, "a", 4, 13) == [(102, first[102]), (103, 3)]
    assert pool.num_valid("a") == 13


def full_of_clean_copies(back: str) -> HostPool:
    """A pool of six blocks with a copy of `a` and one of `b`, both of them back on the device in this order."""
    pool = HostPool(6)
    for request_id in "ab":
        out(pool, request_id, 3, 12)
    pool.end_step()
    for request_id in back:
        pool.plan_in(request_id, 0, 12, [[1, 2, 3]])
    pool.end_step()
    return pool


def test_a_copy_that_is_kept_makes_no_room() -> None:
    pool = full_of_clean_copies(back="ab")
    pool.kept = {"a"}
    assert pool.num_available == 3
    assert out(pool, "c", 4, 16) is None
    assert out(pool, "d", 3, 12) is not None
    assert (pool.num_valid("a"), pool.num_valid("b")) == (12, 0)
    pool.check()


def test_clean_copies_make_room_oldest_first() -> None:
    pool = full_of_clean_copies(back="ba")
    assert pool.num_free == 0
    assert pool.num_available == 6
    assert len(out(pool, "c", 2, 8)) == 2
    assert (pool.num_valid("a"), pool.num_valid("b")) == (12, 0)


def test_blocks_of_a_planned_copy_are_not_handed_out_in_the_same_step() -> None:
    pool = HostPool(3)
    out(pool, "a", 3, 12)
    pool.end_step()
    pool.plan_in("a", 0, 12, [[1, 2, 3]])
    pool.drop("a")
    assert out(pool, "b", 1, 4) is None
    pool.end_step()
    assert len(out(pool, "b", 3, 12)) == 3


def test_a_request_loaded_in_this_step_cannot_be_saved_in_it() -> None:
    pool = HostPool(8)
    out(pool, "a", 2, 8)
    pool.end_step()
    pool.plan_in("a", 0, 8, [[1, 2]])
    assert out(pool, "a", 3, 12) is None
    assert pool.num_valid("a") == 8
    pool.end_step()
    assert len(out(pool, "a", 3, 12)) == 1


def test_a_refused_preemption_keeps_the_older_copy_for_good() -> None:
    pool = HostPool(4)
    out(pool, "a", 2, 8)
    pool.end_step()
    pool.plan_in("a", 0, 8, [[1, 2]])
    pool.end_step()
    assert out(pool, "a", 6, 24) is None
    assert pool.num_valid("a") == 8
    assert out(pool, "b", 3, 12) is None  # the only copy of "a" is not given up


def test_a_changed_prompt_keeps_the_block_that_is_partly_right() -> None:
    pool = HostPool(8)
    saved = dict(out(pool, "a", 3, 12))
    pool.truncate("a", 6)
    pool.check()
    assert pool.num_valid("a") == 6
    assert pool.covers("a", [0], 6)
    assert not pool.covers("a", [0], 7)
    pool.end_step()
    assert out(pool, "a", 3, 12) == [(101, saved[101]), (102, pool.num_blocks - 5)]


def test_a_window_that_moved_on_needs_only_its_own_blocks() -> None:
    pool = HostPool(8)
    pool.plan_out("a", [[1, 2, 3, 4], [None, None, 7, 8]], 16, [4, 4])
    assert pool.num_free == 2
    assert pool.covers("a", [0, 8], 16)
    assert not pool.covers("a", [0, 4], 16)
    pool.truncate("a", 9)
    assert pool.covers("a", [0, 8], 9)
    assert not pool.covers("a", [0, 0], 9)
    pool.check()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        HostPool(0)


class HostPoolMachine(RuleBasedStateMachine):
    """Requests with two groups, one of them with a sliding window, against memory that is copied step by step.

    Every token has a version, which a change of the prompt renews. What a block contains is the versions of its
    tokens; a load must bring those that its request had when the load was planned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(14)
        self.versions: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # tokens of the requests that are on the device
        self.copies: dict[str, set[tuple[int, int]]] = {}  # group and index of the blocks that must be held
        self.host: dict[int, list[int]] = {}
        self.outs: list[tuple[int, list[int]]] = []
        self.ins: list[tuple[int, list[int], str]] = []
        self.num_versions = 0

    def _block(self, request_id: str, block: tuple[int, int], num_tokens: int) -> list[int]:
        group, index = block
        size = SIZES[group]
        return self.versions[request_id][index * size : min(num_tokens, (index + 1) * size)]

    def _tables(self, num_tokens: int) -> list[list[Any]]:
        """Blocks on the device, each standing for itself, and None for those that left the window."""
        tables: list[list[Any]] = []
        for group, size in enumerate(SIZES):
            first = _window_start(num_tokens) // size if group else 0
            tables.append([None if index < first else (group, index) for index in range(-(-num_tokens // size))])
        return tables

    def _renew(self, request_id: str, first: int, count: int) -> None:
        new = range(self.num_versions, self.num_versions + count)
        self.versions[request_id][first : first + count] = new
        self.num_versions += count

    def _pick(self, data: Any, request_ids: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(request_ids))))

    @rule(request_id=st.sampled_from("abc"), num_tokens=st.integers(1, 40))
    def compute(self, request_id: str, num_tokens: int) -> None:
        known = len(self.versions.setdefault(request_id, []))
        if request_id in self.computed or not known:
            self._renew(request_id, known, max(0, num_tokens - known))
            self.computed[request_id] = max(num_tokens, self.computed.get(request_id, 0))

    @precondition(lambda self: any(self.computed.values()))
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        request_id = self._pick(data, [name for name, count in self.computed.items() if count])
        num_tokens, valid = self.computed.pop(request_id), self.pool.num_valid(request_id)
        tables = self._tables(num_tokens)
        wanted = {block for table in tables for block in table if block is not None}
        held = self.copies.get(request_id, set()) if valid else set()
        pairs: Any = self.pool.plan_out(request_id, tables, num_tokens, SIZES)
        if pairs is None:
            is_loading = any(loading == request_id for _, _, loading in self.ins)
            assert is_loading or len(wanted - held) > self.pool.num_available
            assert self.pool.num_valid(request_id) == valid
            return
        stale = {block for block in wanted & held if valid < min(num_tokens, (block[1] + 1) * SIZES[block[0]])}
        assert {block for block, _ in pairs} == (wanted - held) | stale
        assert self.pool.num_valid(request_id) == num_tokens
        self.copies[request_id] = wanted
        self.outs += [(host, self._block(request_id, block, num_tokens)) for block, host in pairs]

    @precondition(lambda self: self.versions.keys() - self.computed.keys())
    @rule(data=st.data(), is_shorter=st.booleans(), is_cached=st.booleans())
    def resume(self, data: Any, is_shorter: bool, is_cached: bool) -> None:
        request_id = self._pick(data, self.versions.keys() - self.computed.keys())
        valid = self.pool.num_valid(request_id)
        stop = valid - (is_shorter and valid > 1)
        start = 8 if is_cached and stop > 8 else 0
        needed = {
            (group, index)
            for group, size in enumerate(SIZES)
            for index in range(max(start, group * _window_start(stop)) // size, -(-stop // size))
        }
        starts = [start, max(start, _window_start(stop))]
        covered = valid > 0 and needed <= self.copies[request_id]
        assert self.pool.covers(request_id, starts, stop) == covered
        if valid and not covered:
            start = stop = 0
        pairs: Any = self.pool.plan_in(request_id, start, stop, self._tables(stop)) if valid else []
        assert {block for _, block in pairs} == (needed if covered else set())
        self.ins += [(host, self._block(request_id, block, stop), request_id) for host, block in pairs]
        self.computed[request_id] = stop

    @precondition(lambda self: self.versions)
    @rule(data=st.data(), keep=st.integers(0, 40))
    def replace(self, data: Any, keep: int) -> None:
        request_id = self._pick(data, self.versions)
        keep = min(keep, len(self.versions[request_id]))
        self._renew(request_id, keep, len(self.versions[request_id]) - keep)
        valid = self.pool.num_valid(request_id)
        self.pool.truncate(request_id, keep)
        assert self.pool.num_valid(request_id) == min(valid, keep)
        held = self.copies.get(request_id, set())
        self.copies[request_id] = {block for block in held if block[1] * SIZES[block[0]] < keep}
        if request_id in self.computed:
            self.computed[request_id] = min(self.computed[request_id], keep)

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        request_id = self._pick(data, self.versions)
        self.pool.drop(request_id)
        del self.versions[request_id]
        self.computed.pop(request_id, None)

    @rule()
    def run_step(self) -> None:
        hosts = [host for host, _ in self.outs]
        assert len(hosts) == len(set(hosts)), "two copies of one step write the same host block"
        self.host.update(self.outs)
        for host, wanted, request_id in self.ins:
            assert self.host[host][: len(wanted)] == wanted, f"{request_id} is given other tokens' KV"
        self.outs, self.ins = [], []
        self.pool.end_step()

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.versions or self.pool.is_empty
        for request_id, versions in self.versions.items():
            assert self.pool.num_valid(request_id) <= len(versions)

    def teardown(self) -> None:
        self.pool.clear()
        self.pool.end_step()
        assert self.pool.num_free == self.pool.num_blocks


def _window_start(num_tokens: int) -> int:
    return max(0, num_tokens - WINDOW + 1)


TestHostPoolMachine = HostPoolMachine.TestCase
TestHostPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
