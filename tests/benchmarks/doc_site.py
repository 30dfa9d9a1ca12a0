"""The installed documentation of Python on the loopback, served from a process of its own, and the FAQ's questions."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hit_rate import ROOT, questions

__all__ = ["ROOT", "link_sections", "questions", "serve"]

_SERVER = """
import asyncio, sys
from aiohttp import web

async def serve():
    app = web.Application()
    app.router.add_static("/", sys.argv[1])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[2])).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def link_sections(folder: Path) -> Path:
    """The documentation's pages without those that list all others (contents, indexes), which take ten seconds each to
    convert: links to its sections in a folder, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in ROOT.iterdir():
        if section.is_dir() and not section.name.startswith("_") and not (folder / section.name).exists():
            (folder / section.name).symlink_to(section)
    return folder


@contextlib.contextmanager
def serve(port: int = 0) -> Iterator[str]:
    """The URL of the site.

    Args:
        port: 0 for any that is free.

    Raises:
        SystemExit: the documentation is not installed.
    """
    if not ROOT.is_dir():
        raise SystemExit("missing pages: apt-get install --no-install-recommends python3.11-doc")
    command = [sys.executable, "-c", _SERVER, str(ROOT), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()
