"""Questions are read from what people have them in, and a row that is none is named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.recording.questions import Question, read_questions

SIMPLEQA = [
    (
        {"topic": "Art", "answer_type": "Person", "urls": ["https://a.org", "https://b.org", "https://a.org"]},
        "Who?",
        "x",
    ),
    ({"topic": "Art", "answer_type": "Date", "urls": []}, "When?", "y"),
    ({"topic": "Art", "answer_type": "Person", "urls": ["https://c.org"]}, "Who?", "z"),
]


def simpleqa(file: Path) -> Path:
    columns = ("metadata", "problem", "answer")
    rows = [(repr(metadata), problem, answer) for metadata, problem, answer in SIMPLEQA]
    if file.suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([columns, *rows])
    elif file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows]), file)
    else:
        lines = (json.dumps({"metadata": metadata, "question": problem}) for metadata, problem, _ in SIMPLEQA)
        file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_simpleqa_is_read_with_its_pages(suffix: str, tmp_path: Path) -> None:
    questions = read_questions(str(simpleqa(tmp_path / f"simpleqa{suffix}")))
    assert questions == [
        Question("0", "Who?", ("https://a.org", "https://b.org")),
        Question("1", "When?"),
        Question("2", "Who?", ("https://c.org",)),
    ]


def test_lines_of_text_are_questions(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Why?\n\n  How so?\u2028Really? \r\n", encoding="utf-8")
    assert read_questions(str(tmp_path / "q.txt")) == [Question("0", "Why?"), Question("1", "How so?\u2028Really?")]


def test_ids_and_pages_of_a_table_are_kept(tmp_path: Path) -> None:
    rows = [{"id": f"q{n}", "query": f"{n}?", "urls": ["http://a", None, " http://a "]} for n in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_questions(str(tmp_path / "q.jsonl"))[2] == Question("q2", "2?", ("http://a",))


def test_a_sample_keeps_order_and_ids_and_a_limit_is_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("\n".join(f"{n}?" for n in range(100)))
    sample = read_questions(str(tmp_path / "q.txt"), sample=20, seed=3)
    assert [int(one.question_id) for one in sample] == sorted({int(one.question_id) for one in sample})
    assert all(one.text == f"{one.question_id}?" for one in sample)
    assert read_questions(str(tmp_path / "q.txt"), sample=20, seed=3, limit=5) == sample[:5]
    assert read_questions(str(tmp_path / "q.txt"), sample=20, seed=4) != sample


def test_a_stream_of_the_hub_is_read_as_far_as_needed(tmp_path: Path) -> None:
    """`datasets` loads a folder of files as it does a name of the hub."""
    pytest.importorskip("datasets")
    simpleqa(tmp_path / "test.parquet")
    assert read_questions(f"hub:{tmp_path}::test", limit=2) == [
        Question("0", "Who?", ("https://a.org", "https://b.org")),
        Question("1", "When?"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("q.csv", "a,b\n1,2\n", "line 2: lacks the column 'problem' or 'question' or 'query'; it has: 'a', 'b'"),
        ("q.csv", "query\n  \n", "line 2: its 'query' is '  ', which is no question"),
        ("q.csv", "id,query\n1,a\n1,b\n", "line 3: the id '1' is that of q.csv, line 2 already"),
        ("q.csv", "query\n", "no questions"),
        ("q.jsonl", "[]\n", "line 1: a JSON list, expected an object"),
        ("q.jsonl", '{"query": 7}\n', "its 'query' is 7"),
        ("q.txt", "\n \n", "no questions"),
        ("q.bin", "x", "its kind is not known"),
        ("q.parquet", "x", "not a Parquet file"),
    ],
)
def test_what_is_no_question_is_named(name: str, content: str, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=match):
        read_questions(str(tmp_path / name))


def test_sources_and_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Why?")
    (tmp_path / "latin.txt").write_bytes("Wie schön?".encode("latin-1"))
    for source, options, match in (
        ("missing.txt", {}, "there is no such file"),
        ("missing.csv", {}, "there is no such file"),
        ("latin.txt", {}, "not UTF-8"),
        ("q.txt", {"limit": 0}, "limit=0"),
        ("q.txt", {"sample": 2}, "sample=2: .* has 1 questions"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            read_questions(str(tmp_path / source), **options)
    (tmp_path / "q.csv").write_text("query,text\na,b\n")
    assert read_questions(str(tmp_path / "q.csv"), column="text") == [Question("0", "b")]
    with pytest.raises(ConfigurationError, match="lacks the column 'topic'"):
        read_questions(str(tmp_path / "q.csv"), column="topic")
