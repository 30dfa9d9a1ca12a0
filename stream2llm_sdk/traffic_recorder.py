"""Recording an application's traffic as traces, beside its work and never in its way."""

from __future__ import annotations

import atexit
import logging
import queue
import random
import secrets
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from stream2llm_sdk.context_log import AskedQuestion
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import require_own_folder
from stream2llm_sdk.traces.traffic_format import TrafficSegment, traffic_files
from stream2llm_sdk.traffic_recording import KeptTexts, TrafficRecording
from stream2llm_sdk.traffic_traces import TraceMaker

__all__ = ["TrafficRecorder"]

_LOG = logging.getLogger(__name__)
_SIZES_EVERY_S = 1.0


class TrafficRecorder:
    """Writes what `StreamingRAG` hands to it, in a thread of its own.

    On the event loop a question costs a few tuples; traces are made and written elsewhere. Whatever goes wrong there (a
    full disk, a folder that is gone) is logged once and counted, and the application goes on.

    Args:
        recording: where and how.

    Attributes:
        recording: the same.
        num_written: traces that are in the folder.
        num_left_out: questions that `sample` left out.

    Raises:
        ConfigurationError: the folder cannot be written, or holds something else.
    """

    def __init__(self, recording: TrafficRecording) -> None:
        self.recording = recording
        self.num_written = 0
        self.num_left_out = 0
        self._folder = Path(recording.folder).absolute()
        _prepare(self._folder)
        self._num_overrun = self._num_lost = 0  # each counted by one thread
        self._queue: queue.Queue[AskedQuestion | None] = queue.Queue(recording.max_queued)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._told: set[str] = set()
        texts = KeptTexts(recording.texts)
        self._segment = TrafficSegment(self._folder, time.time(), texts.value)
        self._maker = TraceMaker(
            texts,
            recording.key or secrets.token_bytes(32),
            begun_s=time.monotonic(),
            prefix=secrets.token_hex(6),
            tell=lambda message: self._tell("metadata", message),
        )
        self._others_bytes, self._looked_s = 0, -1.0

    def __repr__(self) -> str:
        counts = f"{self.num_written:,} traces written, {self.num_dropped:,} dropped"
        return f"<TrafficRecorder {str(self._folder)!r}, {counts}>"

    @property
    def num_dropped(self) -> int:
        """Traces that were lost: too many waited, or they could not be written."""
        return self._num_overrun + self._num_lost

    @property
    def num_queued(self) -> int:
        """Traces that wait to be written, about."""
        return self._queue.qsize()

    @property
    def num_bytes(self) -> int:
        """What was written so far."""
        return self._segment.num_bytes

    # ---- on the event loop --------------------------------------------------------------------------------------

    def wants_next(self) -> bool:
        """Whether the question that is asked now is to be recorded."""
        if self._closed:
            return False
        if self.recording.sample < 1 and random.random() >= self.recording.sample:
            self.num_left_out += 1
            return False
        return True

    def take(self, asked: AskedQuestion) -> None:
        """Takes a question that has ended. Never waits and never fails."""
        if self._closed:
            self._num_overrun += 1
            return
        try:
            if self._thread is None:
                self._start()
            self._queue.put_nowait(asked)
        except queue.Full:
            self._num_overrun += 1
            self._tell("queue", f"{self.recording.max_queued:,} traces wait to be written: others are dropped, counted")
        except RuntimeError as error:  # the process can have no more threads
            self._num_overrun += 1
            self._tell("thread", f"traffic cannot be recorded: {error}")

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what waits, for at most so many seconds, and ends the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._thread is None:
            return
        deadline_s = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._tell("close", f"{self.num_queued:,} traces could not be written within {timeout_s:g} s, and are lost")

    def _start(self) -> None:
        thread = threading.Thread(target=self._write_all, name="stream2llm-record", daemon=True)
        thread.start()
        self._thread = thread
        atexit.register(self.close)  # an application that just ends loses nothing either

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            while (asked := self._queue.get()) is not None:
                self._write(asked)
                del asked  # its prompt is not kept until the next question comes
                if self._closed and self._queue.empty():  # closing did not wait for as long as this took
                    break
        finally:
            self._segment.close()

    def _write(self, asked: AskedQuestion) -> None:
        try:
            if not self._has_room():
                self._num_lost += 1
                return
            self._segment.write(self._maker.trace(asked))
            self.num_written += 1
        except OSError as error:
            self._lose("write", f"recorded traffic cannot be written to {self._folder}: {error.strerror or error}")
        except Exception as error:  # whatever a retriever put into its chunks, the application goes on
            self._lose("trace", f"a question could not be recorded: {type(error).__name__}: {error!s:.200}")

    def _has_room(self) -> bool:
        limit = self.recording.max_bytes
        if limit is None:
            return True
        now_s = time.monotonic()
        if now_s - self._looked_s >= _SIZES_EVERY_S or self._looked_s < 0:
            self._others_bytes = sum(_size(file) for file in traffic_files(self._folder)) - self._segment.num_bytes
            self._looked_s = now_s
        if self._others_bytes + self._segment.num_bytes < limit:
            return True
        self._tell(
            "full",
            f"{self._folder} holds max_bytes={limit:,} of recorded traffic: nothing is added until some of it is taken "
            "away",
        )
        return False

    def _lose(self, kind: str, message: str) -> None:
        self._num_lost += 1
        self._tell(kind, f"{message}. The application goes on; such traces are dropped and counted")

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning(message)


def _prepare(folder: Path) -> None:
    """Makes the folder and sees whether it can be written.

    Raises:
        ConfigurationError: it cannot, or it holds something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_own_folder(folder, [file.name for file in traffic_files(folder)], "recorded traffic")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"record={str(folder)!r}: traffic cannot be recorded there: {error.strerror or error}. Name another folder"
        ) from error


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
