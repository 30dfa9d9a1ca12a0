"""Finds out, before any process is started, whether the user's script would start itself again and again.

Spawned processes import the main script. Without an `if __name__ == "__main__":` guard that import runs the whole
script once more, in every process that it starts.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
from types import FrameType, ModuleType

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["require_main_guard"]

# A condition that mentions one of these tells the main process from those that it starts.
_TELLING_NAMES = frozenset({"__name__", "current_process"})


def require_main_guard(what: str) -> None:
    """Raises if `what` (which starts processes) is being started by a main script at import level, unguarded, or by
    one that those processes cannot import.

    Raises:
        ConfigurationError: the script has no guard, or is no file; the message shows the line and the way out.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(_message(what, path, None))
    if main is None or path is None or not _is_imported_again(main):
        return
    if main.__spec__ is None and not os.path.exists(path):  # piped into the interpreter
        raise ConfigurationError(
            f"{what} starts processes, and each of them imports the main script, but {path} is not a file. "
            "Save the program to a file and run that"
        )
    line = _running_line(path)
    if line is not None and not _is_guarded(path, line):
        raise ConfigurationError(_message(what, path, line))


def _message(what: str, path: str | None, line: int | None) -> str:
    place = f"{path or 'the main script'}{f', line {line}' if line else ''}"
    return (
        f"{what} starts processes, and each of them imports the main script, which would start them again ({place}). "
        'Put what the script does into a function and call it behind a guard: if __name__ == "__main__": main()'
    )


def _is_imported_again(main: ModuleType) -> bool:
    # A package's `__main__`, a folder's or an archive's is what multiprocessing leaves out.
    return main.__spec__ is None or main.__spec__.name.rpartition(".")[2] != "__main__"


def _running_line(path: str) -> int | None:
    """The line of the main script's top level that is running now; None if this was not called from there."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and _is_same_file(code.co_filename, path):
            return frame.f_lineno
        frame = frame.f_back
    return None


def _is_same_file(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def _is_guarded(path: str, line: int) -> bool:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return True
    return any(
        node.lineno <= line <= (node.end_lineno or node.lineno) and _tells_processes_apart(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp, ast.Match))
    )


def _tells_processes_apart(node: ast.If | ast.IfExp | ast.BoolOp | ast.Match) -> bool:
    if isinstance(node, ast.BoolOp):
        condition: ast.expr = node.values[0]
    else:
        condition = node.subject if isinstance(node, ast.Match) else node.test
    names = {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(condition)}
    return not names.isdisjoint(_TELLING_NAMES)
