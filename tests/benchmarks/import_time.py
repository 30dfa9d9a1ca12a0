"""How long `import stream2llm_sdk` takes in a new process, beside an empty one and `import asyncio`.

Figure: `import_s`, the median of the differences to an empty process. Expected: about 0.1 s, nearly all of it the
standard library's asyncio, dataclasses and re; at most 0.3.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from harness import main

RUNS = 9


def seconds(statement: str) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, cwd="/")
    return time.perf_counter() - started_s


def measure() -> tuple[dict[str, float], list[dict[str, float]]]:
    statements = {"empty": "pass", "asyncio": "import asyncio", "sdk": "import stream2llm_sdk"}
    for statement in statements.values():
        seconds(statement)
    runs = [{name: seconds(statement) for name, statement in statements.items()} for _ in range(RUNS)]
    figures = {
        "import_s": statistics.median(run["sdk"] - run["empty"] for run in runs),
        "asyncio_import_s": statistics.median(run["asyncio"] - run["empty"] for run in runs),
    }
    return figures, runs


if __name__ == "__main__":
    main(__doc__, measure)
