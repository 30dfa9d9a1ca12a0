"""Keeps a run: begins or continues its folder, and writes the tables however the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import FolderLock, require_own_folder, write_json
from stream2llm_sdk.traces.extras import require_pyarrow
from stream2llm_sdk.traces.replay_run import ReplayRun, RunState
from stream2llm_sdk.traces.replayed_request import ReplayedRequest
from stream2llm_sdk.traces.run_folder import TABLES, WAY_OUT, RunFolder
from stream2llm_sdk.traces.run_journal import Entry, RunJournal, read_journal
from stream2llm_sdk.traces.run_metrics import write_run_metrics
from stream2llm_sdk.traces.run_tables import latest_requests, tables_of, write_tables

__all__ = ["RunKeeper"]


class RunKeeper:
    """A run that is under way, as a context: leaving it ends its segment. `begin` makes one.

    Attributes:
        config: what is replayed, and how.
        journal: takes down what happens; of no use where the run is complete.
        num_expected: requests of the whole run.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        num_expected: int,
        folder: RunFolder | None,
        journal: RunJournal,
        *,
        lock: FolderLock | None = None,
        is_new: bool = False,
    ) -> None:
        self.config = config
        self.journal = journal
        self.num_expected = num_expected
        self._folder = folder
        self._lock = lock
        self._is_new = is_new
        self._done = {
            name for name, entry in latest_requests(journal).items() if ReplayedRequest.from_row(entry["row"]).is_done
        }
        self._result: ReplayRun | None = None

    @classmethod
    def begin(cls, config: Mapping[str, Any], num_expected: int, out: Path | None, *, anew: bool) -> RunKeeper:
        """Begins a run, or the next segment of one.

        Args:
            config: what is replayed, and how.
            num_expected: requests of the whole run.
            out: its folder; None to keep it in memory.
            anew: whether a run that is not complete begins anew.

        Raises:
            ConfigurationError: the folder cannot be written, or holds something else.
        """
        if out is None:
            return cls(config, num_expected, None, RunJournal())
        require_pyarrow()
        lock = _locked(out)
        try:
            is_new = not RunFolder(out).config_file.is_file()
            folder = _prepared(RunFolder(out), config)
            if folder.summary_file.is_file() and folder.state == RunState.COMPLETE.value:
                keeper = cls(config, num_expected, folder, RunJournal())
                keeper._result = load_run(folder, num_expected)
                lock.release()
                return keeper
            # The journal has it all; what was made of a part of it would be read in place of it after a crash.
            for file in (folder.summary_file, folder.metrics_file, *map(folder.table_file, TABLES)):
                file.unlink(missing_ok=True)
            if anew:
                folder.journal_file.unlink(missing_ok=True)
            segment, start_s = _last_moment(folder.journal_file)
            journal = RunJournal(folder.journal_file, segment=segment, start_s=start_s)
        except BaseException:
            lock.release()
            raise
        return cls(config, num_expected, folder, journal, lock=lock, is_new=is_new)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self._result is not None

    @property
    def num_done(self) -> int:
        """Requests that ended in earlier segments."""
        return len(self._done)

    def is_done(self, request_id: str) -> bool:
        """Whether a request ended in an earlier segment."""
        return request_id in self._done

    def result(self) -> ReplayRun:
        """The run, once it has ended."""
        assert self._result is not None, "the run has not ended"
        return self._result

    def __enter__(self) -> RunKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.journal.close()
        state = RunState.COMPLETE
        if error is not None:
            was_stopped = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            state = RunState.STOPPED if was_stopped else RunState.FAILED
        entries = list(self.journal)
        rows = [entry["row"] for entry in latest_requests(entries).values()]
        self._result = ReplayRun(
            self.config,
            state,
            tuple(map(ReplayedRequest.from_row, rows)),
            self.num_expected,
            self.journal.segment + 1,
            None if self._folder is None else self._folder.path,
        )
        if self._folder is None:
            return
        try:
            if isinstance(error, ConfigurationError) and self._is_new and not rows:
                _forget(self._folder)  # or the corrected command would be refused for being another one
            else:
                _write(self._folder, self._result, entries)
        finally:
            if self._lock is not None:
                self._lock.release()


def load_run(folder: RunFolder, num_expected: int | None = None) -> ReplayRun:
    """The run of a folder, of a part too."""
    config, summary = folder.config(), folder.summary()
    state = summary["state"] if summary["state"] in list(RunState) else RunState.STOPPED
    requests = tuple(ReplayedRequest.from_row(row) for row in folder.requests().to_pylist())
    num_expected = num_expected or int(config["traces"]["count"])
    if state == RunState.COMPLETE.value and len(requests) < num_expected:
        raise ConfigurationError(
            f"{folder.table_file('requests')} has {len(requests)} of the {num_expected} requests of a complete run. "
            f"{WAY_OUT}"
        )
    return ReplayRun(
        config,
        RunState(state),
        requests,
        num_expected,
        int(summary.get("num_segments", 1)),
        folder.path,
    )


def _write(folder: RunFolder, run: ReplayRun, entries: Sequence[Entry]) -> None:
    """Writes everything but the configuration, and the summary last: with it the folder is whole."""
    write_tables(tables_of(entries, run.config), folder.path)
    write_run_metrics(folder.metrics_file, entries, run.config["options"])
    summary = {
        "state": run.state.value,
        "warnings": run.warnings,
        "figures": run.summary(),
        "num_segments": run.num_segments,
    }
    write_json(folder.summary_file, summary)
    if run.state is RunState.COMPLETE:
        folder.journal_file.unlink(missing_ok=True)


def _forget(folder: RunFolder) -> None:
    """Takes back what a run that could not begin has written."""
    for file in (folder.journal_file, folder.config_file):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # it holds something else
        folder.path.rmdir()


def _locked(path: Path) -> FolderLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}. Give another folder") from error


def _prepared(folder: RunFolder, config: Mapping[str, Any]) -> RunFolder:
    """The folder with this configuration in it.

    Raises:
        ConfigurationError: it cannot be written, or holds something else.
    """
    try:
        require_own_folder(folder.path, (folder.config_file.name,), "run")
        if not folder.config_file.is_file():
            write_json(folder.config_file, config)
    except OSError as error:
        raise ConfigurationError(f"{folder.path} cannot be written: {error}. Give another folder") from error
    for name, there, here in _differences(RunFolder.open(folder.path).config(), config):
        raise ConfigurationError(
            f"{folder.path} holds a run with {name}={there!r:.100}, not {here!r:.100}: continue that one with the same "
            "traces, engine and options, or give another folder"
        )
    return folder


def _differences(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, Mapping):
        for key in sorted({*there, *here}):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield name, there, here


def _last_moment(journal: Path) -> tuple[int, float]:
    """The number of the next segment, and when it begins: with the last moment that the journal tells of."""
    segment, last_s = 0, 0.0
    for entry in read_journal(journal):
        if entry["kind"] == "segment":
            segment = entry["segment"] + 1
        last_s = max(last_s, _moment_s(entry))
    return segment, last_s


def _moment_s(entry: Entry) -> float:
    row = entry.get("row", {})
    moments = [row.get("finished_s"), row.get("arrival_s"), entry.get("run_s"), entry.get("start_s")]
    moments += [run_s for _, _, run_s, *_ in entry.get("events", ())]
    return max((moment_s for moment_s in moments if moment_s is not None), default=0.0)
