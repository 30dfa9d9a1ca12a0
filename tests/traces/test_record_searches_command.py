"""The command `stream2llm trace record anns`: what it records, what it refuses, and that it survives being killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import lost_actor
import pytest
from small_index import build_small_index, documents, questions
from typer.testing import CliRunner, Result

from stream2llm_sdk.cli import app
from stream2llm_sdk.traces import Trace, read_traces
from stream2llm_sdk.traces.recording.ray_run import record_on_ray
from stream2llm_sdk.traces.recording.run import run_recording

OPTIONS = ("-k", "5", "-L", "40")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_index(tmp_path_factory.mktemp("recording") / "index")


@pytest.fixture(autouse=True)
def own_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run at the same time do not take each other's CPUs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")


def asked(folder: Path, count: int) -> Path:
    file = folder / "questions.txt"
    file.write_text("".join(f"{question.text}\n" for question in questions(count)))
    return file


def run(*arguments: object) -> Result:
    command = ["trace", "record", "anns", *map(str, arguments)]
    return CliRunner().invoke(app, command, env={"COLUMNS": "400"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gate-rank", "3"), "--gate-rank has no effect without --gate"),
        (("--skip-bad", "--corpus-limit", "5"), "--corpus-limit, --skip-bad have no effect without --corpus"),
        (("-k", "10", "-L", "5"), "-L 5 is less than -k 10"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    done = run(asked(tmp_path, 2), "--out", tmp_path / "out", "--index", tmp_path / "index", *options)
    assert done.exit_code != 0
    assert says in done.output
    assert not (tmp_path / "out").exists()


def test_where_the_recording_goes_is_looked_at_before_the_index_is_built(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "A page."}) + "\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").touch()
    for out, says in (("index", "is the folder of the index too"), ("theirs", "no recording")):
        command = (asked(tmp_path, 2), "--out", tmp_path / out, "--index", tmp_path / "index", "--corpus", corpus)
        done = run(*command)
        assert done.exit_code != 0
        assert says in done.output
        assert not (tmp_path / "index").exists()


def test_how_many_search_at_once_is_looked_at_before_the_index_is_built(tmp_path: Path) -> None:
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text(json.dumps({"text": "A page."}) + "\n")
    done = run(
        asked(tmp_path, 2), "--out", tmp_path / "out", "--index", index, "--corpus", corpus, "--concurrency", "4097"
    )
    assert done.exit_code != 0
    assert "disturb each other's times" in done.output
    assert not index.exists()


def test_few_searches_tell_nothing_about_disturbance(tmp_path: Path) -> None:
    corpus, index, out = tmp_path / "corpus.jsonl", tmp_path / "index", tmp_path / "out"
    corpus.write_text("".join(json.dumps({"text": d.text}) + "\n" for d in documents()))
    done = run(asked(tmp_path, 2), "--out", out, "--index", index, "--corpus", corpus, *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "disturbance" not in json.loads((out / "summary.json").read_text())["figures"]


def without_times(traces: Sequence[Trace]) -> list[object]:
    return [(t.trace_id, t.query, [(u.iterations, u.update) for u in t.updates]) for t in traces]


def test_a_corpus_is_indexed_once_and_its_searches_recorded_and_published(tmp_path: Path) -> None:
    corpus, index, out = tmp_path / "corpus.jsonl", tmp_path / "index", tmp_path / "out"
    corpus.write_text("".join(json.dumps({"text": d.text, "url": d.source}) + "\n" for d in documents()))
    command = (asked(tmp_path, 6), "--out", out, "--index", index, "--corpus", corpus, *OPTIONS)
    done = run(*command, "--gate", "--gate-expansions", "2", "--published", tmp_path / "published")
    assert done.exit_code == 0, done.output
    assert "900 passages of 900 documents" in done.output
    assert "disturbance" in done.output
    traces, published = read_traces(out / "traces.parquet"), read_traces(tmp_path / "published")
    assert [trace.trace_id for trace in traces] == [f"anns-{number}" for number in range(6)]
    for ours, theirs in zip(traces, published, strict=True):
        assert [u.offset_s for u in ours.updates] == [u.offset_s for u in theirs.updates]
        assert [c.text for c in ours.final_chunks] == [c.text for c in theirs.final_chunks]
    corpus.unlink()
    again = run(*command, "--gate", "--gate-expansions", "2")
    assert again.exit_code == 0
    assert "holds an index already: it is searched as it is" in again.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--filter", "{"), "--filter '{': not JSON"),
        (("--filter", '{"year": 1}'), "no column 'year'; its columns are: part"),
        (("--concurrency", "4097"), "concurrency=4097"),
        (("--cold", "--concurrency", "2"), "--concurrency 2 with --cold"),
        (("--ray-actors", "2"), "--ray-actors is for recordings on Ray"),
        (("--api-key-env", "KEY"), "--api-key-env is for endpoints"),
        (("--embedder", "sentence-transformers:"), "embedder 'sentence-transformers:': give"),
        (("--embedder", "sparse"), "sparse.npz"),
        (("--index", "nowhere"), "nowhere is no index, or its build did not finish: give --corpus CORPUS, or build it"),
        (("--index", "nowhere"), "`stream2llm index build CORPUS --out "),
        (("--filter", '{"year": 1}'), "`stream2llm index build CORPUS --out DIR --filterable year`"),
    ],
)
def test_what_cannot_work_is_told_with_the_value_and_the_way_out(
    index: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    found = run(asked(tmp_path, 2), "--out", tmp_path / "out", "--index", index, *options)
    assert found.exit_code == 1
    assert said in found.output.replace("\n", " ")


def test_questions_that_are_none_are_told(index: Path, tmp_path: Path) -> None:
    table = tmp_path / "questions.csv"
    table.write_text("title,text\na,b\n")
    found = run(table, "--out", tmp_path / "out", "--index", index)
    assert found.exit_code == 1
    assert "lacks the column 'problem' or 'question' or 'query'" in found.output
    found = run(tmp_path / "no.txt", "--out", tmp_path / "out", "--index", index)
    assert found.exit_code == 1
    assert "there is no such file" in found.output
    assert not (tmp_path / "out").exists()


def recording(index: Path, out: Path, file: Path, *options: str) -> subprocess.Popen[str]:
    program = "from stream2llm_sdk.cli import app; app()"
    command = [sys.executable, "-c", program, "trace", "record", "anns", file, "--out", out, "--index", index, *OPTIONS]
    return subprocess.Popen([*map(str, command), *options], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def num_done(out: Path) -> int:
    try:
        return (out / "journal.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_killed_at_ten_moments_the_result_is_that_of_an_uninterrupted_recording(index: Path, tmp_path: Path) -> None:
    count, moments = 400, random.Random(7)
    file = asked(tmp_path, count)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with recording(index, whole, file) as uninterrupted:
        said, _ = uninterrupted.communicate()
        assert uninterrupted.returncode == 0, said
    for part in range(1, 11):
        goal = part * count // 11 + moments.randrange(-15, 15)
        with recording(index, killed, file) as run_in_part:
            while num_done(killed) < goal and run_in_part.poll() is None:
                time.sleep(0.001)
            time.sleep(moments.random() / 500)
            assert run_in_part.poll() is None, "it ended before it was killed"
            run_in_part.kill()
        assert num_done(killed) < count
    with recording(index, killed, file) as last:
        said, _ = last.communicate()
        assert last.returncode == 0, said
    assert without_times(read_traces(killed / "traces.parquet")) == without_times(read_traces(whole / "traces.parquet"))
    texts = [json.loads(line[9:])[0] for line in (killed / "documents.jsonl").read_text().splitlines()]
    assert len(texts) == len(set(texts))


@pytest.mark.slow
def test_ctrl_c_ends_it_cleanly_and_says_how_to_go_on(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with recording(index, out, asked(tmp_path, 2_000)) as stopped:
        while num_done(out) < 50:
            time.sleep(0.01)
        children = Path(f"/proc/{stopped.pid}/task/{stopped.pid}/children").read_text().split()
        stopped.send_signal(signal.SIGINT)
        said, _ = stopped.communicate()
    assert stopped.returncode == 130
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert not any(Path("/proc", child).exists() for child in children)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_on_a_local_ray_the_recording_is_the_same_and_goes_on_without_it(index: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data")
    here, there = tmp_path / "here", tmp_path / "there"
    assert run(asked(tmp_path, 60), "--out", here, "--index", index, *OPTIONS).exit_code == 0
    some = run(asked(tmp_path, 60), "--out", there, "--index", index, *OPTIONS, "--limit", 20)
    assert some.exit_code == 0, some.output
    on_ray = ("--ray", "local", "--ray-actors", "2", "--limit", "50")
    more = run(tmp_path / "questions.txt", "--out", there, "--index", index, *OPTIONS, *on_ray)
    assert more.exit_code == 0, more.output
    rest = run(tmp_path / "questions.txt", "--out", there, "--index", index, *OPTIONS)
    assert rest.exit_code == 0, rest.output
    assert without_times(read_traces(there / "traces.parquet")) == without_times(read_traces(here / "traces.parquet"))


@pytest.mark.slow
async def test_what_a_lost_actor_had_is_recorded_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.data")
    monkeypatch.setenv("PYTHONPATH", str(Path(lost_actor.__file__).parent))
    spec = lost_actor.LostOnce(str(tmp_path / "mark"))
    outcomes = record_on_ray("local", num_actors=2, batch_size=8)
    summary = await run_recording(spec, questions(60), tmp_path / "out", outcomes=outcomes)
    assert (tmp_path / "mark").exists()
    assert summary.num_traces == 60


@pytest.mark.slow
def test_what_fails_on_ray_is_told_as_it_is_here(index: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.data")
    command = (asked(tmp_path, 3), "--out", tmp_path / "out", "--index", index, *OPTIONS)
    lost = run(*command, "--ray", "127.0.0.1:9")
    assert lost.exit_code == 1
    assert "Ray cannot be reached at '127.0.0.1:9'" in lost.output
    few = run(*command, "--ray", "local", "--concurrency", "4097")
    assert few.exit_code == 1
    assert "concurrency=4097" in few.output
    assert "Traceback" not in few.output
