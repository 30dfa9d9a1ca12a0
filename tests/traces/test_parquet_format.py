"""Parquet holds every trace as it is, and what is not such a file is named."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces import parquet_format, trace_set
from stream2llm_sdk.traces.parquet_format import group_ranges, parquet_schema
from stream2llm_sdk.traces.parquet_seal import seal
from stream2llm_sdk.traces.trace import TimedFailure, TimedUpdate, Trace
from stream2llm_sdk.traces.trace_set import read_traces, write_traces

texts = st.text(max_size=20)
seconds = st.floats(0, 1e9) | st.integers(0, 10**6)
windows = st.none() | st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=2).map(sorted).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
chunks = st.builds(
    Chunk,
    text=texts,
    source=texts,
    title=texts,
    score=st.none() | st.floats(allow_nan=False) | st.integers(-5, 5),
    metadata=st.dictionaries(texts, json_values, max_size=3),
)


@st.composite
def traces(draw: Any) -> list[Trace]:
    pool = draw(st.lists(chunks, min_size=1, max_size=4))
    drawn = []
    for trace_id in draw(st.lists(texts, min_size=1, max_size=4, unique=True)):
        kind = draw(st.sampled_from([Append, Replace]))
        offsets = sorted(draw(st.lists(seconds, min_size=1, max_size=4)))
        has_windows = draw(st.booleans())
        updates = tuple(
            TimedUpdate(
                offset,
                kind(draw(st.lists(st.sampled_from(pool), max_size=3))),
                draw(st.none() | st.floats(0, offset)),
                draw(windows) if has_windows else None,
            )
            for offset in offsets
        )
        drawn.append(
            Trace(
                trace_id,
                draw(texts),
                updates,
                arrival_s=draw(st.none() | seconds),
                num_query_tokens=draw(st.none() | st.integers(0, 2**63 - 1)),
                max_tokens=draw(st.none() | st.integers(1, 2**63 - 1)),
                tenant=draw(texts),
                tag=draw(texts),
                failures=tuple(draw(st.lists(st.builds(TimedFailure, seconds, texts, texts), max_size=2))),
            )
        )
    return drawn


def a_trace(**fields: Any) -> Trace:
    values = {"trace_id": "a", "query": "why?", "updates": (TimedUpdate(1.0, Append(Chunk("text", "source"))),)}
    return Trace(**{**values, **fields})


def with_chunk(**fields: Any) -> Trace:
    return a_trace(updates=(TimedUpdate(1.0, Append(Chunk("text", **fields))),))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_traces=traces())
def test_every_trace_is_read_as_it_was_written(given_traces: list[Trace], tmp_path: Path) -> None:
    file = tmp_path / "traces.parquet"
    assert write_traces(given_traces, file) == ()
    assert list(read_traces(file)) == given_traces


def test_two_thousand_traces_are_one_small_file(tmp_path: Path) -> None:
    document = Chunk("word " * 1_000, "document")
    many = [
        a_trace(trace_id=str(n), updates=tuple(TimedUpdate(s, Replace([document] * s)) for s in (1, 2, 3)))
        for n in range(2_000)
    ]
    write_traces(many, file := tmp_path / "many.parquet")
    assert file.stat().st_size < 200_000
    assert list(read_traces(file)) == many


def test_the_version_of_the_schema_is_in_the_file(tmp_path: Path) -> None:
    write_traces([a_trace()], file := tmp_path / "a.parquet")
    assert pq.read_metadata(file).metadata[b"stream2llm_traces_version"] == b"2"


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    write_traces([a_trace()], file := tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match="metadata"):
        write_traces([a_trace(trace_id="b"), with_chunk(metadata={"x": object()})], file)
    assert list(read_traces(file)) == [a_trace()]
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        (with_chunk(metadata={"pair": (1, 2)}), "metadata"),
        (with_chunk(metadata={1: "one"}), "metadata"),
        (with_chunk(metadata={"score": math.nan}), "metadata"),
        (a_trace(failures=(TimedFailure(1.0, "s", "half \udc00"),)), "failure's reason is no Unicode text"),
        (a_trace(updates=(TimedUpdate(1.0, Append(()), iterations=(0, 2**63)),)), "iterations"),
        (with_chunk(title="\ud83d"), "title is no Unicode text"),
        (a_trace(query="half \udc00"), "query is no Unicode text"),
        (a_trace(max_tokens=2**63), "max_tokens"),
        (a_trace(num_query_tokens=1.5), "num_query_tokens"),
        (a_trace(arrival_s=2**60 + 1), "arrival_s"),
        (with_chunk(score="high"), "score"),
    ],
)
def test_what_would_not_be_read_back_is_not_written(trace: Trace, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=name):
        write_traces([trace], tmp_path / "a.parquet")


def row(**changes: Any) -> dict[str, Any]:
    chunk = {"text": "text", "source": "s", "title": "", "score": None, "metadata": None}
    values = {"trace_id": "a", "query": "", "arrival_s": None, "num_query_tokens": None, "max_tokens": None}
    values |= {"tenant": "", "tag": "", "mode": "append", "offsets_s": [1.0, 2.0], "update_chunks": [[], [0]]}
    return {**values, "chunks": [chunk], **changes}


def write_rows(file: Path, *rows: dict[str, Any], schema: Any = None, **options: Any) -> None:
    table = pa.Table.from_pylist(list(rows), schema=schema or parquet_schema())
    write_table(table, file, **options)


def write_table(table: pa.Table, file: Path, **options: Any) -> None:
    pq.write_table(table, file, **{"use_dictionary": False, **options})
    seal(file, group_ranges(pq.read_metadata(file)))


CHUNK = {"text": "text", "source": "s", "title": "", "score": None, "metadata": None}
BAD_ROWS = {
    "mode": row(mode="grow"),
    "offsets_s": row(offsets_s=[2.0, 1.0]),
    "update_chunks": row(update_chunks=[[], [1]]),
    "chunks": row(chunks=[{**CHUNK, "text": None}]),
    "chunks.metadata": row(chunks=[{**CHUNK, "metadata": "{"}]),
    "query": row(query=None),
    "arrival_s": row(arrival_s=math.nan),
    "max_tokens": row(max_tokens=0),
    "trace_id": row(trace_id="first"),
}
MORE_BAD_ROWS = [
    ("offsets_s", row(offsets_s=[-1.0, 1.0])),
    ("offsets_s", row(offsets_s=[math.nan, 1.0])),
    ("offsets_s", row(offsets_s=[1.0, math.inf])),
    ("offsets_s", row(offsets_s=[1.0, None])),
    ("offsets_s", row(offsets_s=[], update_chunks=[])),
    ("update_chunks", row(update_chunks=[[0]])),
    ("update_chunks", row(update_chunks=[[], [-1]])),
    ("update_chunks", row(update_chunks=[None, [0]])),
    ("chunks", row(chunks=[None])),
    ("chunks.metadata", row(chunks=[{**CHUNK, "metadata": "[" * 100_000}])),
    ("chunks.metadata", row(chunks=[{**CHUNK, "metadata": "[]"}])),
    ("num_query_tokens", row(num_query_tokens=-1)),
    ("begins_s", row(begins_s=[0.5])),
    ("begins_s", row(begins_s=[0.5, 2.5])),
    ("begins_s", row(begins_s=[-1.0, None])),
    ("iterations", row(iterations=[{"first": 0, "last": 1}])),
    ("iterations", row(iterations=[{"first": 2, "last": 1}, None])),
    ("iterations", row(iterations=[{"first": None, "last": 1}, None])),
    ("failures", row(failures=[None])),
    ("failures", row(failures=[{"offset_s": math.nan, "source": "s", "reason": "r"}])),
    ("failures", row(failures=[{"offset_s": 1.0, "source": None, "reason": "r"}])),
]


@pytest.mark.parametrize(("column", "bad"), [*BAD_ROWS.items(), *MORE_BAD_ROWS])
def test_a_bad_row_is_named_or_skipped(column: str, bad: dict[str, Any], tmp_path: Path) -> None:
    write_rows(file := tmp_path / "bad.parquet", row(trace_id="first"), bad, row(trace_id="last"))
    with pytest.raises(TraceError) as caught:
        read_traces(file)
    assert (caught.value.file, caught.value.row, caught.value.column) == (file, 2, column)
    found = read_traces(file, on_error="skip")
    assert [trace.trace_id for trace in found] == ["first", "last"]
    assert [str(error) for error in found.skipped] == [str(caught.value)]


@pytest.mark.parametrize("version", [b"0", b"3", b"", b"\xff", None])
def test_another_version_is_not_guessed_at(version: bytes | None, tmp_path: Path) -> None:
    metadata = {b"stream2llm_traces_version": version} if version is not None else None
    write_rows(file := tmp_path / "a.parquet", row(), schema=parquet_schema().with_metadata(metadata))
    with pytest.raises(TraceError, match="version"):
        read_traces(file)


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row()], schema=parquet_schema()).drop_columns(["begins_s", "iterations", "failures"])
    write_table(table.replace_schema_metadata({b"stream2llm_traces_version": b"1"}), file := tmp_path / "a.parquet")
    (trace,) = read_traces(file)
    assert trace == Trace("a", "", (TimedUpdate(1.0, Append(())), TimedUpdate(2.0, Append(Chunk("text", "s")))))
    write_table(table, file)
    with pytest.raises(TraceError, match="column 'begins_s': the column is missing"):
        read_traces(file)


def test_a_missing_or_changed_column_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row()], schema=parquet_schema())
    write_table(table.drop_columns(["tenant"]), file := tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="column 'tenant': the column is missing"):
        read_traces(file)
    changed = table.set_column(0, "trace_id", pa.array([1], pa.int64()))
    write_table(changed, file)
    with pytest.raises(TraceError, match="column 'trace_id': its type is int64"):
        read_traces(file)


def test_a_file_that_could_blow_up_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(file := tmp_path / "a.parquet", row(query="q" * 100_000), use_dictionary=True)
    with pytest.raises(TraceError, match="dictionary-encoded"):
        read_traces(file)
    monkeypatch.setattr(parquet_format, "_MAX_GROUP_VALUES", 1_000)
    write_rows(file, row(offsets_s=[0.0] * 2_000, update_chunks=[[]] * 2_000))
    with pytest.raises(TraceError, match="2,000 values in one row group"):
        read_traces(file)
    monkeypatch.setattr(parquet_format, "_MAX_GROUP_BYTES", 1_000)
    write_rows(file, row(query="q" * 100_000), compression="zstd")
    assert file.stat().st_size < 10_000
    with pytest.raises(TraceError, match="bytes in one row group"):
        read_traces(file)


def test_skipping_ends_where_nothing_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_set, "_MAX_SKIPPED", 10)
    write_rows(file := tmp_path / "a.parquet", *[row(mode="")] * 12)
    with pytest.raises(TraceError, match="more than 10 traces in it cannot be read"):
        read_traces(file, on_error="skip")


def test_a_file_without_traces_is_an_error(tmp_path: Path) -> None:
    write_rows(file := tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="no traces"):
        read_traces(file)


def damaged(good: bytes, rng: random.Random) -> bytes:
    bad = bytearray(good)
    for _ in range(rng.choice([1, 1, 4, 16])):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    write_traces([a_trace(trace_id=str(n)) for n in range(20)], file := tmp_path / "a.parquet")
    good = file.read_bytes()
    for size in (0, 3, 4, 12, len(good) // 2, len(good) - 9, len(good) - 1):
        file.write_bytes(good[:size])
        with pytest.raises(TraceError, match="cut short"):
            read_traces(file)


def test_flipped_bits_are_an_error_or_are_where_nothing_is_read(tmp_path: Path) -> None:
    traces = [a_trace(trace_id=str(n)) for n in range(20)]
    write_traces(traces, file := tmp_path / "a.parquet")
    good, rng, errors = file.read_bytes(), random.Random(7), 0
    for _ in range(300):
        file.write_bytes(damaged(good, rng))
        try:
            assert list(read_traces(file)) == traces
        except TraceError:
            errors += 1
    assert errors > 250


def test_a_parquet_file_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), file := tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="was not written by write_traces"):
        read_traces(file)


def test_a_damaged_row_group_is_skipped_and_the_others_read(tmp_path: Path) -> None:
    many = [replace(with_chunk(source=f"{n:04}" * 20), trace_id=str(n)) for n in range(600)]
    write_traces(many, file := tmp_path / "a.parquet")
    column = pq.read_metadata(file).row_group(1).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 0xFF
    file.write_bytes(bytes(data))
    found = read_traces(file, on_error="skip")
    assert len(found) == 600 - 256
    assert [error.row for error in found.skipped] == [257]
    with pytest.raises(TraceError, match="rows 257 to 512 are damaged"):
        read_traces(file)
