"""Searches: services that answer as documented, and otherwise; known pages; several at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web as aio

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, RetrievalError
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.retrievers.search.dataset import DatasetURLs
from stream2llm_sdk.retrievers.search.duckduckgo import DuckDuckGoSearch
from stream2llm_sdk.retrievers.search.known_pages import KnownPage
from stream2llm_sdk.retrievers.search.local import LocalIndexSearch
from stream2llm_sdk.retrievers.search.merged import SearchAll
from stream2llm_sdk.retrievers.search.provider import FixedSeeds, SearchHit, SearchProvider, StreamingSearchProvider
from stream2llm_sdk.retrievers.search.searxng import SearxNGSearch
from stream2llm_sdk.retrievers.search.tavily import TavilySearch

KEY = "tvly-secret-123"
TAVILY_ANSWER = {
    "query": "who?",
    "answer": None,
    "results": [
        {"title": "A", "url": "https://a.example/", "content": "about a", "score": 0.9, "raw_content": None},
        {"title": "A again", "url": "https://a.example/", "content": "", "score": 0.8},
        {"title": None, "url": "https://b.example/", "content": None, "score": 0.7},
        {"title": "no url", "score": 0.1},
    ],
    "response_time": "0.5",
}

Answer = Callable[[aio.Request], Awaitable[aio.StreamResponse]]


class Service:
    """A real HTTP service whose next answers are scripted; it keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[aio.Request, bytes]] = []

    def says(self, body: Any = "", status: int = 200, **headers: str) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def answer(_: aio.Request) -> aio.StreamResponse:
            return aio.Response(text=text, status=status, headers=named, content_type="application/json")

        self.answers.append(answer)

    async def handle(self, request: aio.Request) -> aio.StreamResponse:
        self.requests.append((request, await request.read()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    scripted = Service()
    application = aio.Application()
    application.router.add_route("*", "/{path:.*}", scripted.handle)
    runner = aio.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = aio.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scripted.base = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield scripted
    await runner.cleanup()


def tavily(service: Any, **options: Any) -> TavilySearch:
    return TavilySearch(KEY, base_url=service.base, **options)


async def test_tavily_is_asked_as_documented(service: Service) -> None:
    service.says(TAVILY_ANSWER)
    search = tavily(service, depth="advanced", topic="news", exclude_domains=["c.example"])

    assert await search.search("who?", 50) == [
        SearchHit("https://a.example/", "A", "about a"),
        SearchHit("https://b.example/"),
    ]
    ((request, body),) = service.requests
    assert (request.method, request.path, request.headers["Authorization"]) == ("POST", "/search", f"Bearer {KEY}")
    assert json.loads(body) == {
        "query": "who?", "max_results": 20, "search_depth": "advanced", "topic": "news",
        "exclude_domains": ["c.example"],
    }  # fmt: skip
    assert await search.search("word " * 200, 1) == [SearchHit("https://a.example/", "A", "about a")]
    assert len(json.loads(service.requests[1][1])["query"]) <= 400


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (401, {"detail": {"error": f"Unauthorized: {KEY} is invalid"}}, r"HTTP 401: .*\[key\].*TAVILY_API_KEY"),
        (432, {"detail": {"error": "This request exceeds your plan"}}, "exceeds your plan; the plan's limit"),
        (400, {"detail": {"error": "Query is too long"}}, "HTTP 400: Query is too long"),
        (500, "<html>oops</html>", "HTTP 500"),
        (200, f"<html>{KEY}</html>", "not JSON: '<html>"),
        (200, {"hits": []}, "without a list of results"),
        (200, [], "without a list of results"),
    ],
)
async def test_failure_says_what_is_wrong_and_never_the_key(
    service: Service, status: int, body: Any, reason: str
) -> None:
    service.says(body, status)
    search = tavily(service)
    with pytest.raises(RetrievalError, match=reason) as caught:
        await search.search("q", 3)
    assert KEY not in "".join(map(str, (caught.value, search, repr(search), caught.value.__cause__)))


@pytest.mark.parametrize("make", [tavily, lambda service: SearxNGSearch(service.base)])
async def test_busy_service_is_asked_again_if_it_says_when(service: Service, make: Any) -> None:
    service.says("", 429, retry_after="0")
    service.says({"results": [{"url": "https://a.example/"}]})
    assert await make(service).search("q", 3) == [SearchHit("https://a.example/")]
    assert len(service.requests) == 2


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"retry_after": "3600"}, "429; try again in 3600 s"),
        ({"retry_after": formatdate(time.time() + 3600, usegmt=True)}, r"429; try again in 3[0-6]\d\d s"),
        ({"retry_after": "soon"}, "429; it is busy, try again later"),
        ({}, "429; it is busy, try again later"),
    ],
)
async def test_busy_service_that_wants_a_long_wait(service: Service, headers: dict[str, str], reason: str) -> None:
    service.says("", 429, **headers)
    with pytest.raises(RetrievalError, match=reason):
        await tavily(service).search("q", 3)
    assert len(service.requests) == 1


async def test_service_that_drips_or_hangs_is_given_up_in_time(service: Service) -> None:
    async def drip(request: aio.Request) -> aio.StreamResponse:
        response = aio.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    service.answers.append(drip)
    with pytest.raises(RetrievalError, match=r"did not answer within timeout_s=0\.3"):
        await tavily(service, timeout_s=0.3).search("q", 3)


async def test_answer_without_end_is_cut(service: Service) -> None:
    async def flood(request: aio.Request) -> aio.StreamResponse:
        response = aio.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 1_000_000)

    service.answers.append(flood)
    with pytest.raises(RetrievalError, match="more than 8000000 bytes"):
        await tavily(service).search("q", 3)


async def test_key_is_not_sent_to_another_host(service: Service) -> None:
    service.says("", 307, location=f"{service.base.replace('127.0.0.1', 'localhost')}/search")  # type: ignore[attr-defined]
    service.says(TAVILY_ANSWER)
    await tavily(service).search("q", 3)
    assert "Authorization" in service.requests[0][0].headers
    assert "Authorization" not in service.requests[1][0].headers


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": " "},
        {"api_key": "a\nb"},
        {"depth": "deep"},
        {"topic": "x"},
        {"include_domains": "a.example"},
        {"timeout_s": 0},
        {"base_url": "tavily"},
    ],
)
def test_tavily_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TavilySearch(**{"api_key": KEY, **options})


def test_tavily_takes_its_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", KEY)
    assert KEY not in repr(TavilySearch())
    monkeypatch.delenv("TAVILY_API_KEY")
    with pytest.raises(ConfigurationError, match="TAVILY_API_KEY"):
        TavilySearch()


RESULT_PAGE = """<html><body><div class="result body"><h2>First <b>hit</b></h2>
<a href="https://a.example/">about a</a></div>
<div class="result body"><h2>Ad</h2><a href="https://duckduckgo.com/y.js?ad">ad</a></div>
<div class="result body"><h2>Second</h2><a href="https://b.example/">about b</a></div></body></html>"""


@pytest.fixture
def duck(service: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real library, whose engine asks the loopback."""
    from ddgs.engines.duckduckgo import Duckduckgo

    monkeypatch.setattr(Duckduckgo, "search_url", f"{service.base}/html/")
    return service


async def test_duckduckgo_reads_the_result_page(duck: Service) -> None:
    duck.says(RESULT_PAGE)
    hits = await DuckDuckGoSearch().search("hit", 5)
    assert {hit.url: hit.title for hit in hits} == {"https://a.example/": "First hit", "https://b.example/": "Second"}
    assert b"q=hit" in duck.requests[0][1]


async def test_duckduckgo_that_refuses_finds_nothing(duck: Service) -> None:
    duck.says("", 403)
    assert await DuckDuckGoSearch().search("hit", 5) == []


async def test_duckduckgo_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddgs.engines.duckduckgo import Duckduckgo

    monkeypatch.setattr(Duckduckgo, "search_url", "http://127.0.0.1:1/html/")
    with pytest.raises(RetrievalError, match="DuckDuckGo cannot be asked"):
        await DuckDuckGoSearch().search("hit", 5)


async def test_duckduckgo_keeps_to_its_time_and_is_cancelled_at_once(duck: Service) -> None:
    release = asyncio.Event()

    async def hang(_: aio.Request) -> aio.StreamResponse:
        await release.wait()
        return aio.Response(status=500)

    duck.answers.append(hang)
    with pytest.raises(RetrievalError, match=r"timeout_s=0\.2"):
        await DuckDuckGoSearch(timeout_s=0.2).search("hit", 5)
    search = asyncio.create_task(DuckDuckGoSearch(timeout_s=5).search("hit", 5))
    while len(duck.requests) < 2:
        await asyncio.sleep(0.01)
    search.cancel()
    await asyncio.wait({search}, timeout=1)
    assert search.cancelled()
    release.set()


PAGES = [
    ("http://x/copy.html", "COPY", "copies data between a file and a table"),
    ("http://x/vacuum.html", "VACUUM", "garbage-collects a table, and may analyze it"),
    ("http://x/io/files.html", "", "nothing of that kind"),
]


async def test_local_index_finds_by_text_title_and_url(tmp_path: Path) -> None:
    search = LocalIndexSearch([*PAGES, PAGES[0]])
    assert (len(search), isinstance(search, SearchProvider)) == (3, True)
    assert [hit.url for hit in await search.search("How do I copy a file?", 2)] == [
        "http://x/copy.html",
        "http://x/io/files.html",
    ]
    assert (await search.search("vacuuming", 5))[0] == SearchHit("http://x/vacuum.html", "VACUUM", PAGES[1][2])
    assert await search.search("unrelated zebra", 5) == []
    assert await search.search("", 5) == []

    search.save(tmp_path / "index")
    search.save(tmp_path / "index")
    again = LocalIndexSearch.load(tmp_path / "index")
    for query in ("copy a table", "files", "garbage", "zebra"):
        assert await again.search(query, 5) == await search.search(query, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


async def test_local_index_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "a.html").write_text(
        "<title>Tea</title><nav>menu coffee</nav><p>water and leaves<script>coffee</script>"
    )
    (tmp_path / "b.HTM").write_bytes(b"<p>gr\xfcn and coffee</p>")
    (tmp_path / "empty.html").write_text("")
    (tmp_path / "c.txt").write_text("coffee")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    search = await LocalIndexSearch.from_folder(tmp_path, "http://h/docs/")
    assert [hit.url for hit in await search.search("leaf leaves", 9)] == ["http://h/docs/sub%20dir/a.html"]
    assert [hit.url for hit in await search.search("coffee", 9)] == ["http://h/docs/b.HTM"]


def test_local_index_refuses_what_is_none(tmp_path: Path) -> None:
    for pages in ([], [("http://x/", "t")], [("http://x/", "t", None)], ["text"], [("http://x/", "", "")]):
        with pytest.raises(ConfigurationError, match="page"):
            LocalIndexSearch(pages)  # type: ignore[arg-type]
    with pytest.raises(IndexFormatError, match="no readable index"):
        LocalIndexSearch.load(tmp_path / "nothing")
    search = LocalIndexSearch([KnownPage(*page) for page in PAGES])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigurationError, match="holds no index"):
        search.save(tmp_path / "mine")
    search.save(tmp_path / "index")
    (pages,) = (tmp_path / "index").glob("*/pages.json")
    content = json.loads(pages.read_text())
    pages.write_text(json.dumps({**content, "pages": content["pages"][1:]}))
    with pytest.raises(IndexFormatError, match="do not fit together"):
        LocalIndexSearch.load(tmp_path / "index")
    pages.write_text(json.dumps({**content, "format": 9}))
    with pytest.raises(IndexFormatError, match="format 9"):
        LocalIndexSearch.load(tmp_path / "index")


@pytest.mark.parametrize("name", ["pages.json", "local-index.json", ".hidden", "index-mine"])
@pytest.mark.parametrize("content", ['{"format": 1, "pages": []}', "[]", "letter"])
def test_local_index_leaves_strangers_folders_alone(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match="holds no index"):
        LocalIndexSearch(PAGES).save(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, content)]
    for below in (tmp_path / name, tmp_path / name / "x"):
        with pytest.raises(ConfigurationError, match="is a file"):
            LocalIndexSearch(PAGES).save(below)


async def test_local_index_is_replaced_in_one_step(tmp_path: Path) -> None:
    search = LocalIndexSearch(PAGES)
    search.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    is_over = False

    def save() -> None:
        for _ in range(8):
            search.save(tmp_path)

    def load() -> int:
        num = 0
        while not is_over:
            assert len(LocalIndexSearch.load(tmp_path)) == 3
            num += 1
        return num

    loading = asyncio.create_task(asyncio.to_thread(load))
    try:
        await asyncio.to_thread(save)
    finally:
        is_over = True
        assert await loading > 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3  # the one that counts, its name, and the notes


def test_local_index_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    LocalIndexSearch(PAGES).save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    unwritable = LocalIndexSearch([("http://x/\ud800", "lone", "surrogate")])
    unwritable._owners = (object(),)  # type: ignore[assignment]
    with pytest.raises(TypeError):
        unwritable.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with FolderLock(tmp_path), pytest.raises(ConfigurationError, match="in use"):
        LocalIndexSearch(PAGES).save(tmp_path)
    assert len(LocalIndexSearch.load(tmp_path)) == 3


SIMPLEQA = (
    "metadata,problem,answer\n"
    "\"{'topic': 'Science', 'answer_type': 'Person', 'urls': ['https://a/', 'https://b/', 'https://a/']}\","
    '"Who, in 2010, won?",Ada\n'
    "\"{'topic': 'Art', 'urls': []}\",What is it?,It\n"
)


async def test_urls_of_simpleqa(tmp_path: Path) -> None:
    file = tmp_path / "simple_qa_test_set.csv"
    file.write_text(SIMPLEQA)
    search = DatasetURLs.from_simpleqa(file)
    assert await search.search("who,  in 2010, won?", 5) == [SearchHit("https://a/"), SearchHit("https://b/")]
    assert await search.search("Who, in 2010, won?", 1) == [SearchHit("https://a/")]
    assert await search.search("What is it?", 5) == await search.search("unknown", 5) == []
    assert search.questions == ("Who, in 2010, won?", "What is it?")
    rows = [{"problem": "q", "metadata": {"urls": ["https://c/"]}}]
    assert await DatasetURLs.from_simpleqa(rows).search("Q", 5) == [SearchHit("https://c/")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("__import__('os').system('true'),q,a", "row 1: metadata is no Python literal"),
        ("[1],q,a", "row 1: metadata names no list of urls"),
        ("{'urls': 'https://a/'},q,a", "row 1: metadata names no list of urls"),
        ("{},", "row 1"),
    ],
)
def test_simpleqa_row_that_is_none(tmp_path: Path, row: str, reason: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"metadata,problem,answer\n{row}\n")
    with pytest.raises(ConfigurationError, match=reason):
        DatasetURLs.from_simpleqa(file)


class Gated:
    """Gives its hits when it is let."""

    def __init__(self, *urls: str, error: BaseException | None = None) -> None:
        self.urls, self.error, self.gate, self.was_cancelled = urls, error, asyncio.Event(), False

    async def search(self, query: str, k: int) -> list[SearchHit]:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return [SearchHit(url) for url in self.urls[:k]]


async def test_hits_of_several_searches_come_as_they_are_found() -> None:
    slow, failing = Gated("s1", "f1", "s2"), Gated(error=ValueError("broken"))
    failing.gate.set()
    search = SearchAll([slow, FixedSeeds(["f1", "f2", "f3", "f4"]), failing])
    assert isinstance(search, StreamingSearchProvider)
    async with aclosing(search.stream("q", 6)) as hits:
        first = [(await anext(hits)).url for _ in range(4)]  # its share, and the failed one's
        assert first == ["f1", "f2", "f3", "f4"]
        slow.gate.set()
        assert [hit.url async for hit in hits] == ["s1", "s2"]
    assert [hit.url for hit in await search.search("q", 2)] in (["f1", "s1"], ["s1", "f1"])


async def test_closing_ends_the_searches() -> None:
    slow = Gated("s")
    hits = SearchAll([SearchAll([slow, FixedSeeds(["f"])])]).stream("q", 4)
    assert (await anext(hits)).url == "f"
    await hits.aclose()  # type: ignore[attr-defined]
    assert slow.was_cancelled


async def test_all_searches_fail() -> None:
    broken, hanging = Gated(error=RetrievalError("no such host")), Gated("x")
    broken.gate.set()
    with pytest.raises(RetrievalError, match=r"every search failed: .*no such host.*timeout_s=0\.05"):
        await SearchAll([broken, hanging], timeout_s=0.05).search("q", 3)
    assert hanging.was_cancelled
    for providers in ([], [object()]):
        with pytest.raises(ConfigurationError):
            SearchAll(providers)  # type: ignore[list-item]


class Panic(BaseException):
    """As extension modules in Rust raise it: no `Exception`."""


@pytest.mark.parametrize("error", [Panic("index"), asyncio.CancelledError("by a library"), TimeoutError("its own")])
@pytest.mark.parametrize("timeout_s", [None, 20.0])
async def test_whatever_a_search_raises_is_missed(error: BaseException, timeout_s: float | None) -> None:
    failing = Gated(error=error)
    failing.gate.set()
    hits = await asyncio.wait_for(SearchAll([failing, FixedSeeds(["a", "b"])], timeout_s=timeout_s).search("q", 2), 10)
    assert [hit.url for hit in hits] == ["a", "b"]
    with pytest.raises(RetrievalError, match=f"Gated: {type(error).__name__}: {error}"):
        await asyncio.wait_for(SearchAll([failing], timeout_s=timeout_s).search("q", 2), 10)


async def test_bad_results_of_one_search_are_one_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        async def search(self, query: str, k: int) -> list[Any]:
            return ["x", SearchHit("b1"), None, SearchHit(5)]  # type: ignore[arg-type]

    hits = await SearchAll([Bad(), FixedSeeds(["a1"]), Bad()]).search("q", 6)
    assert {hit.url for hit in hits} == {"a1", "b1"}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "Bad failed and is missed: 3 of its results are no SearchHit with a URL, such as 'x'"
    ] * 2
    assert [hit.url for hit in await SearchAll([Bad()]).search("q", 6)] == ["b1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SearchAll(None), "providers=None"),
        (lambda: SearchAll(FixedSeeds(["a"])), "providers=<"),
        (lambda: SearchAll([FixedSeeds(["a"])], timeout_s="x"), "timeout_s='x'"),
        (lambda: SearchAll([FixedSeeds(["a"])], timeout_s=10**400), "timeout_s=1000"),
        (lambda: LocalIndexSearch(None), "pages=None"),
        (lambda: LocalIndexSearch([("http://[bad", "t", "text")]), r"'http://\[bad', which is malformed"),
        (lambda: DatasetURLs(None), "urls=None"),
        (lambda: DatasetURLs({1: ["a"]}), "the question 1"),
        (lambda: DatasetURLs({"q": None}), "URLs of 'q' are None"),
        (lambda: DatasetURLs({"q": 5}), "URLs of 'q' are 5"),
        (lambda: DatasetURLs.from_simpleqa([1]), "row 1 is 1"),
        (lambda: DatasetURLs.from_simpleqa(None), "source=None"),
        (lambda: DuckDuckGoSearch(timeout_s="x"), "timeout_s='x'"),
        (lambda: TavilySearch(5), "api_key is a int"),
        (lambda: TavilySearch(KEY, include_domains=5), "include_domains=5"),
        (lambda: FixedSeeds(None), "urls=None"),
    ],
)
def test_values_that_no_search_can_use_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_simpleqa_field_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("metadata,problem,answer\n{'urls': []},q,a\n" + "x" * 200_000 + ",q,a\n")
    with pytest.raises(ConfigurationError, match="row 2 cannot be read: field larger"):
        DatasetURLs.from_simpleqa(file)
