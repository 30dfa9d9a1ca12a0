"""Which CPU belongs to which search process, so that no two of them share one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["CpuClaim", "claim_cpu", "keep_threads_off", "one_cpu_a_core"]

_TOPOLOGY = Path("/sys/devices/system/cpu")


class CpuClaim:
    """A CPU that this process has for itself, among all that ask for one in this way on the machine.

    It is given up with `release`, or with the process, however that ends.
    """

    def __init__(self, cpu: int, descriptor: int) -> None:
        """Use `claim_cpu()`."""
        self.cpu = cpu
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets others have it. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def claim_cpu(cpus: Iterable[int]) -> CpuClaim | None:
    """Claims one of these CPUs that nobody has claimed yet, the first; None if there is none.

    Raises:
        ConfigurationError: the folder for temporary files cannot be written.
    """
    folder = Path(tempfile.gettempdir(), f"stream2llm-cpus-{os.getuid()}")
    for cpu in cpus:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder / str(cpu), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be written: {error.strerror}. Give another folder for temporary files by TMPDIR"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
        else:
            return CpuClaim(cpu, descriptor)
    return None


def one_cpu_a_core(cpus: Iterable[int]) -> list[int]:
    """One CPU of each physical core, highest first: the others of a core share its execution units, and the lowest
    CPUs are where interrupts and everybody else usually are."""
    chosen: list[int] = []
    seen: set[str] = set()
    for cpu in sorted(cpus, reverse=True):
        try:
            core = (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            chosen.append(cpu)
    return chosen


def keep_threads_off(cpus: Iterable[int]) -> Callable[[], None]:
    """Lets every thread of this process run on the other CPUs only, if there are others; returns what undoes it."""
    before: dict[int, set[int]] = {}
    taken = set(cpus)
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # a thread may have ended
            allowed = os.sched_getaffinity(thread)
            if allowed - taken and allowed & taken:
                os.sched_setaffinity(thread, allowed - taken)
                before[thread] = allowed

    def undo() -> None:
        for thread, allowed in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, allowed)

    return undo
