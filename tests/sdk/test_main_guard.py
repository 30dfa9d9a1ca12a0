"""Scripts that would start themselves again and again are refused before they do; all others are left alone.

Each case is a program of its own. What `require_main_guard` says is held against what multiprocessing does: a program
prints a line each time its main file is executed, in the main process and in those that it starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

import stream2llm_sdk

# Stands where the engine does: it checks, then starts a process. Of the package it imports no more than that takes.
STAND_IN = f"""
import multiprocessing, sys, types
package = types.ModuleType("stream2llm_sdk")
package.__path__ = [{str(Path(stream2llm_sdk.__file__).parent)!r}]
sys.modules["stream2llm_sdk"] = package
from stream2llm_sdk.main_guard import require_main_guard

def start():
    require_main_guard("The engine")
    process = multiprocessing.get_context("spawn").Process(target=print, args=("started",))
    process.start()
    process.join()

async def start_async():
    start()
"""
TOP = "print('imported')\nfrom stand_in import *\n"


@dataclass(frozen=True)
class Case:
    """A program. `refused_at`: the line in the main file that is named in the error; None if it runs."""

    files: dict[str, str]
    arguments: list[str]
    refused_at: int | None = None
    num_imports: int = 1
    stdin: str = ""
    stderr: str = ""


def script(body: str, *, refused_at: int | None = None, num_imports: int = 1, stderr: str = "") -> Case:
    return Case({"main.py": TOP + dedent(body).lstrip()}, ["main.py"], refused_at, num_imports, stderr=stderr)


# A notebook's kernel: a guarded program that runs cells in a `__main__` of its own, which no file belongs to.
KERNEL = """
import sys, types
if __name__ == "__main__":
    notebook = types.ModuleType("__main__")
    sys.modules["__main__"] = notebook
    exec(compile("from stand_in import *\\nprint('imported')\\nstart()", "<ipython-input-1>", "exec"), vars(notebook))
"""

CASES = {
    "guarded": script(
        """
        def main():
            start()

        if __name__ == "__main__":
            main()
        """,
        num_imports=2,
    ),
    "guarded, asyncio": script(
        """
        import asyncio
        if __name__ == "__main__":
            print("more than one line")
            asyncio.run(
                start_async()
            )
        """,
        num_imports=2,
    ),
    "guarded within other statements": script(
        """
        try:
            with open(__file__):
                if __name__ == "__main__":
                    start()
        finally:
            pass
        """,
        num_imports=2,
    ),
    "guarded in one expression": script("__name__ == '__main__' and start()", num_imports=2),
    "guarded by match": script(
        """
        match __name__:
            case "__main__":
                start()
        """,
        num_imports=2,
    ),
    "guarded by the process's name": script(
        """
        if multiprocessing.current_process().name == "MainProcess":
            start()
        """,
        num_imports=2,
    ),
    # It looks like a guard, but is true while the main script is being imported in the process that was started.
    "unguarded, asking for the parent process": script(
        """
        if multiprocessing.parent_process() is None:
            start()
        """,
        refused_at=4,
    ),
    "unguarded": script("start()", refused_at=3),
    "unguarded, within a condition": script(
        """
        if len(__file__) > 1:
            start()
        """,
        refused_at=4,
    ),
    "unguarded, in a function": script(
        """
        def main():
            if __name__ == "__main__":
                start()

        main()
        """,
        refused_at=7,
    ),
    "unguarded, asyncio": script("import asyncio\nasyncio.run(start_async())", refused_at=4),
    "unguarded, by what it imports": Case(
        {"main.py": "print('imported')\nimport eager\n", "eager.py": "from stand_in import *\nstart()\n"},
        ["main.py"],
        refused_at=2,
    ),
    "unguarded, in code that it executes": script(
        "exec(compile('1\\n' * 9 + 'start()', '<cell>', 'exec'))", refused_at=3
    ),
    # The check cannot see this one; the process that was started does, and starts no other.
    "unguarded, in a thread": script(
        """
        import threading
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        """,
        num_imports=2,
        stderr="ConfigurationError: The engine starts processes",
    ),
    "a program on the command line": Case({}, ["-c", TOP + "start()"]),
    # What was started could not import it, and would fail.
    "a program from the standard input": Case({}, ["-"], stdin=TOP + "start()", stderr="<stdin> is not a file"),
    "a package": Case({"tool/__init__.py": "", "tool/__main__.py": TOP + "start()"}, ["-m", "tool"]),
    "a folder": Case({"tool/__main__.py": "import sys; sys.path.append('.')\n" + TOP + "start()"}, ["tool"]),
    "a module, guarded": Case(
        {"tool/__init__.py": "", "tool/run.py": TOP + "if __name__ == '__main__':\n    start()"},
        ["-m", "tool.run"],
        num_imports=2,
    ),
    "a module, unguarded": Case(
        {"tool/__init__.py": "", "tool/run.py": TOP + "start()"}, ["-m", "tool.run"], refused_at=3
    ),
    "a notebook": Case({"kernel.py": KERNEL}, ["-m", "kernel"]),
}


def run(case: Case, folder: Path) -> subprocess.CompletedProcess[str]:
    for name, text in {"stand_in.py": STAND_IN, **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *case.arguments], cwd=folder, capture_output=True, text=True, input=case.stdin, timeout=120
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.CompletedProcess[str]]]:
    folders = [tmp_path_factory.mktemp("program") for _ in CASES]
    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(CASES, pool.map(run, CASES.values(), folders), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_refused_if_and_only_if_it_would_start_itself_again(
    name: str, outcomes: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    case, ran = CASES[name], outcomes[name]
    lines = ran.stdout.split()
    assert lines.count("imported") == case.num_imports, ran.stderr
    assert case.stderr in ran.stderr
    if case.refused_at is not None:
        main = next(file for file in case.files if file.endswith(("main.py", "run.py")))
        assert (ran.returncode, lines.count("started")) == (1, 0)
        assert "ConfigurationError: The engine starts processes" in ran.stderr
        assert f"{main}, line {case.refused_at})" in ran.stderr
        assert 'if __name__ == "__main__": main()' in ran.stderr
    elif not case.stderr:
        assert (ran.returncode, lines.count("started"), ran.stderr) == (0, 1, "")
