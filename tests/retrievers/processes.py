"""What the operating system says about other processes. Nothing in a test can be waited on for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    """A zombie, whose parent has yet to notice, is over."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
