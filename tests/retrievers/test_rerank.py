"""Reranking: the first pool is not delayed, later ones are better ordered, a failing reranker costs nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web as aiohttp_web

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace, SourceFailure, as_retriever
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.rerank import Rerank
from stream2llm_sdk.retrievers.rerankers import CrossEncoderReranker, EndpointReranker, reranker_of
from stream2llm_sdk.testing import check_retriever

pytestmark = pytest.mark.slow

TEXTS = (
    "A bicycle chain carries the turning force of the pedals.",
    "Bread rises because yeast ferments the sugar in the dough.",
    "A volcano erupts when molten rock and gas escape.",
    "The yeast in bread dough makes gas, so the dough rises.",
)


def lexical(query: str, texts: Sequence[str]) -> list[float]:
    """Shared words: a real, if simple, reranker."""
    words = set(query.lower().strip("?").split())
    return [len(words & set(text.lower().strip(".").split())) / len(words) for text in texts]


def chunks(*texts: str) -> list[Chunk]:
    return [Chunk(text, source=f"s{TEXTS.index(text) if text in TEXTS else text}") for text in texts]


def pools(*updates: Any) -> Any:
    async def source(query: str) -> AsyncIterator[Any]:
        for update in updates:
            await asyncio.sleep(0)
            yield update

    return as_retriever(source, mode="update")


async def everything(retriever: Any, query: str = "yeast makes bread dough") -> list[Any]:
    return [update async for update in retriever.stream(query)]


async def everything_left(updates: AsyncIterator[Any]) -> list[Any]:
    return [update async for update in updates]


def texts_of(update: Replace) -> list[str]:
    return [chunk.text for chunk in update.chunks]


async def test_the_first_pool_comes_at_once_and_a_better_order_follows() -> None:
    async with Rerank(pools(Replace(chunks(*TEXTS))), lexical, k=2) as retriever:
        assert retriever.mode is ContextMode.UPDATE
        first, better = await everything(retriever)
    assert texts_of(first) == list(TEXTS[:2])
    assert texts_of(better) == [TEXTS[3], TEXTS[1]]
    scores = [chunk.score for chunk in better.chunks]
    assert scores == sorted(scores, reverse=True)


async def test_a_slow_reranker_does_not_hold_the_first_pool() -> None:
    go = asyncio.Event()

    async def slow(query: str, texts: Sequence[str]) -> list[float]:
        await go.wait()
        return lexical(query, texts)

    async with Rerank(pools(Replace(chunks(*TEXTS))), slow, k=2) as retriever:
        async with aclosing(retriever.stream("bread dough")) as updates:
            assert texts_of(await anext(updates)) == list(TEXTS[:2])
            go.set()
            assert TEXTS[3] in texts_of(await anext(updates))


async def test_only_new_texts_are_scored() -> None:
    asked: list[list[str]] = []

    def counting(query: str, texts: Sequence[str]) -> list[float]:
        asked.append(list(texts))
        return lexical(query, texts)

    retriever = Rerank(pools(Replace(chunks(*TEXTS[:3]))), counting)
    later = Rerank(pools(Replace(chunks(*TEXTS))), counting)
    later._scores = retriever._scores
    await everything(retriever)
    await everything(retriever)
    await everything(later)
    assert asked == [list(TEXTS[:3]), [TEXTS[3]]]
    await everything(later, "another question")
    assert asked[-1] == list(TEXTS)
    await retriever.aclose()
    await later.aclose()


async def test_kept_scores_are_bounded() -> None:
    async with Rerank(pools(Replace(chunks(*TEXTS))), lexical, max_kept_scores=2) as retriever:
        await everything(retriever)
        assert len(retriever._scores._scores) == 2


async def test_the_newest_pool_is_what_counts_in_the_end() -> None:
    async with Rerank(pools(*(Replace(chunks(*TEXTS[:n])) for n in (1, 2, 3, 4))), lexical, k=3) as retriever:
        updates = await everything(retriever)
    assert texts_of(updates[0]) == [TEXTS[0]]
    assert texts_of(updates[-1])[:2] == [TEXTS[3], TEXTS[1]]


async def test_appended_chunks_are_gathered() -> None:
    async def source(query: str) -> AsyncIterator[Any]:
        for text in TEXTS:
            yield Append(chunks(text))

    async with Rerank(as_retriever(source), lexical, k=2) as retriever:
        updates = await everything(retriever)
    assert texts_of(updates[0]) == [TEXTS[0]]
    assert texts_of(updates[-1]) == [TEXTS[3], TEXTS[1]]


def broken(query: str, texts: Sequence[str]) -> list[float]:
    raise RuntimeError("no model here")


async def never(query: str, texts: Sequence[str]) -> list[float]:
    await asyncio.Event().wait()
    return []


def raising(error: BaseException) -> Any:
    async def reranker(query: str, texts: Sequence[str]) -> Sequence[float]:
        raise error

    return reranker


@pytest.mark.parametrize(
    ("reranker", "reason"),
    [
        (broken, "no model here"),
        (never, "too long"),
        (lambda query, texts: [1.0], "1 scores for 4 texts"),
        (lambda query, texts: [float("nan")] * len(texts), "not finite"),
        (lambda query, texts: ["no number"] * len(texts), "could not convert"),
        (raising(asyncio.CancelledError("its request was cancelled")), "its request was cancelled"),
        (raising(BaseException("a panic")), "a panic"),
        (lambda query, texts: next(iter(())), "StopIteration"),
    ],
    ids=["raises", "hangs", "too few", "not finite", "no numbers", "cancelled", "panics", "stops"],
)
async def test_a_failing_reranker_leaves_the_retrievers_order(reranker: Any, reason: str) -> None:
    changed = Replace(chunks(*TEXTS[::-1]))
    async with Rerank(pools(Replace(chunks(*TEXTS)), changed), reranker, k=3, timeout_s=0.1) as retriever:
        updates = await everything(retriever)
    failures = [update for update in updates if isinstance(update, SourceFailure)]
    assert len(failures) == 1
    assert reason in failures[0].reason
    shown = [texts_of(update) for update in updates if isinstance(update, Replace)]
    assert shown[0] == list(TEXTS[:3])
    assert shown[-1] == list(TEXTS[::-1][:3])


async def test_the_retrievers_failures_and_errors_pass_through() -> None:
    failure = SourceFailure("page", "404")

    async def source(query: str) -> AsyncIterator[Any]:
        yield failure
        yield Replace(chunks(*TEXTS))
        raise RetrievalError("the disk is gone")

    async with Rerank(as_retriever(source, mode="update"), lexical) as retriever:
        updates = retriever.stream("bread")
        assert await anext(updates) == failure
        assert texts_of(await anext(updates)) == list(TEXTS)
        with pytest.raises(RetrievalError, match="disk is gone"):
            await everything_left(updates)


@pytest.mark.parametrize("updates", [[], [Replace([])]])
async def test_nothing_found_is_nothing_to_rerank(updates: list[Any]) -> None:
    async with Rerank(pools(*updates), broken) as retriever:
        assert await everything(retriever) == updates


async def test_a_pool_that_becomes_empty_is_shown_empty() -> None:
    async with Rerank(pools(Replace(chunks(*TEXTS)), Replace([])), lexical) as retriever:
        assert (await everything(retriever))[-1] == Replace([])


async def test_leaving_early_closes_the_retriever_and_ends_the_scoring() -> None:
    closed, cancelled = asyncio.Event(), asyncio.Event()

    async def source(query: str) -> AsyncIterator[Any]:
        try:
            yield Replace(chunks(*TEXTS))
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def hanging(query: str, texts: Sequence[str]) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    before = asyncio.all_tasks()
    async with Rerank(as_retriever(source, mode="update"), hanging) as retriever:
        task = asyncio.create_task(everything(retriever))
        while len(asyncio.all_tasks()) < len(before) + 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert closed.is_set()
    assert cancelled.is_set()
    assert asyncio.all_tasks() == before


async def test_a_plain_function_runs_beside_the_loop() -> None:
    where: list[str] = []

    def note(query: str, texts: Sequence[str]) -> list[float]:
        where.append(threading.current_thread().name)
        return lexical(query, texts)

    async with Rerank(pools(Replace(chunks(*TEXTS))), note) as retriever:
        await everything(retriever)
    assert where[0].startswith("rerank")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rerank")]


async def test_it_conforms() -> None:
    def over(texts: Sequence[str]) -> Rerank:
        return Rerank(pools(Replace([Chunk(text, source=str(row)) for row, text in enumerate(texts)])), lexical)

    def failing(*before: Any) -> Rerank:
        async def source(query: str) -> AsyncIterator[Any]:
            for update in before:
                yield update
            raise RetrievalError("the disk is gone")

        return Rerank(as_retriever(source, mode="update"), lexical)

    await check_retriever(
        lambda: Rerank(pools(Replace(chunks(*TEXTS[:2])), Replace(chunks(*TEXTS))), lexical, k=3),
        query="yeast makes bread dough",
        over=over,
        failing_first=failing,
        failing_later=lambda: failing(Replace(chunks(*TEXTS))),
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 200}, "max_candidates=100"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"max_kept_scores": 0}, "max_kept_scores=0"),
        ({"reranker": 5}, "reranker=5"),
        ({"retriever": 5}, "retriever=5"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Rerank(**{"retriever": pools(), "reranker": lexical, **arguments})


@pytest.fixture(scope="module")
def cross_encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real cross-encoder of two layers with random weights: it orders by nothing, and loads like any other."""
    pytest.importorskip("sentence_transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("cross-encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({w.lower() for t in TEXTS for w in t.split()})]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def test_a_cross_encoder_is_loaded_from_a_folder(cross_encoder_folder: Path) -> None:
    reranker = CrossEncoderReranker(cross_encoder_folder, batch_size=3, device="cpu")
    try:
        scores = await reranker.score("bread dough", TEXTS)
        assert len(scores) == 4
        assert all(0 <= score <= 1 for score in scores)
        alone = [(await reranker.score("bread dough", [text]))[0] for text in TEXTS]
        assert scores == pytest.approx(alone, abs=1e-5)
        assert len(await reranker.score("half \ud800", ["\udfff " * 2000])) == 1
        model = reranker._model
    finally:
        await reranker.aclose()
    async with Rerank(pools(Replace(chunks(*TEXTS))), model) as retriever:
        updates = await everything(retriever, "bread dough")
    expected = sorted(range(4), key=lambda row: -scores[row])
    assert texts_of(updates[-1]) == [TEXTS[row] for row in expected]


async def test_a_model_that_cannot_be_loaded_is_a_failure_of_the_reranker(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    async with Rerank(pools(Replace(chunks(*TEXTS))), str(tmp_path)) as retriever:
        first, failure = await everything(retriever)
    assert texts_of(first) == list(TEXTS)
    assert failure.source == str(tmp_path)
    assert "cannot be loaded" in failure.reason


def test_a_path_or_an_object_with_predict_is_a_cross_encoder() -> None:
    class Model:
        def predict(self, pairs: Any) -> Any: ...

    assert isinstance(reranker_of("some/model"), CrossEncoderReranker)
    assert isinstance(reranker_of(Model()), CrossEncoderReranker)


class RerankServer:
    """Speaks the documented API, and answers as it is told to first."""

    def __init__(self) -> None:
        self.answers: list[aiohttp_web.Response] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []

    async def handle(self, request: aiohttp_web.Request) -> aiohttp_web.Response:
        body = await request.json()
        self.requests.append((request.headers.get("Authorization", ""), body))
        if self.answers:
            return self.answers.pop(0)
        scores = lexical(body["query"], body["documents"])
        ranked = sorted(range(len(scores)), key=lambda row: -scores[row])
        return aiohttp_web.json_response(
            {"results": [{"index": row, "relevance_score": scores[row]} for row in ranked]}
        )


@pytest.fixture
async def server() -> AsyncIterator[tuple[RerankServer, str]]:
    handler = RerankServer()
    app = aiohttp_web.Application()
    app.router.add_post("/v1/rerank", handler.handle)
    runner = aiohttp_web.AppRunner(app)
    await runner.setup()
    site = aiohttp_web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield handler, f"http://127.0.0.1:{port}/v1/rerank"
    await runner.cleanup()


async def test_an_endpoint_reranks(server: tuple[RerankServer, str]) -> None:
    handler, url = server
    reranker = EndpointReranker("some-model", url, api_key="secret-key")
    async with Rerank(pools(Replace(chunks(*TEXTS))), reranker, k=2) as retriever:
        assert texts_of((await everything(retriever))[-1]) == [TEXTS[3], TEXTS[1]]
    await reranker.aclose()
    key, body = handler.requests[0]
    assert key == "Bearer secret-key"
    assert (body["model"], body["documents"]) == ("some-model", list(TEXTS))
    assert "secret-key" not in repr(reranker)


async def test_an_endpoint_is_asked_again_when_it_is_busy(server: tuple[RerankServer, str]) -> None:
    handler, url = server
    handler.answers = [
        aiohttp_web.Response(status=429, headers={"Retry-After": "0"}),
        aiohttp_web.Response(status=503, headers={"Retry-After": "0.01"}),
    ]
    reranker = EndpointReranker("m", url)
    assert await reranker.score("bread", TEXTS) == lexical("bread", TEXTS)
    assert len(handler.requests) == 3
    await reranker.aclose()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 401, "text": "secret-key is wrong"}, "status 401"),
        ({"status": 307, "headers": {"Location": "http://127.0.0.1:1/"}}, "status 307"),
        ({"text": "<html>", "content_type": "text/html"}, "no rerank result"),
        ({"text": json.dumps({"results": [{"index": 9, "relevance_score": 1}]})}, "index 9"),
        ({"text": json.dumps({"results": [{"index": 0, "relevance_score": 1}]})}, "scored 1 of 4"),
        ({"text": json.dumps({"data": []})}, "no rerank result"),
        ({"text": json.dumps([1])}, "no rerank result"),
    ],
)
async def test_an_endpoint_that_answers_otherwise_is_a_clear_failure(
    server: tuple[RerankServer, str], answer: dict[str, Any], reason: str
) -> None:
    handler, url = server
    handler.answers = [aiohttp_web.Response(**answer)]
    reranker = EndpointReranker("m", url, api_key="secret-key")
    async with Rerank(pools(Replace(chunks(*TEXTS))), reranker) as retriever:
        first, failure = await everything(retriever)
    await reranker.aclose()
    assert texts_of(first) == list(TEXTS)
    assert reason in failure.reason
    assert "secret-key" not in failure.reason


async def test_an_endpoint_that_is_not_there_is_a_clear_failure() -> None:
    reranker = EndpointReranker("m", "http://127.0.0.1:9/v1/rerank", max_retries=0)
    with pytest.raises(RetrievalError, match=r"m at 127\.0\.0\.1 cannot be reached: ConnectError"):
        await reranker.score("q", ["a"])
    await reranker.aclose()


@pytest.mark.parametrize("url", ["ftp://host/", "http://user:password@host/", "no url"])
def test_an_endpoint_needs_a_plain_address(url: str) -> None:
    with pytest.raises(ConfigurationError, match="without a password"):
        EndpointReranker("m", url)


def test_a_services_key_goes_to_that_service_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHERE_API_KEY", "for cohere")
    assert EndpointReranker("m", "https://api.cohere.com/v2/rerank")._key == "for cohere"
    assert EndpointReranker("m", "https://evilcohere.com/v2/rerank")._key is None
