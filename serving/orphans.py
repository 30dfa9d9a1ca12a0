"""Ends processes when the one that they serve has died.

vLLM's workers end with their core; the core itself would live on, with the model in memory, when its parent is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

__all__ = ["end_with_parent", "exit_with_parent"]

_GRACE_S = 5.0


def end_with_parent() -> None:
    """Watches the parent from a thread, if this is vLLM's engine-core process; else nothing."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        threading.Thread(target=_watch, args=(parent.sentinel,), name="stream2llm-parent-watch", daemon=True).start()


def exit_with_parent() -> None:
    """Has a worker of a process pool end at once when its parent has died; it would go on with what is queued."""
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(
            target=_exit_after, args=(parent.sentinel,), name="stream2llm-parent-watch", daemon=True
        ).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way to end: the workers are told
    time.sleep(_GRACE_S)
    os._exit(1)
