"""The processes that convert pages, as seen from their side.

A fork server imports crawl4ai once, which takes seconds, and then forks one job process a page, which takes
milliseconds. So a job can be killed at any point and loses nothing but itself, and pages that crash or exhaust a
process cannot harm one another. The fork server is a fresh interpreter without threads of ours, never a fork of the
application.

Each job has a socket of its own, and speaks in frames:
job → application `{"started": true}` or `{"failed": reason}`; application → job `{"url": url}` and the HTML;
job → application `{"title": title}` and the Markdown, or `{"error": reason}`.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
from io import BufferedRWPair
from typing import Any, NoReturn

from stream2llm_sdk.retrievers.web.convert import convert_html, prepare_crawl4ai

__all__ = ["FRAME_HEAD", "pack_frame", "serve"]

FRAME_HEAD = struct.Struct(">II")
"""Lengths in bytes of a frame's JSON header and of its body."""


def pack_frame(header: dict[str, Any], body: str = "") -> bytes:
    """One message between the application and a job."""
    head, payload = json.dumps(header).encode(), body.encode(errors="replace")
    return FRAME_HEAD.pack(len(head), len(payload)) + head + payload


def serve(control_descriptor: int) -> None:
    """The fork server's main function. It receives one socket a job over its control socket and ends when that is
    closed."""
    failure = _import_failure()
    gc.freeze()  # a collection in a job would copy every page of memory that it shares with us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for jobs, so the kernel reaps them
    with socket.socket(fileno=control_descriptor) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            _fork_job(control, descriptors[0], failure)


def _import_failure() -> str | None:
    try:
        prepare_crawl4ai()
        convert_html("<html><body><p>warm</p></body></html>", "http://localhost/")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _fork_job(control: socket.socket, descriptor: int, failure: str | None) -> None:
    with socket.socket(fileno=descriptor) as connection:
        try:
            is_job = os.fork() == 0
        except OSError:  # no memory or no process left: closing the socket tells the application
            return
        if is_job:
            control.close()
            _run_job(connection, failure)


def _run_job(connection: socket.socket, failure: str | None) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        with connection.makefile("rwb") as stream:
            _send(stream, {"started": True} if failure is None else {"failed": failure})
            if failure is None:
                header, html = _receive(stream)
                _die_on_hang_up(connection, True)
                reply = _answer(html, header["url"])
                _die_on_hang_up(connection, False)  # the application's reading would raise the signal, too
                _send(stream, *reply)
    finally:
        os._exit(0)


def _answer(html: str, url: str) -> tuple[dict[str, Any], str]:
    try:
        page = convert_html(html, url)
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}, ""
    return {"title": page.title}, page.markdown


def _die_on_hang_up(connection: socket.socket, is_wanted: bool) -> None:
    """Lets the kernel end this process with SIGIO when the application closes its end, even inside C code."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if is_wanted else flags)
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    if poller.poll(0):  # it was closed before the signal was armed
        os._exit(0)


def _receive(stream: BufferedRWPair) -> tuple[dict[str, Any], str]:
    header_size, body_size = FRAME_HEAD.unpack(stream.read(FRAME_HEAD.size))
    return json.loads(stream.read(header_size)), stream.read(body_size).decode()


def _send(stream: BufferedRWPair, header: dict[str, Any], body: str = "") -> None:
    stream.write(pack_frame(header, body))
    stream.flush()
