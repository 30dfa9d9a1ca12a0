"""Writes the pages that come out of the code: every public name, and every command."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "COMMAND_LINE",
    "REFERENCE",
    "command_line_page",
    "commands",
    "data_doc",
    "for_sphinx",
    "reference_page",
    "signature_of",
    "write_reference",
]

REFERENCE: dict[str, Sequence[str]] = {
    "stream2llm_sdk": ["stream2llm_sdk"],
    "retrievers": ["stream2llm_sdk.retrievers", "stream2llm_sdk.retrievers.embedding"],
    "serving": ["stream2llm_sdk.serving"],
    "simulator": ["stream2llm_sdk.serving.simulator"],
    "traces": [
        "stream2llm_sdk.traces",
        "stream2llm_sdk.traces.arrivals",
        "stream2llm_sdk.traces.synthesis",
        "stream2llm_sdk.traces.replay",
        "stream2llm_sdk.traces.report",
        "stream2llm_sdk.traces.reproduce",
    ],
    "testing": ["stream2llm_sdk.testing"],
    "demo": ["stream2llm_sdk.demo"],
    "errors": ["stream2llm_sdk.errors"],
}
"""The pages of the reference, and the packages whose public names each explains."""

COMMAND_LINE = "command-line.md"


def write_reference(folder: Path) -> None:
    """Writes what these pages are built from; a page that would not change is left as it is."""
    pages = {f"reference/{name}.rst": reference_page(packages) for name, packages in REFERENCE.items()}
    pages[COMMAND_LINE] = command_line_page()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


# ---- public names ---------------------------------------------------------------------------------------------------


def reference_page(packages: Sequence[str]) -> str:
    """A page that explains all public names of some packages, each once."""
    lines: list[str] = []
    known: set[int] = set()
    for package in packages:
        module = importlib.import_module(package)
        lines += [package, ("-" if lines else "=") * len(package), "", *_module_doc(module), ""]
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in known:
                lines += [*_directive(package, name, value), ""]
            known.add(id(value))
    return "\n".join(lines)


def _module_doc(module: Any) -> list[str]:
    """A module's docstring; a tree that is drawn in it stays as it is drawn."""
    doc = inspect.cleandoc(module.__doc__ or "")
    summary, _, rest = doc.partition("\n\n")
    if "├" not in rest:
        return doc.splitlines()
    return [summary, "", ".. code-block:: text", "", *(f"   {line}" for line in rest.splitlines())]


def _directive(package: str, name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [f".. autoclass:: {package}.{name}"]
    if inspect.isfunction(value):
        return [f".. autofunction:: {package}.{name}"]
    return [
        f".. py:data:: {package}.{name}",
        "",
        *(f"   {line}" for line in (data_doc(package, name) or "").splitlines()),
    ]


def data_doc(package: str, name: str) -> str | None:
    """The text under a public constant or type alias, wherever it is defined; None if there is none."""
    module = importlib.import_module(package)
    lazy = getattr(module, "_MODULES", {})
    if name in lazy:
        module = importlib.import_module(f"{package}.{lazy[name]}")
    body = ast.parse(inspect.getsource(module)).body
    for statement, after in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(after, "value", None)
            is_text = isinstance(after, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)
            return inspect.cleandoc(value.value) if is_text and value is not None else None
    for statement in body:  # from where this package has it
        if isinstance(statement, ast.ImportFrom) and statement.module and name in [a.name for a in statement.names]:
            return data_doc(statement.module, name)
    return None


def for_sphinx(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring where it is Markdown and Sphinx reads something else: code that is only indented, and
    tables. Called for each with its lines, which it changes in place."""
    text = "\n".join(lines)
    # Behind a paragraph and an empty line; what a section such as `Args:` holds follows its heading directly.
    text = re.sub(r"(?m)^(\S.*[^:\n])\n\n(?=    \S)", r"\1\n\n::\n\n", text)
    text = re.sub(r"(?m)^(?:\|.*\n?)+", lambda table: _list_table(table[0]), text)
    lines[:] = text.split("\n")


def signature_of(app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any) -> Any:
    """No arguments for a class that only the SDK makes, as its docstring says."""
    is_made_by = what == "class" and re.search(r"\b[Mm]ade by `", obj.__doc__ or "")
    return ("", returns) if is_made_by else None


def _list_table(table: str) -> str:
    rows = [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()]
    head, _, *body = rows
    made = [".. list-table::", "   :header-rows: 1", ""]
    for row in (head, *body):
        made += [f"   {'* - ' if number == 0 else '  - '}{cell}" for number, cell in enumerate(row)]
    return "\n".join([*made, "", ""])


# ---- the command line -----------------------------------------------------------------------------------------------


def commands(command: Any = None, path: str = "stream2llm") -> Iterator[tuple[str, Any]]:
    """A command (left out, all there is) and all below it, each with what is typed to call it."""
    if command is None:
        from typer.main import get_command

        from stream2llm_sdk.cli import app

        command = get_command(app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def command_line_page() -> str:
    """What `--help` says of every command."""
    from typer.testing import CliRunner

    from stream2llm_sdk.cli import app

    lines = ["# Command line", "", "What `--help` says of every command.", ""]
    for path, _ in commands():
        shown = CliRunner().invoke(app, [*path.split()[1:], "--help"], prog_name="stream2llm", env={"COLUMNS": "100"})
        lines += [f"## {path}", "", "```text", shown.output.strip(), "```", ""]
    return "\n".join(lines)
