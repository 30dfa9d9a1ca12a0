"""Recording on a Ray cluster: the same recorders, in actors, their outcomes streamed back to who writes them down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from importlib.util import find_spec

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.tasks import uncancelled
from stream2llm_sdk.traces.recording.child_process import ChildDied, ChildProcess
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.ray_process import LOCAL_RAY, Connected, Done, RayJob
from stream2llm_sdk.traces.recording.recorder import Outcome, OutcomeSource, RecorderSpec

__all__ = ["LOCAL_RAY", "record_on_ray"]

_MODULE = "stream2llm_sdk.traces.recording.ray_process"
_CONNECT_S = 120.0
# No reports over the network, and nothing to read them from.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


def record_on_ray(
    address: str = "auto",
    *,
    num_actors: int | None = None,
    cpus_per_actor: float = 1.0,
    batch_size: int | None = None,
) -> OutcomeSource:
    """A source of outcomes for `run_recording` that records in the actors of a Ray Data pipeline.

    Each actor makes a recorder of its own from the spec, and has up to `spec.concurrency` questions under way. What a
    recorder needs (the package, an index, the network) must be there, at the same path, on every node. A batch whose
    actor is lost is done again elsewhere, by Ray. All outcomes come back to this machine, which alone writes the
    recording: its folder is the same as without Ray, and either goes on where the other stopped.

    Args:
        address: of the cluster, as `ray.init` takes it ("auto", "ray://HOST:10001", "HOST:6379"), or "local" for a Ray
            on this machine, for as long as the recording lasts.
        num_actors: if left out, as many as the cluster has CPUs for, but one CPU.
        cpus_per_actor: CPUs that an actor keeps busy; Ray is asked for less where the cluster has too few, since it
            would wait for ever.
        batch_size: most questions that an actor is sent at once, and that are done again when it is lost: no more than
            its share. If left out, 16, or four times the concurrency if that is more.

    Raises:
        ConfigurationError: a number is out of range, or, when it starts, the cluster cannot be reached.
        MissingExtraError: Ray is not installed.
        RetrievalError: while it records: Ray failed.
    """
    for name, number in (("num_actors", num_actors), ("batch_size", batch_size)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigurationError(f"{name}={number!r:.80}: give a whole number of at least 1, or None")
    if not isinstance(address, str) or not address.strip():
        raise ConfigurationError(f"address={address!r:.80}: give a Ray cluster's address, 'auto' or {LOCAL_RAY!r}")
    if isinstance(cpus_per_actor, bool) or not isinstance(cpus_per_actor, (int, float)) or not 0 < cpus_per_actor < 1e4:
        raise ConfigurationError(f"cpus_per_actor={cpus_per_actor!r:.80}: give CPUs, more than 0")
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")

    async def outcomes(
        spec: RecorderSpec, questions: Sequence[Question]
    ) -> AsyncGenerator[tuple[Question, Outcome], None]:
        child = await ChildProcess.start(_MODULE, _ENVIRONMENT)
        try:
            await child.send(RayJob(address, spec, tuple(questions), num_actors, float(cpus_per_actor), batch_size))
            await _connected(child, address)
            while not isinstance(answer := await child.receive(), Done):
                for number, outcome in answer.outcomes():
                    yield questions[number], outcome
        except ChildDied as error:
            raise RetrievalError(f"recording on Ray failed: the driver died: {error}") from error
        finally:
            await uncancelled(child.end())

    return outcomes


async def _connected(child: ChildProcess, address: str) -> None:
    try:
        async with asyncio.timeout(_CONNECT_S):
            answer = await child.receive()
    except TimeoutError:
        raise ConfigurationError(
            f"Ray at {address!r} does not answer within {_CONNECT_S:.0f} s. Give the address of a running cluster, or "
            f"{LOCAL_RAY!r} to start one here"
        ) from None
    assert isinstance(answer, Connected), f"the first answer is {type(answer).__name__}"
