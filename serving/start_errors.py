"""Why an engine did not start: what its processes logged before they ended, which only their terminal would show."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["noted_errors"]

_CONFIG_PATH = "VLLM_LOGGING_CONFIG_PATH"
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt)): (.+)$", re.MULTILINE)


@contextmanager
def noted_errors() -> Iterator[Callable[[], str]]:
    """Has the processes that vLLM starts meanwhile log their errors into a file too; gives what reads the first one's
    reason, which is '' where there is none. Somebody's own logging configuration is left as it is."""
    if _CONFIG_PATH in os.environ:
        yield lambda: ""
        return
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors.log"
        config = Path(folder) / "logging.json"
        config.write_text(json.dumps(_logging_config(errors)))
        os.environ[_CONFIG_PATH] = str(config)
        try:
            yield lambda: _first_error(errors)
        finally:
            os.environ.pop(_CONFIG_PATH, None)


def _logging_config(errors: Path) -> dict[str, Any]:
    """vLLM's own, and a file beside the terminal."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    config: dict[str, Any] = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["handlers"]["errors"] = {"class": "logging.FileHandler", "filename": str(errors), "level": "ERROR"}
    config["loggers"]["vllm"]["handlers"].append("errors")
    return config


def _first_error(errors: Path) -> str:
    """Of a chain of exceptions the first is the cause."""
    if not errors.exists():
        return ""
    found = _ERROR.search(errors.read_text(errors="replace"))
    return "" if found is None else found.group(2).strip()
