"""Takes deleted nodes out of a DiskANN graph, in a process of its own.

Run as a script by `memory_graph`, with the request as JSON on standard input: the native call holds the interpreter
lock from start to end. Reads the graph's files and `deleted.npy` in the directory, and leaves `neighbours.npy` and
`degrees.npy` there. This file imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    request: dict[str, Any] = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    _end_with_parent(request["parent_pid"])
    os.environ.setdefault("RUST_LOG", "error")
    import diskannpy
    import numpy as np

    directory = Path(request["directory"])
    index = diskannpy.AsyncDiskIndex(
        str(directory),
        distance_metric=request["metric"],
        vector_dtype=np.float32,
        dimensions=request["dim"],
        r=request["graph_degree"],
        l=request["complexity"],
    )
    index.mark_deleted(np.load(directory / "deleted.npy"))
    index.consolidate_deletes(1)
    num_rows = int(np.fromfile(directory / "ann.data", "<i4", 1)[0])
    neighbours = np.zeros((num_rows, request["width"]), np.uint32)
    degrees = np.zeros(num_rows, np.int32)
    for row in range(num_rows):
        found = index._index.get_neighbors(row)
        neighbours[row, : len(found)] = found
        degrees[row] = len(found)
    np.save(directory / "neighbours.npy", neighbours)
    np.save(directory / "degrees.npy", degrees)


def _end_with_parent(parent_pid: int) -> None:
    """A process whose application was killed must not go on (Linux)."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    main()
