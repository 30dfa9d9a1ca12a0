"""What this process holds: tasks, threads, child processes, open files and sockets. Read from /proc, so on Linux."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import gc
import os
import sys
import threading
from collections import Counter
from pathlib import Path

__all__ = ["Holdings", "grown"]

_POLL_S = 0.02
_IDLE_WORKER = concurrent.futures.thread._worker.__code__  # where a worker waits for work


class Holdings:
    """What there is at one moment, counted by kind: `task crawl`, `thread crawl`, `pool of threads diskann`,
    `process python3`, `socket`, `pipe`, `file /tmp/x`.

    A pool's threads that have nothing to do are one thing together, since a pool fills up as it is used. Those of the
    loop's own executor are left out: they belong to nobody and stay for later work.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        current = asyncio.current_task()
        self.counts.update(f"task {_stem(task.get_name())}" for task in asyncio.all_tasks() if task is not current)
        self.counts.update(_threads())
        self.counts.update(f"process {name}" for name in _children())
        self.counts.update(_open_files())

    def more_than(self, before: Holdings) -> list[str]:
        """What has become more, in words."""
        return [f"{num} x {kind}" for kind, num in sorted((self.counts - before.counts).items())]


async def grown(before: Holdings, settle_s: float) -> list[str]:
    """What has become more since `before` and does not go within `settle_s` seconds. A file or socket that only
    the garbage collector gets at has gone; a task has not."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + settle_s
    while (more := Holdings().more_than(before)) and loop.time() < end_s:
        await asyncio.sleep(_POLL_S)
    if more:
        gc.collect()
        tasks = [what for what in more if " x task " in what]
        more = tasks + [what for what in Holdings().more_than(before) if what not in tasks]
    return more


def _stem(name: str) -> str:
    """A name without its number."""
    return name.rstrip("0123456789").rstrip("-_ ") or name


def _threads() -> list[str]:
    frames = sys._current_frames()
    threads: list[str] = []
    pools: set[tuple[str, int]] = set()
    for thread in threading.enumerate():
        name = _stem(thread.name)
        frame = frames.get(thread.ident or 0)
        if thread.name.startswith("asyncio_"):
            continue
        if frame is not None and frame.f_code is _IDLE_WORKER:
            pools.add((name, id(frame.f_locals.get("work_queue"))))
        else:
            threads.append(f"thread {name}")
    return [*threads, *(f"pool of threads {name}" for name, _ in pools)]


def _children() -> list[str]:
    pids = [pid for task in _listed("/proc/self/task") for pid in _read(f"/proc/self/task/{task}/children").split()]
    return [_read(f"/proc/{pid}/comm").strip() or "that has just ended" for pid in pids]


def _open_files() -> list[str]:
    kinds = []
    for number in _listed("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the listing's own
        kinds.append(f"file {target}" if target.startswith("/") else target.partition(":[")[0])
    return [kind for kind in kinds if not kind.startswith("file /proc/")]


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(file: str) -> str:
    try:
        return Path(file).read_text(errors="replace")
    except OSError:
        return ""
