"""The journal of a run: a line for whatever has happened, so that a crash loses no more than what was under way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.replayed_request import ReplayedRequest, ReplayEvent
from stream2llm_sdk.traces.run_folder import WAY_OUT

__all__ = ["Entry", "RunJournal", "read_journal"]

Entry = dict[str, Any]
"""One line: `kind` is 'segment' (with `start_s`), 'request' (with `row` and `events`), 'sample' (with its columns), or
'event' (an event of the run, with `events` of length 1)."""


class RunJournal:
    """Takes down what happens in one segment of a run. Iterating gives the entries of all segments.

    Args:
        file: where lines are appended, each at once; None to keep them in memory.
        segment: number of this segment.
        start_s: the run's clock at its begin.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, file: Path | None = None, *, segment: int = 0, start_s: float = 0.0) -> None:
        self.segment = segment
        self.start_s = start_s
        self._file = file
        self._kept: list[Entry] = []
        self._stream: TextIO | None = None
        if file is not None:
            try:
                cut_torn_line(file)
                self._stream = open(file, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise ConfigurationError(f"{file} cannot be written: {error}. Give another folder") from error
        self._add({"kind": "segment", "segment": segment, "start_s": start_s})

    def request(self, request: ReplayedRequest, events: Iterable[ReplayEvent]) -> None:
        """A request has ended."""
        self._add({"kind": "request", "row": request.row(), "events": [_event(event) for event in events]})

    def sample(self, run_s: float, values: Mapping[str, Any]) -> None:
        """How the engine stands."""
        self._add({"kind": "sample", "run_s": run_s, "segment": self.segment, **values})

    def event(self, event: ReplayEvent) -> None:
        """Something happened to the run as a whole."""
        self._add({"kind": "event", "segment": self.segment, "events": [_event(event)]})

    def _add(self, entry: Entry) -> None:
        if self._stream is None:
            self._kept.append(entry)
        else:
            self._stream.write(json.dumps(entry, default=str) + "\n")
            self._stream.flush()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._kept) if self._file is None else read_journal(self._file)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> RunJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_journal(file: Path) -> Iterator[Entry]:
    """The entries of a journal; none if there is no file. A last line that was cut short is left out.

    Raises:
        ConfigurationError: another line is no entry.
    """
    if not file.is_file():
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = _checked(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ConfigurationError(
                    f"{file}, line {number}: no entry of a journal ({type(error).__name__}: {error}). {WAY_OUT}"
                ) from error
            yield entry


def _checked(entry: Any) -> Entry:
    """An entry that has what its kind has.

    Raises:
        ValueError, TypeError, KeyError: it has not.
    """
    found: Entry = dict(entry)
    match found["kind"]:
        case "segment":
            numbers = [found["segment"], found["start_s"]]
        case "sample":
            numbers = [found["run_s"]]
        case "request" | "event":
            if found["kind"] == "request":
                ReplayedRequest.from_row(found["row"])
            numbers = [run_s for _, _, run_s, _, _, _, _ in found["events"]]
        case kind:
            raise ValueError(f"kind {kind!r}")
    for number in numbers:
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{number!r:.100} is no number")
    return found


def cut_torn_line(file: Path) -> None:
    """Takes away what a crash left behind the last whole line, so that lines can be appended."""
    if not file.is_file():
        return
    with open(file, "rb+") as stream:
        whole = 0
        for line in stream:
            if line.endswith(b"\n"):
                whole += len(line)
        stream.truncate(whole)


def _event(event: ReplayEvent) -> Sequence[Any]:
    return [
        event.source,
        event.event,
        event.run_s,
        event.monotonic_s,
        event.wall_s,
        event.duration_s,
        dict(event.data),
    ]
