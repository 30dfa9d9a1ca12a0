"""Reading and writing sets of traces, in whichever form they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.files import require_makeable, require_writable
from stream2llm_sdk.traces.anns_format import ANNS, anns_maps, read_anns, write_anns
from stream2llm_sdk.traces.crawler_format import CRAWLER, crawler_files, read_crawler, write_crawler
from stream2llm_sdk.traces.parquet_format import PARQUET, read_parquet, write_parquet
from stream2llm_sdk.traces.trace import Trace, check_unique
from stream2llm_sdk.traces.traffic_format import TRAFFIC, read_traffic, traffic_files

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot
    from stream2llm_sdk.tokenizer import Tokenizer

__all__ = ["FORMATS", "READABLE", "TraceSet", "check_target", "read_traces", "write_traces"]

FORMATS = (CRAWLER, ANNS, PARQUET)
"""The published crawler and vector-search formats, and our own."""

READABLE = (*FORMATS, TRAFFIC)
"""What can be read: these, and the folder of an application that records its traffic."""

_MAX_SKIPPED = 100_000


@dataclass(frozen=True, slots=True)
class TraceSet:
    """Traces that were read together.

    Attributes:
        traces: in the order of their file or folder.
        skipped: why others could not be read, where `on_error='skip'` was asked for. Where a part of the file is
            damaged, one error stands for all traces in it.
    """

    traces: tuple[Trace, ...]
    skipped: tuple[TraceError, ...] = ()

    def __len__(self) -> int:
        return len(self.traces)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.traces)

    def __getitem__(self, index: int) -> Trace:
        return self.traces[index]

    def plot(self, *, tokenizer: Tokenizer | None = None) -> Plot:
        """Distributions of the context's tokens, of the retrieval's time and of the number of updates.

        Args:
            tokenizer: counts the tokens that the traces do not record; without one they are estimated.

        Raises:
            ConfigurationError: there are no traces.
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.display.trace_plots import plot_traces

        return plot_traces(self.traces, tokenizer)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.trace_view import trace_set_html

        return trace_set_html(self)


def read_traces(
    path: str | Path,
    *,
    kind: str | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
) -> TraceSet:
    """Reads a set of traces.

    Args:
        path: a folder of `query_*.csv` (crawler), a folder with a `query_trace_map_*.json` or that file (anns), a
            `.parquet` file, the folder of a recording, or a folder of recorded traffic (`StreamingRAG(record=…)`), also
            while it is recorded.
        kind: one of `READABLE`; left out, it is seen from the path.
        on_error: 'raise' at the first trace that cannot be read, or 'skip' and collect why, of at most 100,000.
        limit: read at most so many.

    Raises:
        TraceError: there are no traces at `path`, or, with `on_error='raise'`, one cannot be read. It names file, row
            and column.
        ConfigurationError: an option is none of those.
        MissingExtraError: a `.parquet` file needs pyarrow, which is not installed.
    """
    if on_error not in ("raise", "skip"):
        raise ConfigurationError(f"on_error={on_error!r}: choose 'raise' or 'skip'")
    if limit is not None and limit < 1:
        raise ConfigurationError(f"limit={limit!r} must be at least 1, or None for all")
    traces: list[Trace] = []
    skipped: list[TraceError] = []
    for item in _readable(Path(path), kind):
        if isinstance(item, Trace):
            traces.append(item)
        elif on_error == "raise":
            raise item
        else:
            skipped.append(item)
            if len(skipped) > _MAX_SKIPPED:
                raise TraceError(
                    f"more than {_MAX_SKIPPED:,} traces in it cannot be read, as this one", file=path
                ) from item
        if len(traces) == limit:
            break
    if not traces and not skipped:
        raise TraceError("there are no traces in it", file=path)
    return TraceSet(tuple(traces), tuple(skipped))


def write_traces(
    traces: Iterable[Trace], path: str | Path, *, kind: str | None = None, drop: bool = False
) -> tuple[str, ...]:
    """Writes traces, and returns what was left out: always nothing for Parquet, which holds all.

    Args:
        traces: at least one, with unique names.
        path: a `.parquet` file, which is replaced when it is there, or a new or empty folder for a published format.
        kind: one of `FORMATS`; left out, Parquet for a path that ends in '.parquet'.
        drop: leave out what a published format does not hold, instead of refusing.

    Raises:
        ConfigurationError: see `write_crawler`, `write_anns`, `write_parquet`; or the path cannot be written.
        MissingExtraError: a `.parquet` file needs pyarrow, which is not installed.
    """
    traces, path = list(traces), Path(path)
    if not traces:
        raise ConfigurationError("there are no traces to write")
    check_unique(traces)
    kind = check_target(path, kind)
    try:
        if kind == PARQUET:
            write_parquet(traces, path)
            return ()
        with _whole_or_nothing(path) as unfinished:
            return (write_crawler if kind == CRAWLER else write_anns)(traces, unfinished, drop=drop)
    except OSError as error:
        raise ConfigurationError(f"traces cannot be written to {str(path)!r}: {error}") from error


@contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A place to write what a folder, new or empty, is to hold. It gets all of it at the end, or is left as it was: a
    part of the traces would pass for all of them."""
    was_there, unfinished = folder.is_dir(), folder / ".unfinished"
    try:
        yield unfinished
        for made in list(unfinished.iterdir()):
            made.rename(folder / made.name)
        unfinished.rmdir()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def check_target(path: Path, kind: str | None) -> str:
    """The format in which `write_traces` writes to a path; asked before the work, whether it can.

    Raises:
        ConfigurationError: it is not clear which, or something is in the way.
    """
    if kind is None:
        if path.suffix != ".parquet":
            raise ConfigurationError(f"{str(path)!r} does not end in '.parquet': say which kind, {_choices()}")
        kind = PARQUET
    if kind not in FORMATS:
        raise ConfigurationError(f"kind={kind!r}: choose {_choices()}")
    if kind == PARQUET:
        require_writable(path, "traces to write:")
    elif path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigurationError(f"{str(path)!r} is there already: name a new folder, so that sets do not mix")
    else:
        require_makeable(path, repr(str(path)))
    return kind


def _readable(path: Path, kind: str | None) -> Iterator[Trace | TraceError]:
    try:
        yield from _items(path, kind)
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror or error}", file=error.filename or path) from error


def _items(path: Path, kind: str | None) -> Iterable[Trace | TraceError]:
    if not path.exists():
        raise TraceError("there is no such file or folder", file=path)
    if kind in (None, PARQUET) and path.is_dir():
        path = _recorded(path)
    kind = kind or _seen_kind(path)
    if kind not in READABLE:
        raise ConfigurationError(f"kind={kind!r}: choose {_choices(READABLE)}")
    if not path.is_dir() and not path.is_file():
        raise TraceError("this is neither a folder nor a plain file", file=path)
    if kind != ANNS and path.is_dir() != (kind != PARQUET):
        raise TraceError(f"kind={kind!r} is a {'file' if kind == PARQUET else 'folder'}, which this is not", file=path)
    return {CRAWLER: read_crawler, ANNS: read_anns, PARQUET: read_parquet, TRAFFIC: read_traffic}[kind](path)


def _recorded(folder: Path) -> Path:
    """The traces of a recording, where the folder is one of such; else the folder."""
    from stream2llm_sdk.traces.recording.recording import CONFIG_FILE, TRACES_FILE, why_not_exported

    if not (folder / CONFIG_FILE).is_file():
        return folder
    if not (folder / TRACES_FILE).is_file():
        raise TraceError(why_not_exported(folder), file=folder)
    return folder / TRACES_FILE


def _seen_kind(path: Path) -> str:
    if path.is_dir():
        looks = {CRAWLER: crawler_files, ANNS: anns_maps, TRAFFIC: traffic_files}
        found = [kind for kind, files in looks.items() if files(path)]
        if len(found) == 1:
            return found[0]
        names = {CRAWLER: "query_*.csv", ANNS: "query_trace_map_*.json", TRAFFIC: "traffic-*.jsonl"}
        if not found:
            raise TraceError(_why_no_kind(path, [*names.values(), "a recording"]), file=path)
        reason = f"{' and '.join(names[kind] for kind in found)} are in it: give kind={_choices(found)}"
        raise TraceError(reason, file=path)
    kinds = {".parquet": PARQUET, ".json": ANNS}
    if path.suffix not in kinds:
        raise TraceError(f"its name does not say what it is: give kind={_choices()}", file=path)
    return kinds[path.suffix]


def _why_no_kind(folder: Path, looked_for: Sequence[str]) -> str:
    if not any(folder.iterdir()):
        return (
            "it is empty. If an application records its traffic there, no question was recorded, or sampled, yet: read "
            "it later"
        )
    if files := sorted(folder.glob("*.parquet")):
        return f"neither {' nor '.join(looked_for)} is in it: name a .parquet file itself, such as {files[0]}"
    return f"neither {' nor '.join(looked_for)} is in it, and a .parquet file is named itself"


def _choices(kinds: Sequence[str] = FORMATS) -> str:
    return f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}"
