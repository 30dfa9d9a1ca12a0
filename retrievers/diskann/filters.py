"""Metadata filters: which documents a search may return.

A filter is written as in MongoDB: `{"source": {"$in": ["a", "b"]}, "dump": "CC-MAIN-2024", "score": {"$gte": 3}}`.

- A field's condition is a value, which must be equal, or operators: `$eq`, `$ne`, `$in`, `$nin`, `$gt`, `$gte`, `$lt`,
  `$lte`, `$exists`. Several conditions must all hold.
- `{"$and": [filter, …]}`, `{"$or": [filter, …]}` and `{"$not": filter}` combine filters.
- Values are text, numbers and booleans. A value of another kind is never equal, less or greater. A document without
  the field fulfils only `$ne`, `$nin` and `{"$exists": False}`.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.columns import CodedColumn, MetadataColumns, NumberColumn
from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions

__all__ = ["AllowedNodes", "MetadataFilter"]

Mask = npt.NDArray[np.bool_]

_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_OPERATORS = ("$eq", "$ne", "$in", "$nin", *_ORDERS, "$exists")
_COMBINATIONS = ("$and", "$or", "$not")
_MAX_DEPTH = 32
# Each filter may lie in a list, and its conditions in a mapping with lists.
_MAX_PLAIN_DEPTH = 2 * _MAX_DEPTH + 3

# The list must hold so many allowed nodes that the pool's are safely among them: four times k, at least these.
_ALLOWED_IN_LIST_PER_RESULT = 4
_MIN_ALLOWED_IN_LIST = 32


def _kind(value: object) -> str:
    """Values are compared within a kind only: True is no number here."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "text" if isinstance(value, str) else ""


def _equal(value: object, operand: object) -> bool:
    return _kind(value) == _kind(operand) and value == operand


@dataclass(frozen=True, slots=True)
class _Condition:
    field: str
    operator: str
    operand: Any

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        return self.holds_for(metadata.get(self.field))

    def holds_for(self, value: object) -> bool:
        """For one document's value, None where it has none."""
        match self.operator:
            case "$exists":
                return (value is not None) is bool(self.operand)
            case "$eq":
                return _equal(value, self.operand)
            case "$ne":
                return not _equal(value, self.operand)
            case "$in":
                return any(_equal(value, operand) for operand in self.operand)
            case "$nin":
                return not any(_equal(value, operand) for operand in self.operand)
        return _kind(value) == _kind(self.operand) and bool(_ORDERS[self.operator](value, self.operand))

    def mask(self, columns: MetadataColumns) -> Mask:
        column = columns.get(self.field)
        if column is None:
            names = ", ".join(sorted(columns)) or "none"
            raise ConfigurationError(
                f"filter: this index has no column {self.field!r}; its columns are: {names}. "
                f"Build it with filterable=({self.field!r}, …)"
            )
        self._check_kind({"number"} if isinstance(column, NumberColumn) else {_kind(value) for value in column.values})
        if isinstance(column, NumberColumn):
            return self._mask_of_numbers(column)
        return self._mask_of_codes(column)

    def _check_kind(self, held: set[str]) -> None:
        """A comparison of a number with text would find nothing, and say nothing."""
        operands = self.operand if self.operator in ("$in", "$nin") else (self.operand,)
        if self.operator == "$exists" or not held or not operands or held & {_kind(operand) for operand in operands}:
            return
        kinds = " and ".join(sorted(held))
        raise ConfigurationError(
            f"filter: {self.field!r} is compared with {self.operand!r:.80}, but this index has {kinds} there; a CSV's "
            "columns are text"
        )

    def _mask_of_codes(self, column: CodedColumn) -> Mask:
        # A missing value has code -1, which takes the last item.
        table = np.array([*(self.holds_for(value) for value in column.values), self.holds_for(None)])
        return table[column.codes]

    def _mask_of_numbers(self, column: NumberColumn) -> Mask:
        numbers, missing = column.numbers, np.isnan(column.numbers)
        if self.operator == "$exists":
            return ~missing if self.operand else missing
        operands = self.operand if self.operator in ("$in", "$nin") else (self.operand,)
        numeric = [operand for operand in operands if _kind(operand) == "number"]
        if self.operator in _ORDERS:
            return _ORDERS[self.operator](numbers, numeric[0]) if numeric else np.zeros(len(numbers), bool)
        equal = np.isin(numbers, np.array(numeric, np.float64))
        return ~equal if self.operator in ("$ne", "$nin") else equal


class _Node(Protocol):
    def holds(self, metadata: Mapping[str, Any]) -> bool: ...

    def mask(self, columns: MetadataColumns) -> Mask: ...


@dataclass(frozen=True, slots=True)
class _Combination:
    """`$and`, `$or`, or `$not` with one part."""

    operator: str
    parts: tuple[_Node, ...]

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        if self.operator == "$not":
            return not self.parts[0].holds(metadata)
        return (any if self.operator == "$or" else all)(part.holds(metadata) for part in self.parts)

    def mask(self, columns: MetadataColumns) -> Mask:
        first, *others = (part.mask(columns) for part in self.parts)
        if self.operator == "$not":
            return ~first
        for other in others:
            first = first | other if self.operator == "$or" else first & other
        return first


class MetadataFilter:
    """A filter that was checked, ready to be asked.

    Args:
        filter: written as in MongoDB, such as `{"source": {"$in": ["a", "b"]}, "year": {"$gte": 2023}}`. A field's
            condition is a value, which must be equal, or operators: `$eq`, `$ne`, `$in`, `$nin`, `$gt`, `$gte`, `$lt`,
            `$lte`, `$exists`. `$and`, `$or` and `$not` combine filters.

    Raises:
        ConfigurationError: the filter is not written as this module says.
    """

    def __init__(self, filter: Mapping[str, Any]) -> None:
        plain = _plain(filter, 0)
        self._root = _parse(plain, 0)
        self.key = json.dumps(plain, sort_keys=True)

    def __repr__(self) -> str:
        return f"MetadataFilter({self.key})"

    @classmethod
    def of(cls, filter: Mapping[str, Any] | MetadataFilter | None) -> MetadataFilter | None:
        """The same filter, checked; None stays None."""
        return filter if filter is None or isinstance(filter, MetadataFilter) else cls(filter)

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """Whether one document with this metadata passes."""
        return self._root.holds(metadata)

    def mask(self, columns: MetadataColumns) -> Mask:
        """Which documents of an index pass, one boolean a document.

        Raises:
            ConfigurationError: the index has no such column.
        """
        return self._root.mask(columns)


def _plain(part: Any, depth: int) -> Any:
    """A filter in dicts and lists, read once: what is parsed, and kept as the key, is then the same."""
    if depth > _MAX_PLAIN_DEPTH:
        raise _nested_too_deep()
    if isinstance(part, Mapping):
        return {name: _plain(value, depth + 1) for name, value in part.items()}
    if isinstance(part, (str, bytes)):
        return part
    try:
        items = iter(part)
    except TypeError:
        return part
    return [_plain(item, depth + 1) for item in items]


def _nested_too_deep() -> ConfigurationError:
    return ConfigurationError(f"filter is nested more than {_MAX_DEPTH} deep: combine its conditions")


def _parse(filter: Any, depth: int) -> _Node:
    if not isinstance(filter, Mapping) or not filter:
        raise ConfigurationError(f"filter={filter!r:.80}: give a mapping such as {{'source': 'a', 'n': {{'$gte': 3}}}}")
    if depth > _MAX_DEPTH:
        raise _nested_too_deep()
    parts: list[_Node] = []
    for name, condition in filter.items():
        if name in _COMBINATIONS:
            parts.append(_parse_combination(name, condition, depth))
        elif not isinstance(name, str) or name.startswith("$"):
            raise ConfigurationError(f"filter: {name!r:.80} is no field; filters are combined with $and, $or and $not")
        elif isinstance(condition, Mapping):
            parts += [_condition(name, operator, operand) for operator, operand in condition.items()]
        else:
            parts.append(_condition(name, "$eq", condition))
    if not parts:
        raise ConfigurationError(f"filter={filter!r:.80} has a field without a condition: give {', '.join(_OPERATORS)}")
    return parts[0] if len(parts) == 1 else _Combination("$and", tuple(parts))


def _parse_combination(name: str, condition: Any, depth: int) -> _Node:
    if name == "$not":
        return _Combination(name, (_parse(condition, depth + 1),))
    if not isinstance(condition, Sequence) or isinstance(condition, str) or not condition:
        raise ConfigurationError(f"filter: {name} takes a list of filters, not {condition!r:.80}")
    return _Combination(name, tuple(_parse(part, depth + 1) for part in condition))


def _condition(field: str, operator: str, operand: Any) -> _Condition:
    if operator not in _OPERATORS:
        raise ConfigurationError(f"filter: {field!r} has operator {operator!r:.80}; choose {', '.join(_OPERATORS)}")
    if operator == "$exists":
        if not isinstance(operand, bool):
            raise ConfigurationError(f"filter: {field!r}: $exists takes True or False, not {operand!r:.80}")
        return _Condition(field, operator, operand)
    takes_many = operator in ("$in", "$nin")
    if takes_many and not isinstance(operand, list):
        raise ConfigurationError(f"filter: {field!r}: {operator} takes a list of values, not {operand!r:.80}")
    values = tuple(operand) if takes_many else (operand,)
    for value in values:
        if not _kind(value) or (isinstance(value, float) and math.isnan(value)):
            raise ConfigurationError(f"filter: {field!r}: {operator} takes text, number or boolean, not {value!r:.80}")
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ConfigurationError(
                f"filter: {field!r}: {operator} takes numbers up to {sys.float_info.max:.2g}, not one of "
                f"{value.bit_length()} bits"
            )
    return _Condition(field, operator, values if takes_many else operand)


class AllowedNodes:
    """The nodes that a filter lets into the pool.

    Attributes:
        bits: bit `i & 7` of byte `i >> 3` says whether node i is allowed.
    """

    def __init__(self, mask: Mask) -> None:
        self._num_nodes = len(mask)
        self._count = int(np.count_nonzero(mask))
        self.bits = np.packbits(mask, bitorder="little")

    def __len__(self) -> int:
        """Number of allowed nodes."""
        return self._count

    @cached_property
    def nodes(self) -> npt.NDArray[np.int64]:
        """The allowed nodes in ascending order."""
        return np.flatnonzero(np.unpackbits(self.bits, count=self._num_nodes, bitorder="little")).astype(np.int64)

    def list_size(self, options: SearchOptions) -> int:
        """How long the candidate list must be to hold enough allowed nodes, if they lie as all nodes do."""
        wanted = max(_ALLOWED_IN_LIST_PER_RESULT * options.k, _MIN_ALLOWED_IN_LIST)
        wanted = min(wanted, options.search_list_size)
        widened = -(-wanted * self._num_nodes // max(self._count, 1))
        return min(max(options.search_list_size, widened), self._num_nodes)
