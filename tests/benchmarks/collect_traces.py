"""Collects traces of real retrieval on one machine, looks at them and plays them back: the proof that recording works.

    python tests/benchmarks/collect_traces.py crawl DIR
    python tests/benchmarks/collect_traces.py anns DIR

`crawl`: the 175 questions of the Python FAQ, each with a local search's five best pages of the installed documentation,
which is served on the loopback. Recorded by `stream2llm trace record crawl` in both forms; `trace stats` of it; both
forms read back, and replayed in the simulator, streaming and not, with equal results.

`anns`: all of the installed documentation in 64,700 passages, indexed, and 500 questions searched for, k 10,
L 320, W 8, every pool. Recorded by `stream2llm trace record anns`; the rest is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doc_corpus import doc_questions, write_corpus
from doc_site import link_sections, questions, serve

ARRIVALS_PER_S = 2.0
PASSAGE_TOKENS = 200
FIGURES = (
    "num_requests",
    "ttft_from_context_complete_p50_s",
    "ttft_from_context_complete_p95_s",
    "ttft_from_request_p50_s",
    "num_tokens_recomputed",
)


def stream2llm(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "stream2llm_sdk.cli", *map(str, arguments)], check=True)


def collect_crawls(folder: Path, *options: str) -> None:
    """Records, describes and compares; what is recorded already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.txt").write_text("\n".join(text for text, _ in questions()) + "\n", encoding="utf-8")
    # A port of its own for good: the URLs are part of what is recorded.
    with serve(port=18_923) as base:
        command = ["trace", "record", "crawl", folder / "questions.txt", "--out", folder / "crawls"]
        command += [
            "--search",
            f"local:{link_sections(folder / 'pages')}@{base}",
            "--max-pages",
            5,
            "--max-depth",
            0,
            "--no-robots",
        ]
        command += ["--allow-network", "127.0.0.0/8", "--per-host-concurrency", 8]
        stream2llm(*command, "--published", folder / "crawls_published", *options)
    stream2llm("trace", "stats", folder / "crawls" / "traces.parquet", "--json", folder / "crawls_stats.json")
    compare(folder / "crawls" / "traces.parquet", folder / "crawls_published")


def collect_searches(folder: Path, *options: str) -> None:
    """As `collect_crawls`."""
    from stream2llm_sdk.traces.recording.published_searches import as_published

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "questions.jsonl").is_file():
        titles = write_corpus(folder / "corpus.parquet")
        doc_questions(folder / "questions.jsonl", titles, 500)
    command = ["trace", "record", "anns", folder / "questions.jsonl", "--out", folder / "searches"]
    command += ["--corpus", folder / "corpus.parquet", "--index", folder / "index", "--passage-tokens", PASSAGE_TOKENS]
    command += ["-k", 10, "-L", 320, "--beam-width", 8, "--published", folder / "searches_published"]
    stream2llm(*command, *options)
    stream2llm("index", "info", folder / "index")
    stream2llm("trace", "stats", folder / "searches" / "traces.parquet", "--json", folder / "searches_stats.json")
    compare(folder / "searches" / "traces.parquet", folder / "searches_published", as_published)


def compare(own: Path, published: Path, as_published: Callable[[Any], Any] = lambda trace: trace) -> None:
    """Both forms of a recording replayed in the simulator; raises SystemExit where they differ."""
    from stream2llm_sdk.traces import read_traces

    ours, theirs = [as_published(trace) for trace in read_traces(own)], read_traces(published)
    for trace, again in zip(ours, theirs, strict=True):
        told = [
            (
                one.trace_id,
                one.query,
                [(u.offset_s, [(c.text, c.source) for c in u.update.chunks]) for u in one.updates],
            )
            for one in (trace, again)
        ]
        if told[0] != told[1]:
            raise SystemExit(f"{trace.trace_id} is not the same in the published form")
    figures = [replayed(set_, streaming) for streaming in (True, False) for set_ in (ours, theirs)]
    if figures[0] != figures[1] or figures[2] != figures[3]:
        raise SystemExit(f"the forms do not replay alike: {figures}")
    for name, found in (("streaming", figures[0]), ("not streaming", figures[2])):
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()))
    print(f"{len(ours)} traces are the same in both forms, and replay alike")


def replayed(traces: Any, streaming: bool) -> dict[str, float]:
    """Seconds to the first tokens and what had to be computed twice, for Llama 3.1 8B on one simulated H100."""
    from stream2llm_sdk.demo.model import ensure_demo_model
    from stream2llm_sdk.serving.simulator import hardware
    from stream2llm_sdk.serving.simulator.latency import step_latency
    from stream2llm_sdk.tokenizer import load_tokenizer
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.replay import ReplayOptions, Simulation, replay

    model, machine = hardware.LLAMA_3_1_8B, hardware.PROFILES["h100"]
    arguments = {
        "num_gpu_blocks": hardware.num_kv_blocks(model, machine, 1),
        "latency": step_latency(model, machine, 1),
        "cost_model": hardware.cost_model(model, machine, 1),
    }

    async def run() -> Any:
        tokenizer = load_tokenizer(await ensure_demo_model())
        options = ReplayOptions(streaming=streaming, arrivals=Arrivals(rate_per_s=ARRIVALS_PER_S), max_tokens=16)
        return await replay(traces, Simulation("FCFS", arguments, tokenizer), options)

    found = asyncio.run(run()).summary()
    return {name: found[name] for name in FIGURES}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["crawl", "anns"])
    parser.add_argument("folder", type=Path)
    arguments, more = parser.parse_known_args()
    {"crawl": collect_crawls, "anns": collect_searches}[arguments.kind](arguments.folder, *more)
