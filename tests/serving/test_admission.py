"""Admission: no limit is ever exceeded, a refusal changes nothing, and what was taken is given back once."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stream2llm_sdk.errors import (
    ConfigurationError,
    EngineBusyError,
    EngineError,
    PromptTooLongError,
    StreamError,
    StreamIdleError,
    UnknownRequestError,
)
from stream2llm_sdk.serving.admission import Admission, StreamLimits
from stream2llm_sdk.testing import FakeEngine


class Clock:
    """Moves by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(clock: Clock | None = None, /, **limits: Any) -> Admission:
    return Admission(StreamLimits(**limits), clock or Clock())


def taken(books: Admission) -> tuple[int, int, int]:
    snapshot = books.snapshot()
    return snapshot["num_open_streams"], snapshot["num_open_tokens"], snapshot["num_waiting"]


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_open_streams", 0),
        ("max_open_tokens", -1),
        ("max_open_streams_per_tenant", 1.5),
        ("max_open_tokens_per_tenant", True),
        ("max_waiting_requests", "8"),
        ("idle_timeout_s", 0),
        ("idle_timeout_s", float("nan")),
        ("idle_timeout_s", float("inf")),
        ("idle_timeout_s", True),
    ],
)
def test_a_limit_that_cannot_work_is_refused_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}={value!r}: give .*, or None for no limit"):
        StreamLimits(**{name: value})


def test_without_limits_everything_is_let_in() -> None:
    books = admission()
    for index in range(100):
        books.admit(f"s{index}", "a", 10**9)
        books.admit(f"r{index}", "a", 10**9, finished=True)
    assert taken(books) == (100, 10**11, 100)
    assert books.expired() == {}
    assert books.next_deadline() is None


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "limit", "num_tokens", "other_tenant_gets_in"),
    [
        ({"max_open_streams": 2}, "max_open_streams=2", 1, False),
        ({"max_open_tokens": 25}, "max_open_tokens=25", 10, False),
        ({"max_open_streams_per_tenant": 2}, "max_open_streams_per_tenant=2", 1, True),
        ({"max_open_tokens_per_tenant": 25}, "max_open_tokens_per_tenant=25", 10, True),
    ],
)
def test_a_full_engine_says_which_limit_and_to_try_again(
    limits: dict[str, int], limit: str, num_tokens: int, other_tenant_gets_in: bool
) -> None:
    books = admission(**limits)
    books.admit("s1", "a", 10)
    books.admit("s2", "a", 10)
    whose = " for tenant 'a'" if other_tenant_gets_in else ""
    words = rf"s3: the engine is full{whose}: (2|20) are taken of {limit}.*Try again"
    with pytest.raises(EngineBusyError, match=words) as caught:
        books.admit("s3", "a", num_tokens)
    assert (caught.value.limit, caught.value.tenant) == (limit.partition("=")[0], "a")
    assert "s3" not in books
    assert books.snapshot()["num_refused"] == {caught.value.limit: 1}
    if other_tenant_gets_in:
        books.admit("s3", "b", num_tokens)
    else:
        with pytest.raises(EngineBusyError):
            books.admit("s3", "b", num_tokens)
    books.release("s1")
    books.admit("s4", "a", num_tokens)


def test_at_the_limit_of_waiting_requests_nothing_comes_in_but_open_streams_may_finish() -> None:
    books = admission(max_waiting_requests=1)
    books.admit("open", "a", 10)
    books.admit("plain", "a", 10, finished=True)
    for finished in (True, False):
        with pytest.raises(EngineBusyError, match="max_waiting_requests=1"):
            books.admit("new", "b", 10, finished=finished)
    books.finished("open")
    assert taken(books) == (0, 0, 2)
    books.release("plain")
    with pytest.raises(EngineBusyError):
        books.admit("new", "b", 10)
    books.release("open")
    books.admit("new", "b", 10)


def test_growth_that_is_refused_leaves_the_stream_as_it_was() -> None:
    clock = Clock()
    books = admission(clock, max_open_tokens=30, idle_timeout_s=5)
    books.admit("s1", "a", 10)
    books.admit("s2", "b", 10)
    clock.now_s += 3
    with pytest.raises(EngineBusyError, match="20 are taken of max_open_tokens=30, and this needs 11 more"):
        books.resize("s1", 21)
    assert taken(books) == (2, 20, 0)
    books.resize("s1", 20)
    with pytest.raises(EngineBusyError):
        books.resize("s2", 11)
    clock.now_s += 2
    assert list(books.expired()) == ["s2"], "a chunk that was refused is no sign of life, one that was taken is"


def test_a_prompt_may_always_be_replaced_by_a_shorter_one() -> None:
    books = admission(max_open_tokens=10)
    books.admit("s1", "a", 10)
    books.resize("s1", 4)
    books.admit("s2", "a", 6)
    books.resize("s2", 0)
    assert taken(books) == (2, 4, 0)


@pytest.mark.parametrize("name", ["max_open_tokens", "max_open_tokens_per_tenant"])
def test_what_could_never_fit_is_not_told_to_try_again(name: str) -> None:
    books = admission(max_open_streams=1, **{name: 10})
    books.admit("s1", "a", 1)
    with pytest.raises(PromptTooLongError, match=rf"11 tokens is more than {name}=10"):
        books.admit("s2", "b", 11)
    with pytest.raises(PromptTooLongError, match="Send less, or raise the limit"):
        books.resize("s1", 11)
    assert taken(books) == (1, 1, 0)
    books.admit("plain", "a", 11, finished=True)


def test_a_name_is_admitted_once_and_an_unknown_one_cannot_grow() -> None:
    books = admission()
    books.admit("s1", "a", 3)
    with pytest.raises(ConfigurationError, match="'s1' is that of a live request"):
        books.admit("s1", "b", 4)
    books.release("s1")
    with pytest.raises(UnknownRequestError, match="s1"):
        books.resize("s1", 4)
    for unknown in (books.finished, books.touched, books.release):
        unknown("s1")
    assert taken(books) == (0, 0, 0)
    books.admit("s1", "b", 4)


def test_the_errors_are_in_the_tree_and_survive_pickling() -> None:
    assert issubclass(EngineBusyError, EngineError)
    assert issubclass(StreamIdleError, StreamError)
    error = EngineBusyError("full", limit="max_open_streams", tenant="a", retry_after_s=1.5)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.limit, copy.tenant, copy.retry_after_s) == ("full", "max_open_streams", "a", 1.5)


# ---- when to try again ----------------------------------------------------------------------------------------------


def refused(books: Admission, num_tokens: int = 1, *, tenant: str = "a", finished: bool = False) -> EngineBusyError:
    with pytest.raises(EngineBusyError) as caught:
        books.admit("refused", tenant, num_tokens, finished=finished)
    return caught.value


def test_the_hint_is_the_time_in_which_a_stream_ended_of_late() -> None:
    clock = Clock()
    books = admission(clock, max_open_streams=1)
    books.admit("s0", "a", 1)
    assert refused(books).retry_after_s is None
    for index in range(4):
        clock.now_s += 3
        books.finished(f"s{index}")
        books.admit(f"s{index + 1}", "b", 1)
    error = refused(books)
    assert error.retry_after_s == pytest.approx(3)
    assert "Try again in about 3.0 s" in str(error)
    clock.now_s += 9
    assert refused(books).retry_after_s == pytest.approx(6), "18 s for three that ended behind the first"
    clock.now_s += 600
    assert refused(books).retry_after_s is None, "what ended ten minutes ago tells nothing"
    assert "Try again later" in str(refused(books))


def test_the_hint_for_tokens_counts_the_tokens_that_are_missing() -> None:
    clock = Clock()
    books = admission(clock, max_open_tokens=100)
    for index in range(10):
        books.admit(f"s{index}", "a", 10)
    for index in range(3):
        clock.now_s += 1
        books.release(f"s{index}")
    assert refused(books, 60).retry_after_s == pytest.approx(3), "30 are missing, and 10 came free each second"


def test_a_tenants_hint_is_from_its_own_streams_and_waiting_requests_have_their_own() -> None:
    clock = Clock()
    books = admission(clock, max_open_streams_per_tenant=1, max_waiting_requests=3)
    books.admit("a", "a", 1)
    for index in range(3):
        books.admit(f"b{index}", "b", 1)
        clock.now_s += 2
        books.finished(f"b{index}")
        if index:
            books.release(f"b{index}")
    assert refused(books).retry_after_s is None
    books.admit("r1", "a", 1, finished=True)
    books.admit("r2", "a", 1, finished=True)
    assert refused(books, finished=True).retry_after_s == pytest.approx(2)
    clock.now_s += 1
    assert refused(books, finished=True).retry_after_s == pytest.approx(3), "none has ended since"


@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 50)), max_size=100),
    st.floats(0, 100),
)
def test_a_hint_is_a_time_to_come_or_none(ends: list[tuple[float, int]], pause_s: float) -> None:
    clock = Clock()
    books = admission(clock, max_open_tokens=50)
    for index, (gap_s, num_tokens) in enumerate(ends):
        books.admit(f"s{index}", "a", num_tokens)
        clock.now_s += gap_s
        books.release(f"s{index}")
    clock.now_s += pause_s
    books.admit("s", "b", 50)
    hint = refused(books).retry_after_s
    assert hint is None or 0 < hint <= 60


# ---- idle streams ---------------------------------------------------------------------------------------------------


def test_a_stream_that_nobody_feeds_expires_once_with_a_reason() -> None:
    clock = Clock()
    books = admission(clock, idle_timeout_s=10)
    books.admit("s1", "a", 1)
    books.admit("plain", "a", 1, finished=True)
    clock.now_s += 4
    books.admit("s2", "a", 1)
    assert books.next_deadline() == 110
    clock.now_s = 109.5
    assert books.expired() == {}
    clock.now_s = 110
    expired = books.expired()
    assert list(expired) == ["s1"]
    assert isinstance(expired["s1"], StreamIdleError)
    assert "s1: the stream was ended, because no chunk came for idle_timeout_s=10" in str(expired["s1"])
    assert books.expired() == {}
    assert books.next_deadline() == 114, "the next stream's; one that is being ended holds nobody up"
    assert "s1" in books, "until it is released"
    books.release("s1")
    assert taken(books) == (1, 1, 1)


def test_a_chunk_a_touch_and_the_end_of_the_prompt_keep_a_stream_alive() -> None:
    clock = Clock()
    books = admission(clock, idle_timeout_s=10)
    for name in ("chunk", "touch", "finished", "released", "idle"):
        books.admit(name, "a", 1)
    clock.now_s += 5
    books.resize("chunk", 2)
    books.touched("touch")
    books.finished("finished")
    books.touched("finished")
    books.release("released")
    clock.now_s += 5
    assert list(books.expired()) == ["idle"]
    clock.now_s += 5
    assert sorted(books.expired()) == ["chunk", "touch"]
    assert books.next_deadline() is None


# ---- the books ------------------------------------------------------------------------------------------------------

LIMITS = StreamLimits(
    max_open_streams=4,
    max_open_tokens=30,
    max_open_streams_per_tenant=3,
    max_open_tokens_per_tenant=20,
    max_waiting_requests=3,
    idle_timeout_s=10,
)
NUM_TOKENS = st.integers(0, 25)


class Books(RuleBasedStateMachine):
    """Any order of calls, against a list of requests that is counted anew after each."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.books = Admission(LIMITS, self.clock)
        self.live: dict[str, list[Any]] = {}
        self.last_chunk_s: dict[str, float] = {}
        self.num_made = 0
        self.num_refused = 0

    def open(self, tenant: str | None = None) -> list[list[Any]]:
        return [r for r in self.live.values() if r[2] and tenant in (None, r[0])]

    def has_room(self, tenant: str) -> bool:
        return len(self.open()) < 4 and len(self.open(tenant)) < 3

    def fits(self, tenant: str, num_tokens: int, growth: int) -> bool:
        all_, own = (sum(r[1] for r in self.open(whose)) for whose in (None, tenant))
        return growth <= 0 or (num_tokens <= 20 and all_ + growth <= 30 and own + growth <= 20)

    @rule(target=requests, tenant=st.sampled_from("abc"), num_tokens=NUM_TOKENS, finished=st.booleans())
    def admit(self, tenant: str, num_tokens: int, finished: bool) -> str:
        name = f"r{self.num_made}"
        self.num_made += 1
        can_open = self.has_room(tenant) and self.fits(tenant, num_tokens, num_tokens)
        expected = len(self.live) - len(self.open()) < 3 and (finished or can_open)
        if self.allowed(expected, lambda: self.books.admit(name, tenant, num_tokens, finished=finished)):
            self.live[name] = [tenant, num_tokens, not finished]
            if not finished:
                self.last_chunk_s[name] = self.clock.now_s
        return name

    def allowed(self, expected: bool, call: Any) -> bool:
        try:
            call()
        except PromptTooLongError:
            assert not expected
            return False
        except EngineBusyError:
            assert not expected
            self.num_refused += 1
            return False
        assert expected
        return True

    @rule(name=requests, num_tokens=NUM_TOKENS)
    def resize(self, name: str, num_tokens: int) -> None:
        if name not in self.live:
            with pytest.raises(UnknownRequestError):
                self.books.resize(name, num_tokens)
            return
        tenant, length, is_open = self.live[name]
        expected = not is_open or self.fits(tenant, num_tokens, num_tokens - length)
        if self.allowed(expected, lambda: self.books.resize(name, num_tokens)) and is_open:
            self.live[name][1] = num_tokens
            self.last_chunk_s[name] = self.clock.now_s

    @rule(name=requests)
    def finish(self, name: str) -> None:
        self.books.finished(name)
        if name in self.live:
            self.live[name][2] = False
        self.last_chunk_s.pop(name, None)

    @rule(name=consumes(requests), times=st.integers(1, 3))
    def release(self, name: str, times: int) -> None:
        for _ in range(times):
            self.books.release(name)
        self.live.pop(name, None)
        self.last_chunk_s.pop(name, None)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        late = {name for name, at_s in self.last_chunk_s.items() if at_s + 10 <= self.clock.now_s}
        assert set(self.books.expired()) == late
        for name in late:
            del self.last_chunk_s[name]

    @invariant()
    def the_books_are_those_of_the_live_requests(self) -> None:
        num_open = len(self.open())
        assert taken(self.books) == (num_open, sum(r[1] for r in self.open()), len(self.live) - num_open)
        assert all(name in self.books for name in self.live)
        assert sum(self.books.snapshot()["num_refused"].values()) == self.num_refused
        deadline_s = min(self.last_chunk_s.values(), default=None)
        assert self.books.next_deadline() == (None if deadline_s is None else deadline_s + 10)

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        num_open, num_tokens, num_waiting = taken(self.books)
        assert 0 <= num_open <= 4
        assert 0 <= num_tokens <= 30
        assert 0 <= num_waiting <= 3 + 4, "those that came in, and the streams that were open then"
        for tenant in "abc":
            assert len(self.open(tenant)) <= 3
            assert sum(r[1] for r in self.open(tenant)) <= 20

    def teardown(self) -> None:
        for name in list(self.live):
            self.books.release(name)
        assert taken(self.books) == (0, 0, 0)
        assert self.books.next_deadline() is None
        assert not self.books._open_by_tenant, "nothing is kept of tenants that have nothing open"
        for index in range(3):
            self.books.admit(f"again-{index}", "a", 6)


TestBooks = Books.TestCase


# ---- at the engine's door -----------------------------------------------------------------------------------------


async def test_a_full_engine_refuses_and_loses_nothing_that_is_open() -> None:
    async with FakeEngine(stream_limits=StreamLimits(max_open_streams=2, max_open_tokens=10)) as engine:
        stream = await engine.open([1, 2, 3], tenant="a")
        other = await engine.open([1] * 6, tenant="b")
        with pytest.raises(EngineBusyError, match="max_open_streams=2"):
            await engine.open([1], tenant="c")
        with pytest.raises(EngineBusyError, match="max_open_tokens=10"):
            await stream.append([4, 5])
        assert stream.num_tokens == 3
        assert (await stream.append([4])).num_tokens == 4
        await other.finish([5])
        assert (await stream.append([4] * 6)).num_tokens == 10
        await stream.finish([5])
        assert "".join([output.text async for output in stream])
    assert engine.admission.snapshot()["num_open_streams"] == 0


async def test_an_update_that_the_engine_refuses_gives_its_tokens_back() -> None:
    async with FakeEngine(max_model_len=20, stream_limits=StreamLimits(max_open_tokens=30)) as engine:
        stream = await engine.open([1, 2, 3])
        with pytest.raises(PromptTooLongError):
            await stream.append([4] * 40)
        assert engine.admission.snapshot()["num_open_tokens"] == 3
        await stream.abort()
        assert engine.admission.snapshot()["num_open_tokens"] == 0


async def test_a_stream_that_nobody_feeds_is_ended_with_a_reason() -> None:
    async with FakeEngine(stream_limits=StreamLimits(idle_timeout_s=1e-9)) as engine:
        stream = await engine.open([1, 2, 3])
        await engine.expire()
        assert engine.num_open_streams == 0
        for operation in (stream.append([4]), stream.finish()):
            with pytest.raises(StreamIdleError, match="idle_timeout_s"):
                await operation
        with pytest.raises(StreamIdleError):
            _ = [output async for output in stream]


async def test_who_reads_a_stream_that_nobody_feeds_is_told_why_it_ended() -> None:
    async with FakeEngine(stream_limits=StreamLimits(idle_timeout_s=1e-9)) as engine:
        stream = await engine.open([1, 2, 3])

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        await engine.expire()
        with pytest.raises(StreamIdleError):
            await reading


@pytest.mark.parametrize("what", ["append", "replace", "finish"])
async def test_a_chunk_that_is_on_its_way_is_a_sign_of_life(what: str) -> None:
    async with FakeEngine(stream_limits=StreamLimits(idle_timeout_s=0.05)) as engine:
        stream = await engine.open([1, 2, 3], mode="update")
        engine.pause()
        update = asyncio.create_task(getattr(stream, what)([4]))
        await asyncio.sleep(0.1)
        await engine.expire()
        engine.resume()
        await update
        assert engine.num_open_streams == 1
