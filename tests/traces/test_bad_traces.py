"""A file that is not as it must be is named by file, row and column, or skipped and counted; never a stall."""

from __future__ import annotations

import csv
import json
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError, Stream2LLMError, TraceError
from stream2llm_sdk.traces import checked_files
from stream2llm_sdk.traces.trace_set import read_traces

HEADING = "type,startTime,endTime,query,content"
SEARCH = "tavily_search,0,0.5,why?,"
GOOD = f"{HEADING}\n{SEARCH}\npage_scrape,0.5,1.5,,text\n"
POOL_HEADING = "StartTime_us,EndTime_us,PipelinePool"
GOOD_POOLS = f'{POOL_HEADING}\n0,10,"(1,2)"\n10,20,"(2,1)"\n'


def crawl(*rows: str) -> str:
    return "\n".join([HEADING, SEARCH, *rows]) + "\n"


def pools(*rows: str) -> str:
    return "\n".join([POOL_HEADING, '0,10,"(1,2)"', *rows]) + "\n"


def failure_of(path: Path) -> TraceError:
    """The one error that reading ends with, which is also the one that is skipped."""
    with pytest.raises(TraceError) as caught:
        read_traces(path)
    found = read_traces(path, on_error="skip")
    assert [str(error) for error in found.skipped] == [str(caught.value)]
    return caught.value


BAD_CRAWLS = {
    "missing column": (GOOD.replace("endTime", "end"), None, "endTime"),
    "column twice": (GOOD.replace("startTime", "endTime,startTime"), None, "endTime"),
    "blank time": (crawl("page_scrape,0.5,,,text"), 2, "endTime"),
    "blank start": (crawl("page_scrape,,1,,text"), 2, "startTime"),
    "negative time": (crawl("page_scrape,-1,1,,text"), 2, "startTime"),
    "NaN": (crawl("page_scrape,0.5,nan,,text"), 2, "endTime"),
    "infinite": (crawl("page_scrape,0.5,-inf,,text"), 2, "endTime"),
    "beyond a float": (crawl("page_scrape,0.5,1e999,,text"), 2, "endTime"),
    "absurd exponent": (crawl("page_scrape,0.5,1e999999999,,text"), 2, "endTime"),
    "many digits": (crawl(f"page_scrape,0.5,{'9' * 100_000},,text"), 2, "endTime"),
    "no number": (crawl("page_scrape,0.5,1_0,,text"), 2, "endTime"),
    "end before start": (crawl("page_scrape,2,1.5,,text"), 2, "endTime"),
    "unknown type": (crawl("page,0.5,1,,text"), 2, "type"),
    "page before the search": (crawl("page_scrape,0,0.25,,text"), 2, "endTime"),
    "no search": (f"{HEADING}\npage_scrape,0,1,,text\n", 1, "endTime"),
    "NUL byte": (crawl("page_scrape,0.5,1,,te\0xt"), 2, "content"),
    "row cut short": (crawl("page_scrape,0.5,1"), 2, "query"),
    "row too long": (crawl("page_scrape,0.5,1,,text,more"), 2, "content"),
    "quote not closed": (crawl('page_scrape,0.5,1,,"te'), 2, None),
    "only a heading": (HEADING + "\n", None, None),
    "empty file": ("", None, None),
    "all NUL": ("\0" * 10_000, None, None),
}


@pytest.mark.parametrize(("content", "row", "column"), BAD_CRAWLS.values(), ids=BAD_CRAWLS)
def test_a_bad_crawl_is_named_or_skipped(content: str, row: int | None, column: str | None, tmp_path: Path) -> None:
    for number, text in enumerate((GOOD, content, GOOD)):
        (tmp_path / f"query_{number}.csv").write_text(text, encoding="utf-8")
    error = failure_of(tmp_path)
    assert (Path(error.file).name, error.row, error.column) == ("query_1.csv", row, column)
    assert [trace.trace_id for trace in read_traces(tmp_path, on_error="skip")] == ["crawler-0", "crawler-2"]


def test_a_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "query_0.csv").write_bytes(GOOD.encode() + b"page_scrape,0.5,1,,\xff\n")
    assert "not UTF-8" in failure_of(tmp_path).reason


def test_two_files_of_one_number_are_named(tmp_path: Path) -> None:
    for name in ("query_1.csv", "query_01.csv"):
        (tmp_path / name).write_text(GOOD, encoding="utf-8")
    assert "number 1 too" in failure_of(tmp_path).reason


def test_a_long_field_is_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = csv.field_size_limit()
    (tmp_path / "query_0.csv").write_text(crawl(f"page_scrape,0.5,1,,{'x' * 10 * before}"), encoding="utf-8")
    assert len(read_traces(tmp_path)[0].final_chunks[0].text) == 10 * before
    assert csv.field_size_limit() == before
    monkeypatch.setattr(checked_files, "MAX_TEXT_CHARACTERS", 9 * before)
    assert (failure_of(tmp_path).row, failure_of(tmp_path).column) == (2, "content")
    monkeypatch.setattr(checked_files, "_MAX_CSV_BYTES", before)
    assert "at most 131,072 are read" in failure_of(tmp_path).reason
    assert csv.field_size_limit() == before


def anns_folder(folder: Path, table: str = GOOD_POOLS, **files: Any) -> Path:
    (folder / "res").mkdir(exist_ok=True)
    (folder / "res" / "good.csv").write_text(GOOD_POOLS, encoding="utf-8")
    (folder / "res" / "q.csv").write_text(table, encoding="utf-8")
    contents = {
        "query_trace_map_all.json": {
            "0": {"query": "why?", "trace_file": "good.csv"},
            "1": {"query": "how?", "trace_file": "q.csv"},
        },
        "retrieved_corpus_content.json": {"1": "one", "2": "two"},
    }
    for name, content in (contents | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


BAD_POOLS = {
    "missing column": (GOOD_POOLS.replace("PipelinePool", "Pool"), None, "PipelinePool"),
    "blank time": (pools('10,,"(1)"'), 2, "EndTime_us"),
    "negative time": (pools('-10,20,"(1)"'), 2, "StartTime_us"),
    "end before start": (pools('20,15,"(1)"'), 2, "EndTime_us"),
    "starts decrease": (pools('10,20,"(1)"', '5,30,"(2)"'), 3, "StartTime_us"),
    "ends decrease": (pools('1,9,"(1)"'), 2, "EndTime_us"),
    "not in the corpus": (pools('10,20,"(1,3)"'), 2, "PipelinePool"),
    "document twice": (pools('10,20,"(1,2,1)"'), 2, "PipelinePool"),
    "blank pool": (pools("10,20,"), 2, "PipelinePool"),
    "no brackets": (pools('10,20,"1,2"'), 2, "PipelinePool"),
    "brackets not closed": (pools('10,20,"(1,2"'), 2, "PipelinePool"),
    "hole in the pool": (pools('10,20,"(1,,2)"'), 2, "PipelinePool"),
    "words in the pool": (pools('10,20,"(one two)"'), 2, "PipelinePool"),
    "code in the pool": (pools('10,20,"(__import__(1))"'), 2, "PipelinePool"),
    "endless blanks": (pools(f'10,20,"(1{" " * 1_000_000}x"'), 2, "PipelinePool"),
    "a million documents": (pools(f'10,20,"({"1," * 1_000_000})"'), 2, "PipelinePool"),
}


@pytest.mark.parametrize(("table", "row", "column"), BAD_POOLS.values(), ids=BAD_POOLS)
def test_a_bad_vector_search_is_named_or_skipped(
    table: str, row: int | None, column: str | None, tmp_path: Path
) -> None:
    error = failure_of(anns_folder(tmp_path, table))
    assert (Path(error.file).name, error.row, error.column) == ("q.csv", row, column)
    assert [trace.trace_id for trace in read_traces(tmp_path, on_error="skip")] == ["anns-0"]


LEAVING = ["../outside.csv", "res/../../outside.csv", "/etc/hostname", "link.csv", "linked/outside.csv", "res/q2.csv"]
UNUSABLE = ["", "missing.csv", "nul\0", "x" * 100_000, ".", "loop.csv"]


@pytest.mark.parametrize("name", LEAVING + UNUSABLE)
def test_a_trace_file_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "outside.csv").write_text(GOOD_POOLS, encoding="utf-8")
    entries = {"0": {"query": "", "trace_file": "q.csv"}, "1": {"query": "", "trace_file": name}}
    anns_folder(folder, **{"query_trace_map_all.json": entries})
    for link in ("link.csv", "res/q2.csv"):
        (folder / link).symlink_to(tmp_path / "outside.csv")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "loop.csv").symlink_to(folder / "loop.csv")
    error = failure_of(folder)
    assert (Path(error.file).name, error.row, error.column) == ("query_trace_map_all.json", "1", "trace_file")
    assert ("leaves this folder" in error.reason) == (name in LEAVING)
    assert len(str(error)) < 1_000


def test_links_out_of_a_folder_of_crawls_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text(GOOD, encoding="utf-8")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "query_0.csv").symlink_to(tmp_path / "secret.csv")
    assert "leaves this folder" in failure_of(folder).reason


def test_a_pipe_does_not_stall_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "query_0.csv")
    assert "no plain file" in failure_of(tmp_path).reason
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="plain file"):
        read_traces(tmp_path / "a.parquet")


BAD_MAPS = {
    "cut short": ('{"0": {"query": "', None, None),
    "nested without end": ('{"0":' * 100_000, None, None),
    "no object": ("[]", None, None),
    "no queries": ("{}", None, None),
    "key twice": ('{"0": {}, "0": {}}', "0", None),
    "no query": ('{"0": {"trace_file": "q.csv"}}', "0", "query"),
    "no file": ('{"0": {"query": "why?"}}', "0", "trace_file"),
    "a number for a file": ('{"0": {"query": "why?", "trace_file": 3}}', "0", "trace_file"),
    "no entry": ('{"0": null}', "0", "query"),
    "half a surrogate pair": ('{"0": {"query": "\\ud83d", "trace_file": "q.csv"}}', "0", "query"),
    "NUL bytes": ("\0" * 5_000, None, None),
}


@pytest.mark.parametrize(("content", "row", "column"), BAD_MAPS.values(), ids=BAD_MAPS)
def test_a_bad_map_is_named(content: str, row: str | None, column: str | None, tmp_path: Path) -> None:
    anns_folder(tmp_path, **{"query_trace_map_all.json": content})
    with pytest.raises(TraceError) as caught:
        read_traces(tmp_path)
    error = caught.value
    assert (Path(error.file).name, error.row, error.column) == ("query_trace_map_all.json", row, column)


BAD_CORPORA = {
    "cut short": ('{"3": "thr', None),
    "not a text": ('{"3": 3}', "3"),
    "another text for a document": ('{"1": "uno"}', "1"),
    "key twice": ('{"3": "a", "3": "b"}', "3"),
    "half a surrogate pair": ('{"3": "\\udc00"}', "3"),
}


@pytest.mark.parametrize(("content", "row"), BAD_CORPORA.values(), ids=BAD_CORPORA)
def test_a_bad_part_of_the_corpus_is_named_and_the_others_serve(content: str, row: str | None, tmp_path: Path) -> None:
    error = failure_of(anns_folder(tmp_path, **{"retrieved_corpus_content.part.1.json": content}))
    assert (Path(error.file).name, error.row) == ("retrieved_corpus_content.part.1.json", row)
    assert len(read_traces(tmp_path, on_error="skip")) == 2


def test_what_is_no_set_of_traces_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    for name, match in (
        ("empty", "it is empty"),
        ("notes.txt", "kind="),
        ("missing", "no such file"),
        ("x\0", "missing|no"),
    ):
        with pytest.raises(TraceError, match=match):
            read_traces(tmp_path / name)
    with pytest.raises(TraceError, match="is a folder"):
        read_traces(tmp_path / "notes.txt", kind="crawler")
    with pytest.raises(TraceError, match="is a file"):
        read_traces(tmp_path / "empty", kind="parquet")
    with pytest.raises(TraceError, match="no traces"):
        read_traces(tmp_path / "empty", kind="crawler")
    (tmp_path / "query_0.csv").write_text(GOOD, encoding="utf-8")
    (tmp_path / "query_trace_map_all.json").write_text("{}")
    with pytest.raises(TraceError, match="give kind="):
        read_traces(tmp_path)
    assert len(read_traces(tmp_path, kind="crawler")) == 1


def test_options_that_are_none_say_so(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"kind": "zip"}, {"on_error": "ignore"}, {"limit": 0}]
    for option in options:
        with pytest.raises(ConfigurationError, match=next(iter(option))):
            read_traces(tmp_path, **option)


def test_a_trace_error_is_the_sdks(tmp_path: Path) -> None:
    with pytest.raises(Stream2LLMError):
        read_traces(tmp_path)


def test_small_bad_files_take_little_memory(tmp_path: Path) -> None:
    anns_folder(tmp_path, pools('10,1e999,"(1)"', f'20,30,"({"(" * 1_000_000}"'))
    tracemalloc.start()
    try:
        read_traces(tmp_path, on_error="skip")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000


def test_threads_that_read_leave_the_csv_limit_as_it_was(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "query_0.csv").write_text(crawl(f"page_scrape,0.5,1,,{'x' * 3 * before}"), encoding="utf-8")
    lengths: list[int] = []

    def read() -> None:
        lengths.extend(len(read_traces(tmp_path)[0].final_chunks[0].text) for _ in range(10))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [3 * before] * 40
    assert csv.field_size_limit() == before


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(TraceError, match="Permission denied"):
        read_traces(tmp_path)
