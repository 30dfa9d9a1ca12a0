"""Finds out, before any process is started, whether the user's script would start itself again and again.

Spawned processes import the main script. Without an `if __name__ == "__main__":` guard that import runs the whole
script once more, in every process that it starts.
"""

from __future__ import annotations

import ast
import multiprocessing
import sys
from types import FrameType

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["require_main_guard"]


def require_main_guard(what: str) -> None:
    """Raises if `what` (which starts processes) is being started by a main script at import level, unguarded.

    Raises:
        ConfigurationError: the script has no guard; the message shows the line and the way out.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(_message(what, getattr(sys.modules.get("__main__"), "__file__", None), None))
    frame = _main_module_frame()
    if frame is None:
        return
    path = frame.f_globals.get("__file__")
    if path is None or _is_guarded(path, frame.f_lineno):
        return
    raise ConfigurationError(_message(what, path, frame.f_lineno))


def _message(what: str, path: str | None, line: int | None) -> str:
    place = f"{path or 'the main script'}{f', line {line}' if line else ''}"
    return (
        f"{what} starts processes, and each of them imports the main script, which would start them again ({place}). "
        'Put what the script does into a function and call it behind a guard: if __name__ == "__main__": main()'
    )


def _main_module_frame() -> FrameType | None:
    """The frame of the main script's top level, when that is what runs now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame if frame.f_globals.get("__spec__") is None else None
        frame = frame.f_back
    return None


def _is_guarded(path: str, line: int) -> bool:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return True
    for statement in tree.body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return isinstance(statement, ast.If) and "__name__" in {
                node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)
            }
    return True
