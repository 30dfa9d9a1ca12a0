"""The process that drives a recording on Ray, as seen from its side.

Ray's driver is a process of its own because what waits for Ray cannot be interrupted; and so that what Ray prints,
handles and keeps in memory stays out of the application. It ends at once when the socket to it is closed, and what runs
on the cluster for it ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stream2llm_sdk.errors import ConfigurationError, RecordingError, RetrievalError, Stream2LLMError
from stream2llm_sdk.traces.extras import require_ray
from stream2llm_sdk.traces.recording.child_process import framed, frames, unpacked
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome, Recorder, RecorderSpec

__all__ = ["LOCAL_RAY", "Connected", "Done", "PackedRecorder", "RayJob", "Recorded", "serve"]

LOCAL_RAY = "local"
"""The address that starts a Ray of one's own on this machine, for as long as the recording lasts."""

_LOCAL_STORE_BYTES = 256 << 20
_SHUTDOWN_S = 8.0
_REACH_S = 10.0
_NUMBER, _QUESTION, _OUTCOME = "number", "question", "outcome"


@runtime_checkable
class PackedRecorder(Protocol):
    """A recorder whose outcomes come from a process anyway: they can be passed on without a look inside."""

    async def record_packed(self, question: Question) -> bytes:
        """What `unpacked` makes a trace of, or an error."""
        ...


@dataclass(frozen=True, slots=True)
class RayJob:
    """What is to be recorded, and how the work is divided: see `record_on_ray`."""

    address: str
    spec: RecorderSpec
    questions: tuple[Question, ...]
    num_actors: int | None
    cpus_per_actor: float
    batch_size: int | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer: what became of some questions, as the actor packed it: only who keeps it looks inside."""

    packed: tuple[tuple[int, bytes], ...]

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Each outcome, with its question's place in the job.

        Raises:
            Stream2LLMError: one that ends the recording.
        """
        for number, packed in self.packed:
            try:
                outcome: Outcome = unpacked(packed)
            except RecordingError as error:
                outcome = error
            yield number, outcome


@dataclass(frozen=True, slots=True)
class Connected:
    """The first answer: the cluster was reached."""


@dataclass(frozen=True, slots=True)
class Done:
    """The last answer."""


def serve(descriptor: int) -> None:
    """The process's main function: a `RayJob` comes first, and nothing after it."""
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        messages = frames(stream)
        job = next(messages, None)
        if not isinstance(job, RayJob):
            return
        threading.Thread(target=_end_with, args=(connection,), name="hung-up", daemon=True).start()
        try:
            for answer in _answers(job):
                stream.write(framed(answer))
                stream.flush()
        except Stream2LLMError as error:
            stream.write(framed(error))


def _end_with(connection: socket.socket) -> None:
    """Waits for the other end to be closed, and ends this process, whatever its main thread waits for."""
    with contextlib.suppress(OSError):
        connection.recv(1, socket.MSG_PEEK)
    threading.Timer(_SHUTDOWN_S, os._exit, (1,)).start()
    if (ray := sys.modules.get("ray")) is not None:
        # A Ray of our own would end without this too, but some of its processes only after a while.
        with contextlib.suppress(Exception):
            ray.shutdown()
    os._exit(1)


def _answers(job: RayJob) -> Iterator[Connected | Recorded | Done]:
    ray = require_ray()
    _connect(ray, job.address)
    try:
        yield Connected()
        for table in _pipeline(ray, job):
            numbers, outcomes = (table.column(name).to_pylist() for name in (_NUMBER, _OUTCOME))
            yield Recorded(tuple(zip(numbers, outcomes, strict=True)))
        yield Done()
    except ray.exceptions.RayError as error:
        raise RetrievalError(f"recording on Ray failed: {_last_line(error)}") from error
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    own = {"object_store_memory": _LOCAL_STORE_BYTES, "include_dashboard": False} if address == LOCAL_RAY else {}
    try:
        _reach(address)
        ray.init(address=address, **own, **quiet)
    except Exception as error:  # of many kinds, some of none: a plain Exception where it takes too long
        raise ConfigurationError(
            f"Ray cannot be reached at {address!r}: {_last_line(error)}. Give the address of a running cluster, or "
            f"{LOCAL_RAY!r} to start one here"
        ) from error


def _reach(address: str) -> None:
    """Raises OSError where nobody listens: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def _pipeline(ray: Any, job: RayJob) -> Iterator[Any]:
    """Tables of outcomes, one for each batch, as they are done."""
    cpus = ray.cluster_resources().get("CPU", 1.0)
    num_actors = job.num_actors or max(1, int((cpus - 1) / job.cpus_per_actor))
    num_actors = min(num_actors, len(job.questions))
    # One CPU is left for what hands out the questions: without it the pipeline would wait for itself.
    num_cpus = min(job.cpus_per_actor, max(cpus - 1, 0.5) / num_actors)
    share = -(-len(job.questions) // num_actors)
    batch_size = min(share, job.batch_size or max(16, 4 * job.spec.concurrency))
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{_NUMBER: number, _QUESTION: pickle.dumps(question)} for number, question in enumerate(job.questions)]
    dataset = ray.data.from_items(items, override_num_blocks=-(-len(items) // batch_size)).map_batches(
        _RecordingActor,
        fn_constructor_args=(pickle.dumps(job.spec),),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=num_actors, max_tasks_in_flight_per_actor=2, max_concurrent_calls_per_actor=2
        ),
        num_cpus=num_cpus,
    )
    yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)


class _RecordingActor:
    """Records batches of questions on a node of the cluster; two batches overlap, so that none waits for the slowest
    question of the one before. It, and all that its recorder has started, ends with its process."""

    def __init__(self, spec: bytes) -> None:
        self._spec: RecorderSpec = unpacked(spec)
        self._recorder: Recorder | None = None
        self._starting = asyncio.Lock()
        self._permits = asyncio.Semaphore(self._spec.concurrency)

    async def __call__(self, batch: Any) -> Any:
        import pyarrow

        questions = map(unpacked, batch.column(_QUESTION).to_pylist())
        outcomes = await asyncio.gather(*map(self._record, questions))
        outcome = pyarrow.array(outcomes, pyarrow.large_binary())
        return pyarrow.table({_NUMBER: batch.column(_NUMBER), _OUTCOME: outcome})

    async def _record(self, question: Question) -> bytes:
        """The outcome, packed. So is an error that ends the recording: raised here, it would come as one of Ray's."""
        try:
            async with self._starting:
                if self._recorder is None:
                    self._recorder = await self._spec.start()
            async with self._permits:
                if isinstance(self._recorder, PackedRecorder):
                    return await self._recorder.record_packed(question)
                return pickle.dumps(await self._recorder.record(question))
        except Stream2LLMError as error:
            return pickle.dumps(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].rstrip('.') if lines else 'no reason given'}"[:400]
