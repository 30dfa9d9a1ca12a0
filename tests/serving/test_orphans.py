"""Workers of a process pool end with the process that they work for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

PROGRAM = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from stream2llm_sdk.serving.orphans import exit_with_parent

def work(number):
    time.sleep(number)
    return os.getpid()

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=exit_with_parent) as pool:
        print(pool.submit(work, 0).result(), flush=True)
        pool.submit(work, 600)
        time.sleep(600)
"""


def test_a_worker_ends_with_its_killed_parent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([worker], timeout=20)
    for process in alive:
        process.kill()
    assert not alive
