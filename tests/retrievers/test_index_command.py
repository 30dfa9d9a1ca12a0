"""`stream2llm index …`, as a user runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner, Result

from stream2llm_sdk.cli import app
from stream2llm_sdk.console import STOPPED
from stream2llm_sdk.files import FolderLock
from stream2llm_sdk.retrievers.diskann.build import unfinished_build
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.manifest import Manifest

pytestmark = pytest.mark.slow

ANIMALS = ("cat", "horse", "owl", "salmon")
SENTENCES = {
    "cat": "The cat sleeps all day and hunts mice at night.",
    "horse": "A horse gallops over the field and eats hay.",
    "owl": "An owl sees in the dark and flies without a sound.",
    "salmon": "The salmon swims up the river to spawn.",
}


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["index", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def rows(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "text": f"{SENTENCES[ANIMALS[row % 4]]} This is note {row} on animals. " * 6,
            "id": f"note-{row}",
            "dump": f"dump {row % 2}",
            "url": f"https://example.org/{ANIMALS[row % 4]}/{row}",
            "int_score": row % 5,
        }
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "notes.parquet"
    parquet.write_table(pa.Table.from_pylist(rows()), path)
    return path


@pytest.fixture(scope="module")
def index(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "index"
    filters = ("--filterable", "dump", "--filterable", "int_score")
    result = run("build", corpus, "--out", out, "--passage-tokens", 32, *filters)
    assert "passages of 40 documents" in result.output
    return out


def test_info_tells_how_it_was_built(index: Path, tmp_path: Path) -> None:
    output = run("info", index, "--json", tmp_path / "info.json").output
    for fact in ("wordllama-l2_supercat-256, 256 dimensions", "cosine", "max_tokens 32", "dump, int_score", "ann_disk"):
        assert fact in output
    assert json.loads((tmp_path / "info.json").read_text())["num_sources"] == 40


def test_search_prints_the_best_first(index: Path, tmp_path: Path) -> None:
    output = run("search", index, "which bird sees at night?", "--k", 3).output
    assert "1. 0." in output
    assert "https://example.org/owl/" in output
    wanted = json.dumps({"dump": "dump 1", "int_score": {"$gte": 3}})
    run("search", index, "a fish in a river", "--k", 4, "--filter", wanted, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["documents"]
    assert {document["metadata"]["dump"] for document in found} == {"dump 1"}
    assert all(document["metadata"]["int_score"] >= 3 for document in found)
    assert "salmon" in found[0]["text"]
    assert "not JSON" in run("search", index, "x", "--filter", "{", code=1).output


def test_eval_measures_recall_and_draws_it(index: Path, tmp_path: Path) -> None:
    sizes = ("--search-list-size", 20, "--search-list-size", 100)
    files = ("--json", tmp_path / "eval.json", "--plot", tmp_path / "eval.png")
    output = run("eval", index, "--num-queries", 12, *sizes, *files).output
    assert "recall@10" in output
    found = json.loads((tmp_path / "eval.json").read_text())
    assert [point["search_list_size"] for point in found["points"]] == [20, 100]
    assert found["points"][1]["recall"] > 0.95
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "questions.jsonl").write_text('{"query": "a bird"}\n{"question": "a fish"}\n')
    assert "2 queries" in run("eval", index, "--queries", tmp_path / "questions.jsonl", *sizes).output
    (tmp_path / "empty.txt").write_text("\n")
    assert "holds no questions" in run("eval", index, "--queries", tmp_path / "empty.txt", code=1).output


def test_whole_documents_and_another_metric(corpus: Path, tmp_path: Path) -> None:
    options = ("--passage-tokens", 0, "--metric", "ip", "--limit", 20, "--keep", "dump")
    assert "20 documents in" in run("build", corpus, "--out", tmp_path / "index", *options).output
    with DiskANNIndex.open(tmp_path / "index") as index:
        assert dict(index.search("a horse")[0].metadata) == {"dump": index.search("a horse")[0].metadata["dump"]}
    assert "metric" in run("info", tmp_path / "index").output


def test_a_sparse_embedder_is_fitted_and_kept_with_the_index(corpus: Path, tmp_path: Path) -> None:
    run("build", corpus, "--out", tmp_path / "index", "--embedder", "sparse:16", "--passage-tokens", 32)
    output = run("search", tmp_path / "index", "gallops over the field", "--k", 1).output
    assert "horse" in output


def test_bad_rows_stop_a_build_or_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in rows(8)]
    lines[3] = '{"text": null}'
    (tmp_path / "notes.jsonl").write_text("\n".join([*lines, "no json"]))
    arguments = ("build", tmp_path / "notes.jsonl", "--out", tmp_path / "index")
    assert "notes.jsonl, line 4: its 'text' is null" in run(*arguments, code=1).output
    assert not unfinished_build(tmp_path / "index").exists()
    assert "of 7 documents, 2 left out" in run(*arguments, "--skip-bad").output
    assert "exists and is no empty folder" in run(*arguments, code=1).output
    assert "of 7 documents" in run(*arguments, "--skip-bad", "--overwrite").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--embedder", "word2vec"), "give wordllama"),
        (("--embedder", "sparse:many"), "sparse:512"),
        (("--api-key-env", "KEY"), "--api-key-env is for endpoints"),
        (("--filterable", "nothing"), "no document has 'nothing'"),
        (("--text-column", "body"), "lacks the column 'body'"),
        (("--overlap-tokens", "200"), "overlap_tokens=200"),
        (("--tokenizer", "/nowhere/tokenizer.json"), "cannot be loaded"),
    ],
)
def test_what_cannot_be_built_is_explained(
    corpus: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    output = run("build", corpus, "--out", tmp_path / "index", *arguments, code=1).output
    assert message in " ".join(output.split())
    assert not (tmp_path / "index").exists()


def test_a_build_that_ctrl_c_stopped_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(150)))
    out = tmp_path / "index"
    command = ["build", str(path), "--out", str(out), "--passage-tokens", "64", "--batch-size", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stream2llm_sdk.cli", "index", *command], stderr=subprocess.PIPE, text=True
    )
    journal = unfinished_build(out) / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == STOPPED
    assert "the same command goes on from there" in " ".join(told.split())
    assert not out.exists()
    other = run(*command, "--metric", "l2", code=1).output
    assert "begun with metric='cosine'" in " ".join(other.split())
    run(*command)
    whole = tmp_path / "whole"
    run("build", path, "--out", whole, "--passage-tokens", 64, "--batch-size", 1024)
    assert (out / "documents.jsonl").read_bytes() == (whole / "documents.jsonl").read_bytes()
    assert Manifest.read(out).num_sources == 150
    assert not unfinished_build(out).exists()


def test_restart_forgets_an_unfinished_build_but_none_that_is_running(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    work = unfinished_build(out)
    work.mkdir()
    (work / "documents.jsonl").write_text("of another build")
    command = ("build", corpus, "--out", out, "--limit", 20, "--restart")
    with FolderLock(work):
        assert "in use" in run(*command, code=1).output
    assert (work / "documents.jsonl").read_text() == "of another build"
    run(*command)
    assert Manifest.read(out).num_sources == 20
    assert not work.exists()
