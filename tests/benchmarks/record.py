"""What recording costs: the figures of `record_crawl.py`, `record_ray.py` and `record_rag.py`, each run in a process of
its own. What each measures, and what is asked and expected, stands in it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Measured, main

PARTS = sorted(Path(__file__).parent.glob("record_*.py"))


def measure() -> Measured:
    figures: dict[str, float] = {}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            file = Path(folder, f"{part.stem}.json")
            subprocess.run([sys.executable, str(part), "--json", str(file)], check=True)
            found = json.loads(file.read_text())
            figures |= found["figures"]
            runs += [{"part": part.stem, **run} for run in found["runs"]]
    return figures, runs


if __name__ == "__main__":
    main(__doc__, measure)
