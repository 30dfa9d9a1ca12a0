"""Documents from files: Parquet, JSON Lines, CSV, text, folders of those, and streams of the `datasets` library."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import BadDocumentError, ConfigurationError, MissingExtraError
from stream2llm_sdk.retrievers.diskann.corpus_files import READERS, Row, reader_of

__all__ = ["Corpus", "CorpusColumns", "open_corpus", "open_rows"]

HUB_PREFIX = "hub:"


@dataclass(frozen=True, slots=True)
class CorpusColumns:
    """Which columns are what.

    Attributes:
        text: the document.
        source: where it comes from. None takes the first of `url`, `source` and `id` that a row has.
        title: its title; a row without one has none.
        kept: what is kept as metadata. None keeps all that is left.
    """

    text: str = "text"
    source: str | None = None
    title: str = "title"
    kept: tuple[str, ...] | None = None


class Corpus:
    """The documents of a source in a fixed order, as often as it is iterated. Get one from `open_corpus`.

    Attributes:
        name: what it was opened as.
        size_bytes: of all files; None where that is not known.
        bytes_read: of the files in the iteration that is running; never more than `size_bytes`.
        num_skipped: rows that the iteration that is running has left out.
    """

    def __init__(
        self,
        name: str,
        rows: Callable[[Callable[[int], None]], Iterator[Row]],
        *,
        columns: CorpusColumns,
        size_bytes: int | None,
        skip_bad: bool,
        limit: int | None,
    ) -> None:
        """Use `open_corpus()`."""
        self.name = name
        self.size_bytes = size_bytes
        self.bytes_read = 0
        self.num_skipped = 0
        self._rows = rows
        self._columns = columns
        self._skip_bad = skip_bad
        self._limit = limit

    def __repr__(self) -> str:
        return f"Corpus({self.name!r})"

    def __iter__(self) -> Iterator[Chunk]:
        """The documents.

        Raises:
            BadDocumentError: a row cannot be a document, and bad rows are not to be skipped.
            ConfigurationError: a file cannot be read.
        """
        self.bytes_read = self.num_skipped = 0
        num_documents = 0
        with closing(self._rows(self._report)) as rows:  # type: ignore[type-var]
            for row in rows:
                if num_documents == self._limit:
                    return
                try:
                    document = self._document(row)
                except BadDocumentError:
                    if not self._skip_bad:
                        raise
                    self.num_skipped += 1
                    continue
                num_documents += 1
                yield document

    def _report(self, num_bytes: int) -> None:
        self.bytes_read = num_bytes

    def _document(self, row: Row) -> Chunk:
        if row.fault is not None:
            raise BadDocumentError(f"{row.place}: {row.fault}")
        values, columns = row.values, self._columns
        text = values.get(columns.text)
        if columns.text not in values:
            found = ", ".join(map(repr, values)) or "none"
            raise BadDocumentError(f"{row.place}: lacks the column {columns.text!r}; it has: {found:.200}")
        if not isinstance(text, str) or not text.strip():
            found = "blank" if isinstance(text, str) else "null" if text is None else f"a {type(text).__name__}"
            raise BadDocumentError(f"{row.place}: its {columns.text!r} is {found}, not text")
        names = ("url", "source", "id") if columns.source is None else (columns.source,)
        source_name = next((name for name in names if values.get(name) not in (None, "")), None)
        source = row.place if source_name is None else str(values[source_name])
        used = {columns.text, columns.title, source_name}
        kept = [name for name in values if name not in used] if columns.kept is None else columns.kept
        metadata = {name: values[name] for name in kept if values.get(name) is not None}
        return Chunk(text, source=source, title=str(values.get(columns.title) or ""), metadata=metadata)


def open_corpus(
    source: str | os.PathLike[str],
    *,
    columns: CorpusColumns | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
) -> Corpus:
    """Opens documents for `build_index`.

    Args:
        source: a file (`.parquet`, `.jsonl`, `.ndjson`, `.csv`, each of the last three also with `.gz` or `.zst`;
            `.txt` and `.md`, which are one document); a folder, whose files of those kinds are read in the order of
            their paths; or `hub:NAME[:CONFIG[:SPLIT]]`, which streams with `datasets`, where NAME may be a folder too
            and SPLIT is `train` if left out.
        columns: which columns are what; None means `text`, and `url`, `source` or `id`, as in FineWeb-Edu.
        skip_bad: leaves out rows that cannot be documents (no text, not UTF-8, not JSON, too many fields) and counts
            them, instead of raising an error that names the file and the row.
        limit: most documents.

    Raises:
        ConfigurationError: there is no such file, or it is of no such kind.
        MissingExtraError: pyarrow or datasets is not installed.
    """
    chosen = columns or CorpusColumns()
    if limit is not None and limit < 1:
        raise ConfigurationError(f"limit={limit!r}: give 1 or more, or None for all")
    name = os.fspath(source)
    if name.startswith(HUB_PREFIX):
        rows, size = _hub_rows(name), None
    else:
        files = _files(Path(name))
        size = sum(file.stat().st_size for file in files)
        rows = _FileRows(Path(name), files)
    return Corpus(name, rows, columns=chosen, size_bytes=size, skip_bad=skip_bad, limit=limit)


def open_rows(source: str | os.PathLike[str]) -> Iterator[Row]:
    """The rows of a source that `open_corpus` takes, as they are: of questions, for one.

    Raises:
        ConfigurationError: there is no such file, it is of no such kind, or it cannot be read.
        MissingExtraError: pyarrow or datasets is not installed.
    """
    name = os.fspath(source)
    rows = _hub_rows(name) if name.startswith(HUB_PREFIX) else _FileRows(Path(name), _files(Path(name)))
    return rows(lambda num_bytes: None)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigurationError(f"{path}: there is no such file or folder; give a corpus, or hub:NAME for a data set")
    kinds = ", ".join(READERS)
    if path.is_file():
        if reader_of(path) is None:
            raise ConfigurationError(f"{path}: its kind is not known; give a file that ends with one of {kinds}")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and reader_of(file) and file.name[0] != ".")
    if not files:
        raise ConfigurationError(f"{path}: holds no file that ends with one of {kinds}")
    return files


@dataclass(frozen=True, slots=True)
class _FileRows:
    """The rows of files, one after another."""

    root: Path
    files: list[Path]

    def __call__(self, report: Callable[[int], None]) -> Iterator[Row]:
        before = 0
        for file in self.files:
            reader = reader_of(file)
            assert reader is not None, "files were chosen by their readers"
            place = file.name if self.root.is_file() else str(file.relative_to(self.root))
            try:
                for row, num_bytes in reader(file, place):
                    report(before + num_bytes)
                    yield row
            except (OSError, EOFError, zlib.error) as error:
                raise ConfigurationError(
                    f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}; repair it or take it away"
                ) from error
            before += file.stat().st_size
            report(before)


def _hub_rows(name: str) -> Callable[[Callable[[int], None]], Iterator[Row]]:
    dataset, *rest = name.removeprefix(HUB_PREFIX).split(":")
    config, split = (*(part or None for part in rest), None, None)[:2]
    if not dataset or len(rest) > 2:
        raise ConfigurationError(f"{name!r}: give hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError("datasets", "corpus") from error
    try:
        stream = load_dataset(dataset, config, split=split or "train", streaming=True)
    except Exception as error:  # of many kinds: connection, name, configuration, split
        raise ConfigurationError(f"{name!r}: datasets cannot load it: {error}") from error

    def rows(report: Callable[[int], None]) -> Iterator[Row]:
        for number, values in enumerate(_read_stream(stream, name)):
            yield Row(f"{name}, row {number}", values)

    return rows


def _read_stream(stream: Any, name: str) -> Iterator[Mapping[str, Any]]:
    try:
        yield from stream
    except GeneratorExit:
        raise
    except Exception as error:  # the stream's own, of many kinds: a connection, a damaged shard
        raise ConfigurationError(
            f"{name!r}: the stream broke: {type(error).__name__}: {error}; build again to go on from what is done"
        ) from error
