"""A conformance kit for retrievers: what `StreamingRAG` relies on, as checks for anybody's retriever."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from stream2llm_sdk.context import Retriever
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.testing.conformance_checks import CHECKS, Conformance
from stream2llm_sdk.testing.conformance_parts import ConformanceOptions, Factory, NotRun, OverTexts
from stream2llm_sdk.testing.conformance_report import CheckOutcome, CheckStatus, ConformanceReport
from stream2llm_sdk.testing.stream_run import Broken, described

__all__ = ["check_retriever"]

_FIRST = "streams"


async def check_retriever(
    factory: Factory,
    *,
    query: str = "How is context streamed?",
    failing_first: Factory | None = None,
    failing_later: Factory | None = None,
    over: OverTexts | None = None,
    produced: Callable[[], int] | None = None,
    repeatable: bool = True,
    same_order: bool = False,
    skip: Collection[str] = (),
    max_cancellations: int = 40,
    num_concurrent: int = 8,
    max_read_ahead: int = 64,
    max_stall_s: float = 0.1,
    timeout_s: float = 30.0,
    settle_s: float = 2.0,
) -> ConformanceReport:
    """Runs a retriever through every check, and says in plain words which rules it breaks.

        async def test_my_retriever_conforms() -> None:
            report = await check_retriever(lambda: MyRetriever(...), query="a question that it has an answer to")
            print(report)

    It needs no engine and no plugin, an event loop only. Checks that need more than `factory` are skipped, with a word
    on what to give, if that is not given. What a process holds is read from /proc, so it is seen on Linux only.

    | check | what must hold |
    |---|---|
    | streams | `stream` is an async generator, yields what its mode allows, and finds something |
    | repeat | the same question gives the same context |
    | early_close | a stream can be closed after any item, twice, and before it was begun |
    | cancellation | a reader can be cancelled at each suspension, its own or of tasks begun for it; nothing goes on |
    | slow_reader | a reader that takes its time gets everything |
    | read_ahead | what is produced ahead of a reader that stops is bounded (`produced`) |
    | concurrency | streams at the same time give what each gives alone |
    | odd_queries | lone surrogates, NUL, nothing, 1 MB: answered, or refused with an error of the SDK's |
    | stall | the event loop is not held up |
    | leftovers | ended streams hold no task, thread, process, socket or file |
    | failing_first, failing_later | a failure is raised or reported, what came before it stays, the next stream works |
    | empty, odd_texts, huge_text | no text, text that is not UTF-8, 1 MB of text (`over`) |
    | close | a retriever closed twice holds nothing |

    Args:
        factory: makes the retriever, or a coroutine that does. It is entered, warmed up and closed here, where it has
            such methods. More than one is made.
        query: a question that it finds something for.
        failing_first: makes one that fails before its first update.
        failing_later: makes one that fails after its first update.
        over: makes one over the given texts, each of which it is to give for `query`.
        produced: how much the retrievers of `factory` have read from their source, ever.
        repeatable: False if the same question may give another context.
        same_order: whether the chunks must come in the same order, too.
        skip: names of checks that are not to be run.
        max_cancellations: suspensions to cancel at; of more, so many spread over all.
        num_concurrent: streams at the same time.
        max_read_ahead: most that may be produced ahead of a reader.
        max_stall_s: longest time in seconds for which the loop may be held.
        timeout_s: longest time in seconds of one stream.
        settle_s: longest time in seconds that what has ended may take to go.

    Raises:
        ConformanceError: a check failed. Its message is the report.
        ConfigurationError: `factory` makes no retriever, or `skip` names no check.
    """
    if isinstance(skip, str) or (unknown := sorted(set(skip) - set(CHECKS))):
        given = repr(skip) if isinstance(skip, str) else ", ".join(unknown)
        raise ConfigurationError(f"skip={given}: give a list of names of checks, which are {', '.join(CHECKS)}")
    options = ConformanceOptions(
        query=query,
        failing_first=failing_first,
        failing_later=failing_later,
        over=over,
        produced=produced,
        repeatable=repeatable,
        same_order=same_order,
        max_cancellations=max_cancellations,
        num_concurrent=num_concurrent,
        max_read_ahead=max_read_ahead,
        max_stall_s=max_stall_s,
        timeout_s=timeout_s,
        settle_s=settle_s,
    )
    _check_factory(factory)
    report = await _run(Conformance(factory, options), factory, skip)
    report.raise_for_failures()
    return report


def _check_factory(factory: Any) -> None:
    if inspect.isasyncgenfunction(factory):
        raise ConfigurationError(
            f"factory={factory!r:.80} is a generator function: give a function that makes a retriever of it, such as "
            "lambda: as_retriever(pages)"
        )
    if not callable(factory) or (isinstance(factory, Retriever) and not isinstance(factory, type)):
        raise ConfigurationError(
            f"factory={factory!r:.80}: give its class, or a function that makes one, such as lambda: MyRetriever(...); "
            "more than one is made"
        )


async def _run(conformance: Conformance, factory: Factory, skip: Collection[str]) -> ConformanceReport:
    outcomes: list[CheckOutcome] = []
    name = "the retriever"
    try:
        async with conformance.opened(factory) as conformance.retriever:
            name = type(conformance.retriever).__name__
            outcomes.append(await _outcome(conformance, _FIRST, "begin"))
            if outcomes[0].status is CheckStatus.PASSED:
                outcomes += [await _checked(conformance, check, skip) for check in CHECKS]
    except Broken as broken:
        outcomes.append(CheckOutcome("open", CheckStatus.FAILED, str(broken)))
    except Exception as error:
        outcomes.append(
            CheckOutcome("open", CheckStatus.FAILED, f"it could not be made and opened: {described(error)}")
        )
    return ConformanceReport(name, tuple(outcomes))


async def _checked(conformance: Conformance, check: str, skip: Collection[str]) -> CheckOutcome:
    if check in skip:
        return CheckOutcome(check, CheckStatus.SKIPPED, "asked to")
    return await _outcome(conformance, check, check)


async def _outcome(conformance: Conformance, name: str, method: str) -> CheckOutcome:
    try:
        return CheckOutcome(name, CheckStatus.PASSED, await getattr(conformance, method)())
    except NotRun as reason:
        return CheckOutcome(name, CheckStatus.SKIPPED, str(reason))
    except Broken as broken:
        return CheckOutcome(name, CheckStatus.FAILED, str(broken))
    except Exception as error:
        return CheckOutcome(name, CheckStatus.FAILED, f"it raised {described(error)}")
