"""These tests need torch and a GPU, and nothing else: where the package is not installed, it is taken from the tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("stream2llm_sdk.serving") is not None
    except ModuleNotFoundError:
        return False


def _take_from_tree() -> None:
    sys.path.insert(0, str(_ROOT))
    folder = _ROOT / "serving"
    spec = importlib.util.spec_from_file_location(
        "stream2llm_sdk.serving", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


# The cases are those of the CPU's tests.
sys.path.append(str(_ROOT / "tests" / "serving"))
if not _is_installed():
    _take_from_tree()
