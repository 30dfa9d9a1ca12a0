"""DiskANN's native build in a process of its own.

Run as a script by `build`, with the request as JSON on standard input. The native build holds the
interpreter lock from start to end (minutes for a million vectors), prints to standard output, and can panic;
here none of that reaches the application. This file imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    request: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    _end_with_parent(request["parent_pid"])
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import numpy as np
        from diskannpy import build_disk_index

        build_disk_index(vector_dtype=np.float32, **request["arguments"])
    except BaseException as error:  # a native panic is no Exception
        Path(request["error_file"]).write_text(f"{type(error).__name__}: {error}", "utf-8", "replace")
        return 1
    return 0


def _end_with_parent(parent_pid: int) -> None:
    """A build whose application was killed must not go on for minutes on its own (Linux)."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
