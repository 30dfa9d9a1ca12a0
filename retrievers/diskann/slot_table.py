"""Which document lies in which slot of a dynamic index, who is alive, and who passes which filter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.retrievers.diskann.filters import AllowedNodes, MetadataFilter
from stream2llm_sdk.retrievers.diskann.manifest import Metric
from stream2llm_sdk.retrievers.diskann.scores import score_of
from stream2llm_sdk.retrievers.diskann.search import Pool

__all__ = ["SlotTable"]

_MAX_KEPT_FILTERS = 16


class SlotTable:
    """The documents by slot. Its owner's lock guards every call.

    Attributes:
        clock: counts the changes, so that a search can tell whether a slot was filled after it began.
    """

    def __init__(self, num_rows: int) -> None:
        self.clock = 0
        self.documents: dict[int, tuple[str, Chunk]] = {}
        self._slot_of: dict[str, int] = {}
        self._alive = np.zeros(num_rows, bool)
        self._born_at = np.zeros(num_rows, np.int64)
        self._passing: OrderedDict[str, tuple[MetadataFilter, npt.NDArray[np.bool_]]] = OrderedDict()

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._slot_of)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._slot_of

    def resize(self, num_rows: int) -> None:
        """Makes the table longer."""
        more = num_rows - len(self._alive)
        self._alive = np.pad(self._alive, (0, more))
        self._born_at = np.pad(self._born_at, (0, more))
        for key, (checked, mask) in self._passing.items():
            self._passing[key] = (checked, np.pad(mask, (0, more)))

    def put(self, slot: int, document_id: str, chunk: Chunk) -> list[int]:
        """Puts a document into a slot; returns the slot of the one with this id before, which is gone."""
        replaced = self.forget([document_id] if document_id in self else [])
        self._born_at[slot] = self.clock
        self.documents[slot] = (document_id, chunk)
        self._slot_of[document_id] = slot
        seen = _filterable(chunk)
        for checked, mask in self._passing.values():
            mask[slot] = checked.holds(seen)
        self._alive[slot] = True
        return replaced

    def forget(self, document_ids: Iterable[str]) -> list[int]:
        """The documents are gone from here on; returns their slots."""
        slots = [self._slot_of.pop(document_id) for document_id in document_ids]
        self._alive[slots] = False
        for slot in slots:
            del self.documents[slot]
        self.clock += 1
        return slots

    def clear(self) -> None:
        """All documents are gone."""
        self.forget(list(self._slot_of))

    def allowed(self, checked: MetadataFilter | None) -> AllowedNodes:
        """The documents that pass a filter; None passes all."""
        return AllowedNodes(self._alive if checked is None else self._alive & self._mask(checked))

    def chunks(self, pool: Pool, began_at: int, metric: Metric) -> Iterator[Chunk]:
        """The documents of a pool that are still those which the search found, best first, with their scores."""
        for slot, distance in zip(pool.nodes, pool.distances, strict=True):
            if self._alive[slot] and self._born_at[slot] <= began_at:
                yield replace(self.documents[slot][1], score=score_of(distance, metric))

    def check_integrity(self) -> None:
        """For tests: raises AssertionError when the parts do not fit each other."""
        slots = {document_id: slot for slot, (document_id, _) in self.documents.items()}
        assert slots == self._slot_of
        assert np.flatnonzero(self._alive).tolist() == sorted(self.documents)
        for checked, mask in self._passing.values():
            for slot, (_, chunk) in self.documents.items():
                assert mask[slot] == checked.holds(_filterable(chunk))

    def _mask(self, checked: MetadataFilter) -> npt.NDArray[np.bool_]:
        known = self._passing.get(checked.key)
        if known is None:
            mask = np.zeros(len(self._alive), bool)
            for slot, (_, chunk) in self.documents.items():
                mask[slot] = checked.holds(_filterable(chunk))
            known = self._passing[checked.key] = (checked, mask)
            if len(self._passing) > _MAX_KEPT_FILTERS:
                self._passing.popitem(last=False)
        self._passing.move_to_end(checked.key)
        return known[1]


def _filterable(chunk: Chunk) -> dict[str, Any]:
    """What filters see of a document, as in an index on disk."""
    return {**chunk.metadata, "source": chunk.source, "title": chunk.title}
