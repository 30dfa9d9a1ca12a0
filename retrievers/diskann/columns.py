"""Metadata columns beside an index: one value a document, for filters that run inside a search.

For a column `NAME`, `columns/` holds either `NAME.numbers.npy` (float64, NaN where a document has none), or
`NAME.codes.npy` (int32, -1 where a document has none) with `NAME.values.json`, the list of values that the codes count.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError

__all__ = ["CodedColumn", "ColumnsWriter", "MetadataColumns", "NumberColumn", "check_filterable"]

COLUMNS_FOLDER = "columns"
MISSING_CODE = -1

_NUMBERS, _CODES, _VALUES = ".numbers.npy", ".codes.npy", ".values.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

Scalar = str | bool | int | float


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """A column of numbers: float64, shape `(num_documents,)`, NaN where a document has none."""

    name: str
    numbers: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CodedColumn:
    """A column of text, booleans, or of mixed kinds.

    Attributes:
        codes: int32, shape `(num_documents,)`; document i has `values[codes[i]]`, or nothing where the code is -1.
        values: every value once.
    """

    name: str
    codes: npt.NDArray[np.int32]
    values: tuple[Scalar, ...]


class MetadataColumns(Mapping[str, "NumberColumn | CodedColumn"]):
    """The columns of an index by name; none where it was built without `filterable`. All of it is in memory: 8 bytes a
    number, 4 bytes a code."""

    def __init__(self, columns: Iterable[NumberColumn | CodedColumn]) -> None:
        self._columns = {column.name: column for column in columns}

    @classmethod
    def open(cls, directory: Path) -> MetadataColumns:
        """Reads the columns of the index in `directory`.

        Raises:
            IndexFormatError: a file is damaged, or the columns have different lengths.
        """
        folder = directory / COLUMNS_FOLDER
        columns: list[NumberColumn | CodedColumn] = []
        for path in sorted(folder.glob("*.npy")) if folder.is_dir() else ():
            if path.name.endswith(_NUMBERS):
                columns.append(NumberColumn(path.name.removesuffix(_NUMBERS), _load(path, np.dtype("<f8"))))
            elif path.name.endswith(_CODES):
                columns.append(_open_coded(path))
        lengths = {len(c.numbers if isinstance(c, NumberColumn) else c.codes) for c in columns}
        if len(lengths) > 1:
            raise IndexFormatError(f"{folder}: columns of different lengths: {sorted(lengths)}; build the index again")
        return cls(columns)

    def __getitem__(self, name: str) -> NumberColumn | CodedColumn:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns."""
        return len(self._columns)


def _open_coded(path: Path) -> CodedColumn:
    name = path.name.removesuffix(_CODES)
    codes = _load(path, np.dtype("<i4"))
    values_path = path.with_name(name + _VALUES)
    try:
        values = json.loads(values_path.read_bytes())
    except (OSError, ValueError) as error:
        raise IndexFormatError(f"{values_path}: cannot be read: {error}; build the index again") from error
    if not isinstance(values, list) or (len(codes) and not -1 <= codes.min() <= codes.max() < len(values)):
        raise IndexFormatError(f"{values_path}: does not fit {path.name}; build the index again")
    return CodedColumn(name, codes, tuple(values))


def _load(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise IndexFormatError(f"{path}: cannot be read: {error}; build the index again") from error
    if not isinstance(loaded, np.ndarray) or loaded.dtype != dtype or loaded.ndim != 1:
        raise IndexFormatError(f"{path}: expected one dimension of {dtype}; build the index again")
    return loaded


def check_filterable(names: Iterable[str]) -> tuple[str, ...]:
    """The names of columns that filters may use, each once.

    Raises:
        ConfigurationError: a name cannot be the name of a file.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"filterable={names!r}: give a sequence of names, such as ({names!r},)")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"filterable: {name!r:.80} cannot be a column; give letters, digits, '_', '-' and '.'"
            )
    return tuple(dict.fromkeys(names))


class _Growing:
    """A column while its documents come: numbers as long as all are, else codes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._codes = array("i")
        self._code_of: dict[tuple[type, Scalar], int] = {}

    def append(self, value: Any, row: int) -> None:
        if value is None:
            self._codes.append(MISSING_CODE)
            return
        if not isinstance(value, (str, bool, int, float)):
            raise ConfigurationError(
                f"document {row}: its {self.name!r} is a {type(value).__name__}, which filters cannot use; "
                "give text, a number or a boolean, or leave the column out of filterable"
            )
        # True and 1 are equal and hash alike, and are different values here.
        self._codes.append(self._code_of.setdefault((type(value), value), len(self._code_of)))

    def write(self, folder: Path) -> Iterator[Path]:
        codes = np.array(self._codes, "<i4")
        values = [value for _, value in self._code_of]
        if values and all(_is_number(value) for value in values):
            path = folder / f"{self.name}{_NUMBERS}"
            np.save(path, np.array([*values, np.nan], "<f8")[codes])
            yield path
            return
        path = folder / f"{self.name}{_CODES}"
        np.save(path, codes)
        yield path
        path = folder / f"{self.name}{_VALUES}"
        path.write_text(json.dumps(values), encoding="utf-8")
        yield path


def _is_number(value: Scalar) -> bool:
    """Whether a float64 holds it exactly, so that equality means what it says."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)


class ColumnsWriter:
    """Gathers the values of `names` document by document, and writes them at the end."""

    def __init__(self, names: Iterable[str]) -> None:
        self._columns = [_Growing(name) for name in names]
        self._num_rows = 0

    def append(self, values: Mapping[str, Any]) -> None:
        """The next document's values; one that is missing or None is stored as missing.

        Raises:
            ConfigurationError: a value is no text, number or boolean.
        """
        for column in self._columns:
            column.append(values.get(column.name), self._num_rows)
        self._num_rows += 1

    def write(self, directory: Path) -> list[Path]:
        """Writes the files to the index in `directory` and returns their paths."""
        if not self._columns:
            return []
        folder = directory / COLUMNS_FOLDER
        folder.mkdir(exist_ok=True)
        return [path for column in self._columns for path in column.write(folder)]
