"""Search processes, as seen from the event loop of whoever records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from stream2llm_sdk.errors import RecordingError, RetrievalError
from stream2llm_sdk.tasks import uncancelled
from stream2llm_sdk.traces.recording.child_process import ChildDied, ChildProcess
from stream2llm_sdk.traces.recording.cpu_claims import keep_threads_off
from stream2llm_sdk.traces.recording.search_process import ONE_THREAD, Asked, Ready, SearchJob

__all__ = ["SearchPool"]

_MODULE = "stream2llm_sdk.traces.recording.search_process"
_ATTEMPTS = 2
_START_S = 600.0


@dataclass(frozen=True, slots=True)
class _SearchProcess:
    child: ChildProcess
    cpu: int

    @classmethod
    async def start(cls, job: SearchJob) -> _SearchProcess:
        """Raises what opening the index raises there."""
        child = await ChildProcess.start(_MODULE, ONE_THREAD)
        try:
            async with asyncio.timeout(_START_S):
                await child.send(job)
                ready = await child.receive()
        except BaseException as error:
            await child.end()
            if isinstance(error, (ChildDied, TimeoutError)):
                reason = str(error) or f"not ready after {_START_S:.0f} s"
                raise RetrievalError(f"a search process does not start: {reason}") from error
            raise
        assert isinstance(ready, Ready), f"the first answer is {type(ready).__name__}"
        return cls(child, ready.cpu)

    async def ask(self, asked: Asked) -> bytes:
        await self.child.send(asked)
        return await self.child.receive_packed()

    async def kill(self) -> None:
        self.child.kill()
        await self.child.end()


class SearchPool:
    """Search processes that are all kept busy, each with one question at a time.

    How the searches keep from disturbing each other's times: each process has a CPU for itself (of a physical core of
    its own, where there are enough), on which no other search process of this user runs, whoever started it, and one
    thread that works; this process keeps off those CPUs as long as there are others; and the times are taken in the
    process, right around the iterations. The memory's bandwidth, the last cache and the disk stay common to all.

    Belongs to one event loop; close it with `aclose`.
    """

    def __init__(self, job: SearchJob) -> None:
        """Use `SearchPool.start()`."""
        self._job = job
        self._free: asyncio.LifoQueue[_SearchProcess | None] = asyncio.LifoQueue()
        self._all: set[_SearchProcess] = set()
        self._undo: Callable[[], None] | None = None

    @classmethod
    async def start(cls, job: SearchJob, size: int) -> SearchPool:
        """Starts the processes and waits until all of them are ready.

        Raises:
            IndexFormatError, MissingExtraError: as `DiskANNIndex.open` does, in a process.
            ConfigurationError: likewise; or no CPU is left for a process.
            RetrievalError: a process cannot be started.
        """
        pool = cls(job)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(size):
                    group.create_task(pool._add())
        except BaseException as error:
            await pool.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        for process in pool._all:
            pool._free.put_nowait(process)
        pool._undo = keep_threads_off(pool.cpus)
        return pool

    @property
    def cpus(self) -> list[int]:
        """The CPUs that the processes have for themselves."""
        return sorted(process.cpu for process in self._all)

    @property
    def process_ids(self) -> list[int]:
        """The processes that are alive."""
        return sorted(process.child.process_id for process in self._all)

    async def search(self, asked: Asked) -> bytes:
        """The answer for one question, packed, from the next process that is free. Cancelling it ends that process.

        A process that died is replaced and the question asked again, once.

        Raises:
            RecordingError: two processes died of it.
            RetrievalError: a process cannot be started.
        """
        process = await self._free.get()
        died: ChildDied | None = None
        try:
            for _ in range(_ATTEMPTS):
                if process is None:
                    process = await self._add()
                try:
                    return await process.ask(asked)
                except BaseException as error:
                    broken, process = process, None
                    self._all.discard(broken)
                    await uncancelled(broken.kill())
                    if not isinstance(error, ChildDied):
                        raise
                    died = error
        finally:
            self._free.put_nowait(process)
        raise RecordingError(f"its search process died {_ATTEMPTS} times: {died}")

    async def aclose(self) -> None:
        """Ends the processes. A second call does nothing."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        ended, self._all = self._all, set()
        await asyncio.gather(*(process.child.end() for process in ended))

    async def _add(self) -> _SearchProcess:
        process = await _SearchProcess.start(self._job)
        self._all.add(process)
        return process
