"""What every benchmark script shares: the command line and the JSON form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Measured = tuple[Mapping[str, float], Sequence[Mapping[str, Any]]]


def main(doc: str | None, measure: Callable[[], Measured]) -> None:
    """Runs a benchmark, prints its figures, and writes `{"figures": {name: number}, "runs": [...]}` if asked."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and runs to this file")
    arguments = parser.parse_args()
    figures, runs = measure()
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"figures": dict(figures), "runs": list(runs)}, indent=2) + "\n")
