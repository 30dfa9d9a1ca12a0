"""The kit itself: a retriever that keeps the rules passes, and for each check there are some that break just that."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace, SourceFailure, as_retriever
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.tasks import cancel_and_wait
from stream2llm_sdk.testing import CheckStatus, ConformanceError, ConformanceReport, ScriptedRetriever, check_retriever
from stream2llm_sdk.testing.cancel_at import CancelAt
from stream2llm_sdk.testing.conformance_checks import CHECKS

pytestmark = pytest.mark.slow

TEXTS = ("one", "two", "three")


class Good:
    """Reads its texts in a task of its own, a little ahead of the reader. `Bad` ones change one thing."""

    mode: Any = ContextMode.APPEND
    num_produced = 0

    def __init__(self, texts: Sequence[str] = TEXTS, *, fails_after: int | None = None) -> None:
        self.texts = texts
        self.fails_after = fails_after

    def stream(self, query: str) -> Any:
        return self.updates(query)

    async def updates(self, query: str) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue(2)
        reader = asyncio.create_task(self.produce(query, queue), name="reader")
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            await cancel_and_wait(reader)

    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        for number, text in enumerate(self.texts):
            if number == self.fails_after:
                await queue.put(RetrievalError("the source broke"))
                return
            await asyncio.sleep(0)
            type(self).num_produced += 1
            await queue.put(Append(Chunk(text)))
        await queue.put(RetrievalError("the source broke") if self.fails_after is not None else None)

    async def aclose(self) -> None:
        pass


async def check(kind: Callable[..., Any], **options: Any) -> ConformanceReport:
    options = {
        "failing_first": lambda: kind(fails_after=0),
        "failing_later": lambda: kind(fails_after=1),
        "over": kind,
        "produced": lambda: kind.num_produced,  # type: ignore[attr-defined]
        "max_read_ahead": 8,
        "timeout_s": 1.0,
        "settle_s": 0.1,
        **options,
    }
    return await check_retriever(kind, **options)


async def broken(kind: Callable[..., Any], *names: str, **options: Any) -> str:
    """The report of a retriever that must fail these checks and no others."""
    with pytest.raises(ConformanceError) as caught:
        await check(kind, **options)
    report = caught.value.report
    assert {outcome.name for outcome in report.failed} == set(names), str(report)
    return str(caught.value)


async def test_a_retriever_that_keeps_the_rules_passes_every_check() -> None:
    report = await check(Good)
    assert [outcome.name for outcome in report.outcomes] == ["streams", *CHECKS]
    assert {outcome.status for outcome in report.outcomes} == {CheckStatus.PASSED}, str(report)
    assert len(str(report).splitlines()) == 1 + len(report.outcomes)


async def test_what_is_not_given_or_not_wanted_is_skipped_with_a_word() -> None:
    report = await check_retriever(Good, skip=["repeat"], settle_s=0.1)
    skipped = {outcome.name: outcome.detail for outcome in report.outcomes if outcome.status is CheckStatus.SKIPPED}
    assert set(skipped) == {"repeat", "read_ahead", "failing_first", "failing_later", "empty", "odd_texts", "huge_text"}
    assert "over=" in skipped["odd_texts"]
    assert "skipped" in str(report)
    with pytest.raises(ConfigurationError, match=r"skip=repeet: .*repeat"):
        await check_retriever(Good, skip=["repeet"])
    with pytest.raises(ConfigurationError, match="skip='repeat'"):
        await check_retriever(Good, skip="repeat")


async def test_factories_may_be_coroutines_and_retrievers_contexts() -> None:
    lives: list[str] = []

    class InContext(Good):
        async def __aenter__(self) -> InContext:
            lives.append("in")
            return self

        async def aclose(self) -> None:
            lives.append("out")

    async def make() -> InContext:
        return InContext()

    await check_retriever(make, skip=[name for name in CHECKS if name != "repeat"])
    assert lives == ["in", "out"]


async def test_what_gives_something_else_each_time_can_be_checked_too() -> None:
    class Changing(Good):
        number = itertools.count()

        async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
            await queue.put(Append(Chunk(f"{next(self.number)}")))
            await queue.put(None)

    only = [name for name in CHECKS if name not in ("repeat", "concurrency")]
    await broken(Changing, "repeat", "concurrency", skip=only)
    report = await check(Changing, skip=only, repeatable=False)
    assert report["repeat"].status is CheckStatus.SKIPPED


# ---- streams ---------------------------------------------------------------------------------------------------------


class NoGenerator(Good):
    async def stream(self, query: str) -> Any:
        return [Append(Chunk("one"))]


class UnknownMode(Good):
    mode = "stream"


class WrongMode(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await queue.put(Replace(Chunk("one")))
        await queue.put(None)


class PlainText(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await queue.put("one")
        await queue.put(None)


class Nothing(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await queue.put(None)


class Panics(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await queue.put(BaseException("panic"))


class Hangs(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (NoGenerator, "returned coroutine: it must be an async generator"),
        (UnknownMode, "its mode is 'stream'"),
        (WrongMode, "its mode is 'append' and it yielded Replace"),
        (PlainText, "yielded str"),
        (Nothing, "gives no context"),
        (Panics, "BaseException: panic"),
        (Hangs, "did not end within 1 s"),
        (dict, "is no retriever"),
    ],
)
async def test_what_does_not_stream_is_not_checked_further(kind: Any, says: str) -> None:
    assert says in await broken(kind, "streams")


async def test_a_factory_that_fails_is_a_finding() -> None:
    def make() -> Good:
        raise OSError("no such index")

    with pytest.raises(ConformanceError, match="could not be made and opened: OSError: no such index"):
        await check_retriever(make)


# ---- one broken rule each --------------------------------------------------------------------------------------------


class Exhausted(Good):
    """Gives everything once."""

    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await super().produce(query, queue)
        if query.startswith("How"):
            self.texts = self.texts[:1]


class OneThatCannotBeClosed(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        for text in self.texts:
            try:
                yield Append(Chunk(text))
            except GeneratorExit:
                yield Append(Chunk("one more"))


class Iterator:
    def __init__(self, items: Any) -> None:
        self.items = items
        self.num_closed = 0

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        return await anext(self.items)

    async def aclose(self) -> None:
        self.num_closed += 1
        await self.items.aclose()


class ClosesOnce(Good):
    class Once(Iterator):
        async def aclose(self) -> None:
            await super().aclose()
            if self.num_closed > 1:
                raise RuntimeError("already closed")

    def stream(self, query: str) -> Any:
        return self.Once(self.updates(query))


class GoesOn(Good):
    class Endless(Iterator):
        async def __anext__(self) -> Any:
            return Append(Chunk("more")) if self.num_closed else await super().__anext__()

    def stream(self, query: str) -> Any:
        return self.Endless(self.updates(query))


class SwallowsCancellation(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        for text in self.texts:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
            yield Append(Chunk(text))


class RenamesCancellation(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        for text in self.texts:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                raise RetrievalError("interrupted") from None
            yield Append(Chunk(text))


class HangsOnCancellation(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        try:
            for text in self.texts:
                await asyncio.sleep(0.001)
                yield Append(Chunk(text))
        except asyncio.CancelledError:
            await asyncio.sleep(60)


class LeavesTaskOnCancellation(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        slow = asyncio.create_task(asyncio.sleep(0.2), name="forgotten")
        async for item in super().updates(query):
            yield item
        await cancel_and_wait(slow)


class DropsWhatIsNotFetched(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        for text in self.texts:
            for _ in range(3):
                await asyncio.sleep(0)
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(Append(Chunk(text)))
        await queue.put(None)


class ReadsAllAhead(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.create_task(self.produce(query, queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            await cancel_and_wait(reader)


class SharesState(Good):
    query = ""

    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        self.query = query
        await asyncio.sleep(0.001)
        await queue.put(Append(Chunk(self.query)))
        await queue.put(None)


class EncodesTheQuery(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        try:
            query.encode()
        except UnicodeEncodeError as error:
            await queue.put(error)
        await super().produce(query, queue)


class BreaksOnOddQuery(Good):
    is_broken = False

    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        self.is_broken |= not query.strip()
        if not query.strip() or self.is_broken:
            await queue.put(RetrievalError("no longer"))
        await super().produce(query, queue)


class Blocks(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        time.sleep(0.12)
        await super().produce(query, queue)


OWN_RULES: list[tuple[Any, str, str]] = [
    (Exhausted, "repeat", "2 chunks missing, such as two"),
    (OneThatCannotBeClosed, "early_close", "GeneratorExit"),
    (ClosesOnce, "early_close", "already closed"),
    (GoesOn, "early_close", "after aclose() it still yielded Append"),
    (SwallowsCancellation, "cancellation", "swallowed the cancellation and went on to its end"),
    (RenamesCancellation, "cancellation", "swallowed the cancellation and raised RetrievalError: interrupted"),
    (HangsOnCancellation, "cancellation", "did not end within 1 s"),
    (LeavesTaskOnCancellation, "cancellation", "left 1 x task forgotten behind"),
    (DropsWhatIsNotFetched, "slow_reader", "read slowly: "),
    (ReadsAllAhead, "read_ahead", "with one item read it had produced"),
    (SharesState, "concurrency", "8 streams at once: 1 chunks missing"),
    (EncodesTheQuery, "odd_queries", "a lone surrogate as query raised UnicodeEncodeError"),
    (BreaksOnOddQuery, "odd_queries", "after odd queries, it raised RetrievalError: no longer"),
    (Blocks, "stall", "it held the event loop for"),
]


@pytest.mark.parametrize(("kind", "name", "says"), OWN_RULES, ids=lambda value: getattr(value, "__name__", None))
async def test_a_broken_rule_is_found(kind: Any, name: str, says: str) -> None:
    others = [check for check in CHECKS if check != name]
    texts = [str(number) for number in range(300)] if name in ("read_ahead", "slow_reader") else TEXTS

    def make() -> Any:
        return kind(texts)

    options = {"produced": lambda: kind.num_produced}
    assert says in await broken(make, name, skip=others, **options)
    assert not (await check(Good, skip=others)).failed


# ---- leaks -----------------------------------------------------------------------------------------------------------


class Leaks(Good):
    """Opens something that nobody closes."""

    kept: list[Any]

    def acquire(self) -> Any:
        raise NotImplementedError

    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        self.kept.append(self.acquire())
        await super().produce(query, queue)


class LeaksTask(Leaks):
    def acquire(self) -> Any:
        return asyncio.create_task(asyncio.sleep(60), name="forgotten")


class LeaksThread(Leaks):
    def acquire(self) -> Any:
        end = threading.Event()
        threading.Thread(target=end.wait, args=(60,), name="forgotten", daemon=True).start()
        return end


class LeaksThreadPool(Leaks):
    def acquire(self) -> Any:
        pool = ThreadPoolExecutor(4, thread_name_prefix="forgotten")
        pool.submit(int)
        return pool


class LeaksProcess(Leaks):
    def acquire(self) -> Any:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


class LeaksSocket(Leaks):
    def acquire(self) -> Any:
        return socket.socket()


class LeaksFile(Leaks):
    def acquire(self) -> Any:
        return Path(__file__).open()


def release(held: Any) -> None:
    if isinstance(held, asyncio.Task):
        held.cancel()
    elif isinstance(held, threading.Event):
        held.set()
    elif isinstance(held, ThreadPoolExecutor):
        held.shutdown()
    elif isinstance(held, subprocess.Popen):
        held.communicate(b"\n")
    else:
        held.close()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (LeaksTask, "x task forgotten"),
        (LeaksThread, "x thread forgotten"),
        (LeaksThreadPool, "x pool of threads forgotten"),
        (LeaksProcess, "x process cat"),
        (LeaksSocket, "x socket"),
        (LeaksFile, f"x file {__file__}"),
    ],
)
@pytest.mark.parametrize("name", ["leftovers", "close", "failing_later"])
async def test_what_a_stream_leaves_behind_is_found(kind: Any, says: str, name: str) -> None:
    kind.kept = []
    try:
        others = [check for check in CHECKS if check != name]
        assert says in await broken(kind, name, skip=others, num_concurrent=1, settle_s=0.05)
    finally:
        for held in kind.kept:
            release(held)


async def test_a_pool_of_threads_that_fills_up_is_no_leak() -> None:
    class InThreads(Good):
        pool: ThreadPoolExecutor

        async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
            await asyncio.get_running_loop().run_in_executor(self.pool, int)
            await super().produce(query, queue)

        async def aclose(self) -> None:
            self.pool.shutdown()

    def make() -> InThreads:
        retriever = InThreads()
        retriever.pool = ThreadPoolExecutor(64)
        return retriever

    only = [name for name in CHECKS if name not in ("leftovers", "close")]
    assert not (await check_retriever(make, skip=only, num_concurrent=2, settle_s=0.1)).failed


async def test_what_is_opened_once_and_kept_until_the_end_is_no_leak() -> None:
    class Keeps(Good):
        held: socket.socket | None = None

        async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
            if self.held is None:
                self.held = socket.socket()
            await super().produce(query, queue)

        async def aclose(self) -> None:
            if self.held is not None:
                self.held.close()

    assert not (await check(Keeps)).failed


class ClosesOnlyOnce(Good):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


async def test_a_retriever_that_cannot_be_closed_twice_is_found() -> None:
    others = [check for check in CHECKS if check != "close"]
    assert "closed already" in await broken(ClosesOnlyOnce, "close", skip=others)


# ---- failures and texts ----------------------------------------------------------------------------------------------


class HidesFailure(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        try:
            async for item in super().updates(query):
                yield item
        except RetrievalError:
            return


class PanicsInsteadOfFailing(Good):
    async def updates(self, query: str) -> AsyncIterator[Any]:
        try:
            async for item in super().updates(query):
                yield item
        except RetrievalError:
            raise BaseException("panic") from None


class Collects(Good):
    """Has everything before it yields anything, and loses it when it fails."""

    async def updates(self, query: str) -> AsyncIterator[Any]:
        items = [item async for item in super().updates(query)]
        for item in items:
            yield item


class InventsText(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        await queue.put(Append(Chunk("always")))
        await super().produce(query, queue)


class NeedsOne(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        if not self.texts:
            await queue.put(IndexError("list index out of range"))
        await super().produce(query, queue)


class NeedsUTF8(Good):
    async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
        for text in self.texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                await queue.put(error)
        await super().produce(query, queue)


class DropsOddText(Good):
    def __init__(self, texts: Sequence[str] = TEXTS, **options: Any) -> None:
        super().__init__([text for text in texts if text.isprintable()], **options)


class DropsHugeText(Good):
    def __init__(self, texts: Sequence[str] = TEXTS, **options: Any) -> None:
        super().__init__([text for text in texts if len(text) < 1_000_000], **options)


@pytest.mark.parametrize(
    ("kind", "names", "says"),
    [
        (HidesFailure, ["failing_first", "failing_later"], "failed without a word"),
        (PanicsInsteadOfFailing, ["failing_first", "failing_later"], "no Exception"),
        (Collects, ["failing_later"], "was lost"),
        (InventsText, ["failing_first", "empty"], "over no texts it gave 1 chunks"),
        (NeedsOne, ["empty"], "with nothing to find it raised IndexError"),
        (NeedsUTF8, ["odd_texts"], "raised UnicodeEncodeError"),
        (DropsOddText, ["odd_texts"], "text lost without a word: lone surrogates, control characters"),
        (DropsHugeText, ["huge_text"], "text lost without a word: 1 MB"),
    ],
)
async def test_failures_and_texts_that_get_lost_are_found(kind: Any, names: list[str], says: str) -> None:
    here = ("failing_first", "failing_later", "empty", "odd_texts", "huge_text")
    assert says in await broken(kind, *names, skip=[name for name in CHECKS if name not in here])


async def test_a_text_that_is_reported_is_not_lost() -> None:
    class Reports(Good):
        async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
            for text in self.texts:
                known = text.isprintable()
                await queue.put(Append(Chunk(text)) if known else SourceFailure(text[:9], "cannot be read"))
            await queue.put(None)

    report = await check(Reports, skip=["failing_first", "failing_later", "read_ahead"])
    assert report["odd_texts"].detail == "1 of 5 texts came through, 4 failures were reported"


async def test_another_order_is_found_where_the_order_matters() -> None:
    class Shuffles(Good):
        number = itertools.count()

        async def produce(self, query: str, queue: asyncio.Queue[Any]) -> None:
            texts = list(reversed(self.texts)) if next(self.number) % 2 else self.texts
            for text in texts:
                await queue.put(Append(Chunk(text)))
            await queue.put(None)

    only = [name for name in CHECKS if name != "repeat"]
    assert not (await check(Shuffles, skip=only)).failed
    assert "in another order" in await broken(Shuffles, "repeat", skip=only, same_order=True)


# ---- parts -----------------------------------------------------------------------------------------------------------


async def test_it_cancels_at_the_suspension_that_was_asked_for() -> None:
    reached: list[int] = []

    async def work() -> None:
        for number in range(4):
            reached.append(number)
            await asyncio.sleep(0.001 if number % 2 else 0)

    counting = CancelAt(work())
    await counting.start()
    assert counting.num_suspensions == 4
    for at in range(1, 5):
        reached.clear()
        cancelling = CancelAt(work(), at)
        task = cancelling.start()
        await asyncio.wait({task})
        assert task.cancelled()
        assert cancelling.was_cancelled
        assert reached == list(range(at))


async def test_suspensions_of_tasks_begun_for_it_count_and_no_others() -> None:
    async def helper() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(helper())
            group.create_task(helper())

    async def elsewhere() -> None:
        while True:
            await asyncio.sleep(0)

    other = asyncio.create_task(elsewhere())
    factory = asyncio.get_running_loop().get_task_factory()
    counting = CancelAt(work())
    await counting.start()
    assert counting.num_suspensions == 7
    for at in range(1, 8):
        task = CancelAt(work(), at).start()
        await asyncio.wait({task})
        assert task.cancelled()
    await cancel_and_wait(other)
    assert asyncio.get_running_loop().get_task_factory() is factory


async def test_a_scripted_retriever_conforms() -> None:
    pools = [Replace([Chunk("a"), Chunk("b")]), 0.001, Replace([Chunk("b"), Chunk("c")])]
    await check_retriever(lambda: ScriptedRetriever(pools, ContextMode.UPDATE), same_order=True)


async def _pages(query: str) -> AsyncIterator[str]:
    yield "a page"


@pytest.mark.parametrize(
    ("factory", "advice"),
    [(_pages, "as_retriever"), (as_retriever(_pages), "give its class"), ("pages", "give its class")],
    ids=["generator function", "retriever", "text"],
)
async def test_what_makes_no_retriever_is_refused_with_the_way_out(factory: Any, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        await check_retriever(factory)
