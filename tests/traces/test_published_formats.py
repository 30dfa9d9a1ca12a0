"""The published formats mean what their replay drivers make of them, and lose nothing silently."""

from __future__ import annotations

import csv
import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces import anns_format, crawler_format
from stream2llm_sdk.traces.trace import TimedFailure, TimedUpdate, Trace
from stream2llm_sdk.traces.trace_set import read_traces, write_traces

HEADING = "type,startTime,endTime,query,url,content,status\n"
CRAWL = (
    HEADING
    + "page_scrape,0.5,2.5,,https://b.org,second,200\n"
    + 'tavily_search,0.0,0.5,"who, and why?",,,\n'
    + 'page_scrape,0.5,1.25,,https://a.org,"first ""page""\nof two lines",200\n'
    + "page_scrape,0.75,3.0,,https://c.org,,timeout\n"
)
POOLS = "StartTime_us,EndTime_us,StartIteration,EndIteration,PipelinePool\n" + (
    '0,1000000,0,3,"(11,22)"\n1000000,1250000,3,4,"(11,33)"\n1300000,1300001,4,5,"(33,)"\n'
)


def anns_folder(folder: Path, pools: str = POOLS, **files: Any) -> Path:
    (folder / "res").mkdir()
    (folder / "res" / "q0.csv").write_text(pools, encoding="utf-8")
    contents = {
        "query_trace_map_5k.json": {"0": {"query": "why?", "trace_file": "q0.csv"}},
        "retrieved_corpus_content.part.0.json": {"11": "eleven", "22": "twenty-two"},
        "retrieved_corpus_content.part.1.json": {"33": "thirty-three"},
    }
    for name, content in (contents | files).items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_crawl_opens_with_the_search_and_appends_a_page_at_its_end_time(tmp_path: Path) -> None:
    (tmp_path / "query_7.csv").write_text(CRAWL, encoding="utf-8")
    (trace,) = read_traces(tmp_path)
    assert trace == Trace(
        "crawler-7",
        "who, and why?",
        (
            TimedUpdate(0.5, Append(()), 0.0),
            TimedUpdate(1.25, Append(Chunk('first "page"\nof two lines', "https://a.org")), 0.5),
            TimedUpdate(2.5, Append(Chunk("second", "https://b.org")), 0.5),
            TimedUpdate(3.0, Append(Chunk("", "https://c.org")), 0.75),
        ),
        tag="crawler",
    )


def test_crawls_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        (tmp_path / f"query_{number}.csv").write_text(CRAWL, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("of no account")
    assert [trace.trace_id for trace in read_traces(tmp_path)] == ["crawler-9", "crawler-10", "crawler-100"]
    assert len(read_traces(tmp_path, limit=2)) == 2


def test_a_vector_search_replaces_its_pool_after_the_length_of_each_row(tmp_path: Path) -> None:
    (trace,) = read_traces(anns_folder(tmp_path))
    one, two, three = Chunk("eleven", "11"), Chunk("twenty-two", "22"), Chunk("thirty-three", "33")
    assert trace == Trace(
        "anns-0",
        "why?",
        (
            TimedUpdate(1.0, Replace([one, two]), 0.0, (0, 3)),
            TimedUpdate(1.25, Replace([one, three]), 1.0, (3, 4)),
            TimedUpdate(1.250001, Replace([three]), 1.25, (4, 5)),
        ),
        tag="anns",
    )


def test_a_folder_or_its_map_is_read(tmp_path: Path) -> None:
    folder = anns_folder(tmp_path)
    by_map = read_traces(folder / "query_trace_map_5k.json")
    assert by_map.traces == read_traces(folder).traces
    (folder / "query_trace_map_1k.json").write_text("{}")
    with pytest.raises(TraceError, match="2 maps"):
        read_traces(folder)
    assert read_traces(folder / "query_trace_map_5k.json").traces == by_map.traces


def test_a_trace_file_may_lie_beside_the_map(tmp_path: Path) -> None:
    anns_folder(tmp_path)
    (tmp_path / "res" / "q0.csv").rename(tmp_path / "q0.csv")
    assert len(read_traces(tmp_path)) == 1


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
times = st.lists(st.floats(0, 1e7), min_size=1, max_size=4).map(sorted)


@st.composite
def crawls(draw: Any) -> list[Trace]:
    traces = []
    for number in draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True)):
        first, *rest = draw(times)
        updates = [TimedUpdate(first, Append(()), draw(st.floats(0, first)))]
        updates += [
            TimedUpdate(time_s, Append(Chunk(draw(texts), draw(texts))), draw(st.floats(0, time_s))) for time_s in rest
        ]
        traces.append(Trace(f"crawler-{number}", draw(texts), tuple(updates), tag="crawler"))
    return sorted(traces, key=lambda trace: int(trace.trace_id.split("-")[1]))


@st.composite
def searches(draw: Any) -> list[Trace]:
    names = st.text("abc0123456789-_.é", min_size=1, max_size=5)
    corpus = [Chunk(text, name) for name, text in draw(st.dictionaries(names, texts, min_size=1, max_size=6)).items()]
    pools = st.lists(st.sampled_from(corpus), max_size=4, unique_by=lambda chunk: chunk.source)
    numbers = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True))
    windows = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(sorted).map(tuple)
    traces = []
    for number in numbers:
        ends_s = draw(times)
        updates = tuple(
            TimedUpdate(end_s, Replace(draw(pools)), begin_s, draw(windows))
            for begin_s, end_s in zip([0.0, *ends_s], ends_s, strict=False)
        )
        traces.append(Trace(f"anns-{number}", draw(texts), updates, tag="anns"))
    return traces


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces=crawls())
def test_crawls_are_read_as_they_were_written(traces: list[Trace], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("crawls")
    assert write_traces(traces, folder, kind="crawler") == ()
    assert list(read_traces(folder)) == traces


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces=searches())
def test_searches_are_read_as_they_were_written(traces: list[Trace], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("searches")
    assert write_traces(traces, folder, kind="anns") == ()
    assert list(read_traces(folder)) == traces


def without_begins(trace: Trace) -> Trace:
    updates = tuple(replace(timed, begin_s=None, iterations=None) for timed in trace.updates)
    return replace(trace, updates=updates)


@pytest.mark.parametrize("kind", ["crawler", "anns"])
def test_what_was_not_recorded_of_an_update_is_filled_in_and_is_no_loss(kind: str, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    if kind == "crawler":
        (source / "query_0.csv").write_text(CRAWL, encoding="utf-8")
    else:
        anns_folder(source)
    (trace,) = read_traces(source)
    assert write_traces([without_begins(trace)], tmp_path / "out", kind=kind) == ()
    (read,) = read_traces(tmp_path / "out")
    assert without_begins(read) == without_begins(trace)
    begins_s = [0.0, 0.5, 0.5, 0.5] if kind == "crawler" else [0.0, 1.0, 1.25]
    assert [timed.begin_s for timed in read.updates] == begins_s
    assert [timed.iterations for timed in read.updates] == (
        [None] * 4 if kind == "crawler" else [(0, 1), (1, 2), (2, 3)]
    )


def test_a_begin_that_the_driver_would_wait_for_otherwise_is_a_loss(tmp_path: Path) -> None:
    updates = (TimedUpdate(1.0, Replace(()), 0.25, (0, 3)), TimedUpdate(2.0, Replace(()), 1.5, (3, 9)))
    traces = [Trace("anns-0", "why?", updates, tag="anns", failures=(TimedFailure(1.0, "7", "not there"),))]
    with pytest.raises(ConfigurationError, match="does not hold"):
        write_traces(traces, tmp_path / "out", kind="anns")
    dropped = write_traces(traces, tmp_path / "out", kind="anns", drop=True)
    assert sorted(dropped) == ["begin_s (of 1)", "failures (of 1)"]
    (read,) = read_traces(tmp_path / "out")
    assert [(timed.offset_s, timed.begin_s, timed.iterations) for timed in read.updates] == [
        (1.0, 0.0, (0, 3)),
        (2.0, 1.0, (3, 9)),
    ]


def test_begins_of_a_crawl_are_kept_where_pages_came_together(tmp_path: Path) -> None:
    pages = Append([Chunk("one", "https://a.org"), Chunk("two", "https://b.org")])
    trace = Trace("crawler-0", "why?", (TimedUpdate(1.0, pages, 0.25), TimedUpdate(2.0, pages, 0.5)), tag="crawler")
    dropped = write_traces([trace], tmp_path / "out", kind="crawler", drop=True)
    assert dropped == ("grouping of chunks into updates (of 1)",)
    (read,) = read_traces(tmp_path / "out")
    assert [timed.begin_s for timed in read.updates] == [0.0, 0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize("window", ["x,3", "3,2", "-1,3", ",", "1.5,2"])
def test_iterations_that_are_none_are_left_out(window: str, tmp_path: Path) -> None:
    (trace,) = read_traces(anns_folder(tmp_path, POOLS.replace("0,3", window, 1)))
    assert [timed.iterations for timed in trace.updates] == [None, (3, 4), (4, 5)]


def rich_trace(kind: type[Append] | type[Replace]) -> Trace:
    chunk = Chunk("text", "7", title="t", score=1.0, metadata={"num_tokens": 1})
    return Trace(
        "mine", "why?", (TimedUpdate(1.0, kind(chunk)),), arrival_s=1.0, num_query_tokens=2, max_tokens=3, tenant="a"
    )


LOST = ["arrival_s", "chunk metadata", "chunk score", "chunk title", "max_tokens", "num_query_tokens", "tag", "tenant"]


@pytest.mark.parametrize(("form", "kind"), [("crawler", Append), ("anns", Replace)])
def test_traces_that_keep_lengths_only_are_refused(form: str, kind: Any, tmp_path: Path) -> None:
    chunk = Chunk("", source="7", metadata={"num_tokens": 300})
    trace = Trace("mine", "why?", (TimedUpdate(1.0, kind(chunk)),))
    for drop in (False, True):
        with pytest.raises(ConfigurationError, match=rf"'mine' keeps lengths and no texts, and the {form} format"):
            write_traces([trace], tmp_path / "out", kind=form, drop=drop)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "kind"), [("crawler", Append), ("anns", Replace)])
def test_what_a_published_format_does_not_hold_is_refused_or_said(form: str, kind: Any, tmp_path: Path) -> None:
    trace = rich_trace(kind)
    with pytest.raises(ConfigurationError, match="drop=True") as caught:
        write_traces([trace], tmp_path / "out", kind=form)
    assert not (tmp_path / "out").exists()
    dropped = write_traces([trace], tmp_path / "out", kind=form, drop=True)
    assert ", ".join(dropped) in str(caught.value)
    assert list(dropped) == sorted(dropped), "in the same order in every run"
    lost = {loss.removesuffix(" (of 1)") for loss in dropped}
    assert lost >= {*LOST, "trace_id"}
    assert ("grouping of chunks into updates" in lost) == (form == "crawler")
    (read,) = read_traces(tmp_path / "out")
    assert (read.query, read.duration_s, read.final_chunks) == ("why?", 1.0, (Chunk("text", "7"),))
    assert write_traces([read], tmp_path / "again", kind=form) == ()


@pytest.mark.parametrize(
    ("trace", "form", "match"),
    [
        (rich_trace(Append), "anns", "appends"),
        (rich_trace(Replace), "crawler", "replaces"),
        (Trace("a", "nul \0", (TimedUpdate(0, Append(())),)), "crawler", "NUL"),
        (Trace("a", "\ud800", (TimedUpdate(0, Append(())),)), "crawler", "surrogate"),
        (Trace("a", "", (TimedUpdate(0, Replace(Chunk("t", "a b"))),)), "anns", "'a b' cannot be a document's id"),
        (Trace("a", "", (TimedUpdate(0, Replace(Chunk("t"))),)), "anns", "cannot be a document's id"),
        (Trace("a", "", (TimedUpdate(0, Replace([Chunk("t", "1"), Chunk("t", "1")])),)), "anns", "once"),
        (
            Trace("a", "", (TimedUpdate(0, Replace(Chunk("t", "1"))), TimedUpdate(1, Replace(Chunk("u", "1"))))),
            "anns",
            "another text",
        ),
    ],
)
def test_what_a_published_format_cannot_say_is_refused(trace: Trace, form: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=match):
        write_traces([trace], tmp_path / "out", kind=form, drop=True)


def test_sets_do_not_mix_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "query_0.csv").write_text(CRAWL, encoding="utf-8")
    traces = read_traces(tmp_path).traces
    with pytest.raises(ConfigurationError, match="new folder"):
        write_traces(traces, tmp_path, kind="crawler")
    with pytest.raises(ConfigurationError, match="say which kind"):
        write_traces(traces, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="no traces"):
        write_traces([], tmp_path / "out.parquet")
    with pytest.raises(ConfigurationError, match="two traces are called"):
        write_traces([*traces, *traces], tmp_path / "out.parquet")


def test_published_traces_pass_through_parquet_unchanged(tmp_path: Path) -> None:
    (tmp_path / "query_0.csv").write_text(CRAWL, encoding="utf-8")
    traces = read_traces(tmp_path).traces
    write_traces(traces, tmp_path / "a.parquet")
    write_traces(read_traces(tmp_path / "a.parquet"), tmp_path / "out", kind="crawler")
    with (tmp_path / "out" / "query_0.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["type"], float(row["endTime"]), row["url"]) for row in rows] == [
        ("tavily_search", 0.5, ""),
        ("page_scrape", 1.25, "https://a.org"),
        ("page_scrape", 2.5, "https://b.org"),
        ("page_scrape", 3.0, "https://c.org"),
    ]


@pytest.mark.parametrize("kind", ["crawler", "anns"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_cannot_be_written_whole_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_there: bool
) -> None:
    """A part of the traces would pass for all of them."""
    chunk = Chunk("text", "7")
    update = Append(chunk) if kind == "crawler" else Replace([chunk])
    traces = [Trace(f"{kind}-{n}", "why?", (TimedUpdate(1.0, update),), tag=kind) for n in range(3)]
    module = {"crawler": crawler_format, "anns": anns_format}[kind]
    write, written = module._write, []

    def write_two(trace: Trace, file: Path) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(trace, file)
        written.append(file)

    monkeypatch.setattr(module, "_write", write_two)
    folder = tmp_path / "traces"
    if is_there:
        folder.mkdir()
    with pytest.raises(ConfigurationError, match="No space left"):
        write_traces(traces, folder, kind=kind, drop=True)
    assert len(written) == 2
    assert folder.is_dir() == is_there
    assert not is_there or not list(folder.iterdir())
