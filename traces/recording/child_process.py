"""A process of this package's own, and the frames that pass between it and the event loop of whoever started it.

It is a fresh interpreter that does not import `__main__`, so a script needs no `if __name__ == "__main__"` guard.
Frames are pickled: both ends are this package, and the socket between them is open to nobody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from io import BufferedRWPair
from typing import Any, BinaryIO

from stream2llm_sdk.errors import RetrievalError, Stream2LLMError

__all__ = ["ChildDied", "ChildProcess", "framed", "frames", "unpacked"]

_PROGRAM = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve(int(sys.argv[3]))
"""
_HEAD = struct.Struct(">Q")
"""A frame's length in bytes, which precedes it."""

_END_S = 10.0
_MAX_LAST_WORDS = 2_000


def framed(message: object) -> bytes:
    """A message as it is sent."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(content)) + content


def frames(stream: BinaryIO | BufferedRWPair) -> Iterator[Any]:
    """The messages that come, until the other end is closed: the child's side."""
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        (length,) = _HEAD.unpack(head)
        content = stream.read(length)
        if len(content) < length:
            return
        yield pickle.loads(content)  # noqa: S301 - from the process that started this one


def unpacked(content: bytes) -> Any:
    """A message again. One that is an error of the SDK is raised."""
    message = pickle.loads(content)  # noqa: S301 - from a process of our own
    if isinstance(message, Stream2LLMError):
        raise message
    return message


class ChildDied(Exception):
    """A process ended without an answer; the text says how, and what it said last."""


class ChildProcess:
    """One process, which ends when its socket is closed, also by the end of this process, however that comes.

    Belongs to one event loop; end it with `end`.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        said: BinaryIO,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Use `ChildProcess.start()`."""
        self._process, self._said = process, said
        self._reader, self._writer = reader, writer

    @classmethod
    async def start(cls, module: str, environment: Mapping[str, str]) -> ChildProcess:
        """Starts a process that calls `serve(descriptor)` of a module.

        Raises:
            RetrievalError: the system has no process left.
        """
        ours, theirs = socket.socketpair()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        with theirs:
            command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), module, str(theirs.fileno())]
            try:
                # Not asyncio's: the subprocesses of some other event loops cannot have a group of their own.
                process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds
                    command,
                    env={**os.environ, **environment},
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    process_group=0,  # Ctrl-C in a terminal is the recording's
                )
            except OSError as error:
                ours.close()
                said.close()
                raise RetrievalError(f"a process cannot be started: {error.strerror}") from error
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, said, reader, writer)

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def send(self, message: object) -> None:
        """Raises ChildDied when the process is no more."""
        try:
            self._writer.write(framed(message))
            await self._writer.drain()
        except ConnectionError:
            raise await self._died() from None

    async def receive(self) -> Any:
        """The next message. One that is an error of the SDK is raised.

        Raises:
            ChildDied: the process is no more.
        """
        return unpacked(await self.receive_packed())

    async def receive_packed(self) -> bytes:
        """The next message as it came, for `unpacked` to look into: here, or wherever it is passed on to.

        Raises:
            ChildDied: the process is no more.
        """
        try:
            (length,) = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._died() from None

    async def end(self) -> None:
        """Closes the socket and waits until the process has ended; kills it when that takes too long."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._said.close()

    def kill(self) -> None:
        """Does not wait; `end` does."""
        self._process.kill()

    async def _died(self) -> ChildDied:
        status = await asyncio.to_thread(self._process.wait)
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _MAX_LAST_WORDS))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return ChildDied(f"it ended with status {status}" + (f": {lines[-1].strip():.300}" if lines else ""))
