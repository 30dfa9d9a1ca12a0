"""Renders `pydoc` pages in a process of its own: pydoc imports what it documents, and that must not stay behind.

Run as `python pages.py MODULE...`; writes one JSON object to standard output, module name to HTML. Uses the
standard library alone, so that it runs by its path whatever the caller's import path is.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pydoc
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["render_pages"]

_ADDRESS = re.compile(r"(?: |&nbsp;)at(?: |&nbsp;)0x[0-9a-fA-F]+")


class _ModuleDoc(pydoc.HTMLDoc):
    """pydoc's own pages, with their lists of links marked as navigation, as on other sites, and without the path of
    the source file, which differs from machine to machine."""

    def heading(self, title: str, extras: str = "") -> str:
        return super().heading(title, f"<nav>{extras}</nav>")

    def multicolumn(self, *args: Any, **kwargs: Any) -> str:
        return f"<nav>{super().multicolumn(*args, **kwargs)}</nav>"

    def formattree(self, *args: Any, **kwargs: Any) -> str:
        return f"<nav>{super().formattree(*args, **kwargs)}</nav>"

    def filelink(self, url: str, path: str) -> str:
        return Path(path).name


def _render(name: str) -> str | None:
    """One page, or None for a module that cannot be imported here."""
    try:
        module = importlib.import_module(name)
    except Exception:  # whatever a module of another platform raises
        return None
    doc = _ModuleDoc()
    return _ADDRESS.sub("", doc.page(pydoc.describe(module), doc.docmodule(module, name)))


def _main(names: Sequence[str]) -> None:
    # Importing may print (there are modules in the library that do); only the pages go to standard output.
    output, sys.stdout = sys.stdout, sys.stderr
    pages = {name: html for name in names if (html := _render(name)) is not None}
    json.dump(pages, output)


async def render_pages(modules: Sequence[str]) -> dict[str, str]:
    """Returns the HTML documentation of `modules`, by module name in the given order.

    A module that cannot be imported is left out. The pages are the same in every run of one Python. Cancelling
    ends the child process.

    Raises:
        RuntimeError: the child process failed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        __file__,
        *modules,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"rendering the documentation failed (exit status {process.returncode}): {reason}")
    pages: dict[str, str] = json.loads(output)
    return pages


if __name__ == "__main__":
    _main(sys.argv[1:])
