"""The notebooks run from top to bottom, each in a kernel of its own, and are kept as they are before that."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
# Whoever calls one of these starts vLLM with a model.
STARTS_AN_ENGINE = {"StreamingRAG", "Stream2LLMEngine", "calibrate"}


def source_of(path: Path) -> str:
    """Its code, in one piece."""
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def called(path: Path) -> set[str]:
    """The names of what its code calls."""
    without_magics = re.sub(r"^(\s*)[!%].*$", r"\1pass", source_of(path), flags=re.MULTILINE)
    tree = compile(without_magics, str(path), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def to_run() -> list[Any]:
    """Each notebook, marked by what it takes to run it."""
    return [
        pytest.param(
            path, id=path.stem, marks=pytest.mark.engine if called(path) & STARTS_AN_ENGINE else pytest.mark.slow
        )
        for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.source.strip()
        assert not cell.get("attachments")
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_place_of_one_machine(path: Path) -> None:
    assert re.findall(r"(?<![\w.:/])/(?:home|root|Users|tmp|work|mnt|opt)\b|\b[A-Z]:\\\\", source_of(path)) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", to_run())
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("<svg" in page for page in pages)
    # Repr of something that ought to show itself, and cannot.
    assert not [output for output in outputs if "object at 0x" in output.get("data", {}).get("text/plain", "")]
    assert list(tmp_path.iterdir()) == []
