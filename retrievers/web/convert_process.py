"""The processes that convert pages, as seen from their side.

A fork server imports what conversion needs once, which takes a second, and then forks job processes, which takes 20 to
40 ms. A job converts one page at a time, and up to 64 one after another, since a conversion takes less time than a
fork. So it can be killed at any point and loses nothing but its page, and pages that crash or exhaust a process cannot
harm one another. The fork server is a fresh interpreter without threads of ours, never a fork of the application. The
model that tells languages apart (70 MB) is loaded in it when a page is the first to need it.

Each job has a socket of its own, and speaks in frames: job → application `{"started": true}` or `{"failed": reason}`;
then for each page application → job `{"url": …, "content_type": …, "is_text": …, "options": …}` and the page; job →
application `{"page": …}` and the Markdown, or `{"error": reason}`. A job that has nothing to do for 2 s ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
from dataclasses import replace
from io import BufferedRWPair
from typing import Any, NoReturn

from stream2llm_sdk.retrievers.web.convert import convert_page, warm_up
from stream2llm_sdk.retrievers.web.duplicates import Shingles
from stream2llm_sdk.retrievers.web.page import ExtractionOptions
from stream2llm_sdk.retrievers.web.quality import warm_up_languages

__all__ = ["FRAME_HEAD", "JOB", "JOB_WITH_LANGUAGES", "pack_frame", "serve"]

FRAME_HEAD = struct.Struct(">II")
"""Lengths in bytes of a frame's JSON header and of its body."""

_PAGES_PER_JOB = 64
_IDLE_S = 2.0
_WORN_KIB = 512 * 1024  # of memory, after which a job makes room for a fresh one


JOB, JOB_WITH_LANGUAGES = b"J", b"L"
"""What the fork server is asked for."""


def pack_frame(header: dict[str, Any], body: str | bytes = "") -> bytes:
    """One message between the application and a job."""
    head, payload = json.dumps(header).encode(), body.encode(errors="replace") if isinstance(body, str) else body
    return FRAME_HEAD.pack(len(head), len(payload)) + head + payload


def serve(control_descriptor: int) -> None:
    """The fork server's main function. It receives one socket a job over its control socket and ends when that is
    closed."""
    _yield_to_event_loops()
    failure = _import_failure()
    gc.freeze()  # a collection in a job would copy every page of memory that it shares with us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for jobs, so the kernel reaps them
    with socket.socket(fileno=control_descriptor) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if message == JOB_WITH_LANGUAGES and not failure:
                _load_languages()
            _fork_job(control, descriptors[0], failure)


def _yield_to_event_loops() -> None:
    """Lets whoever answers to others run first when it wakes, at the same share of the processors: a job that has just
    been sent a page would otherwise often interrupt its sender for many milliseconds (`sched(7)`)."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _import_failure() -> str | None:
    try:
        warm_up()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load_languages() -> None:
    """Loads the language model once, for this and all later jobs."""
    try:
        warm_up_languages()
    except Exception:  # the job will find the same, and can say so
        return
    gc.freeze()


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
                _convert_pages(connection, stream)
    finally:
        os._exit(0)


def _convert_pages(connection: socket.socket, stream: BufferedRWPair) -> None:
    for _ in range(_PAGES_PER_JOB):
        if not _waits_for_more(connection):
            return
        header, page = _receive(stream)
        _die_on_hang_up(connection, True)
        reply = _answer(header, page)
        _die_on_hang_up(connection, False)  # the application's reading would raise the signal, too
        _send(stream, *reply)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _WORN_KIB:
            return


def _waits_for_more(connection: socket.socket) -> bool:
    """Whether the application sends a page, or hangs up, before the job has been idle for too long."""
    return bool(select.select([connection], [], [], _IDLE_S)[0])


def _answer(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], str]:
    try:
        options = ExtractionOptions.from_json(header["options"])
        page = convert_page(
            body.decode() if header["is_text"] else body, header["url"], options, content_type=header["content_type"]
        )
        # Here, because a long text takes a tenth of a second of Python.
        page = replace(page, shingle_hashes=tuple(Shingles.of(page.markdown).hashes))
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}, ""
    return {"page": page.to_json()}, page.markdown


def _die_on_hang_up(connection: socket.socket, is_wanted: bool) -> None:
    """Lets the kernel end this process with SIGIO when the application closes its end, even inside C code."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if is_wanted else flags)
    poller = select.poll()
    poller.register(connection, select.POLLHUP)
    if poller.poll(0):  # it was closed before the signal was armed
        os._exit(0)


def _receive(stream: BufferedRWPair) -> tuple[dict[str, Any], bytes]:
    header_size, body_size = FRAME_HEAD.unpack(stream.read(FRAME_HEAD.size))
    return json.loads(stream.read(header_size)), stream.read(body_size)


def _send(stream: BufferedRWPair, header: dict[str, Any], body: str = "") -> None:
    stream.write(pack_frame(header, body))
    stream.flush()
