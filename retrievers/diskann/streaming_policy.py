"""Whether a search is worth streaming.

A pool that is sent while the search goes on lets the model prefill it meanwhile; a document of it that turns out to be
wrong costs a prefill on top. With `T` the time of a search, `f` the fraction of it that has passed when the first pool
comes, `s` the documents that are prefilled again because pools changed, and `c` the time to prefill one, streaming
pays when

    (1 - f) * T > s * c

A warm search of 2 ms over a small index is not worth it; one of seconds over an index that is far larger than memory
is. All but `c` is measured on the retriever's own searches.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.placement import ChunkOrder, arranged

__all__ = ["StreamingEstimate", "StreamingPolicy", "documents_prefilled_again"]

_logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)

_LEARNING_SEARCHES = 8
# Once searches are not streamed, every so manieth is, so that a change of the disk or of the questions is noticed.
_LOOK_AGAIN_EVERY = 32
_WEIGHT_OF_NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class StreamingEstimate:
    """What was measured so far.

    Attributes:
        num_searches: searches that `search_s` is the average of.
        search_s: `T`, the time of a search without what its consumer takes, None before the first.
        first_pool_fraction: `f`, None before the first streamed search.
        prefilled_again: `s`, documents; None before the first streamed search.
        prefill_s_per_document: `c`, None when it is not known yet.
        pays: whether the inequality holds; None when something in it is not known.
    """

    num_searches: int
    search_s: float | None
    first_pool_fraction: float | None
    prefilled_again: float | None
    prefill_s_per_document: float | None
    pays: bool | None


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


class StreamingPolicy:
    """Decides search by search, from moving averages (a new search weighs a tenth).

    The first 8 searches are streamed to learn, and every 32nd of those that would not be.

    Args:
        prefill_s_per_document: `c` in seconds, or a function that gives it, None while it does not know. What is no
            positive number, or an error, counts as None.

    Raises:
        ConfigurationError: it is neither a function nor a positive number.
    """

    def __init__(self, prefill_s_per_document: float | Callable[[], float | None]) -> None:
        if not callable(prefill_s_per_document) and not _is_duration(prefill_s_per_document):
            raise ConfigurationError(
                f"prefill_s_per_document={prefill_s_per_document!r:.80}: give the seconds in which the model prefills "
                "one document, or a function that returns them"
            )
        self._prefill_s = prefill_s_per_document
        self._lock = threading.Lock()
        self._num_searches = 0
        self._num_streamed = 0
        self._num_asked = 0
        self._search_s: float | None = None
        self._first_fraction: float | None = None
        self._again: float | None = None

    @property
    def estimate(self) -> StreamingEstimate:
        """What was learnt so far."""
        prefill_s = self._known_prefill_s()
        with self._lock:
            search_s, fraction, again = self._search_s, self._first_fraction, self._again
            pays = None
            if search_s is not None and fraction is not None and again is not None and prefill_s is not None:
                pays = (1 - fraction) * search_s > again * prefill_s
            return StreamingEstimate(self._num_searches, search_s, fraction, again, prefill_s, pays)

    def _known_prefill_s(self) -> float | None:
        """What was given, or what its function gives. A question does not fail by a function that does: it is unknown
        then."""
        if not callable(self._prefill_s):
            return self._prefill_s
        try:
            found = self._prefill_s()
        except Exception:
            _logger.warning("prefill_s_per_document failed and counts as not known", exc_info=True)
            return None
        return found if _is_duration(found) else None

    def should_stream(self) -> bool:
        """Whether the search that begins now is to be streamed."""
        pays = self.estimate.pays
        with self._lock:
            self._num_asked += 1
            learning = self._num_streamed < _LEARNING_SEARCHES or self._num_asked % _LOOK_AGAIN_EVERY == 0
        return learning or pays is not False

    def observe(self, search_s: float, *, first_pool_s: float | None, prefilled_again: int) -> None:
        """Tells what a search took.

        Args:
            search_s: its time, without its consumer's.
            first_pool_s: when its first pool came; None for a search that was not streamed.
            prefilled_again: documents that its later pools made the model prefill again.
        """
        with self._lock:
            self._num_searches += 1
            self._search_s = _moved(self._search_s, search_s)
            if first_pool_s is not None and search_s > 0:
                self._num_streamed += 1
                self._first_fraction = _moved(self._first_fraction, min(first_pool_s / search_s, 1.0))
                self._again = _moved(self._again, prefilled_again)


def _moved(average: float | None, newest: float) -> float:
    return newest if average is None else average + _WEIGHT_OF_NEWEST * (newest - average)


def documents_prefilled_again(before: Sequence[KeyT], after: Sequence[KeyT]) -> tuple[int, list[KeyT]]:
    """How many documents an update makes the model prefill, and their order then.

    Documents that stay keep their order and new ones go behind them, as in a prompt in stable order: what lies behind
    the first place where the two differ is prefilled.

    Args:
        before: the documents in the prompt, in its order.
        after: the new pool, best first.
    """
    order = list(arranged(dict.fromkeys(after), before, ChunkOrder.STABLE))
    shared = 0
    for old, new in zip(before, order, strict=False):
        if old != new:
            break
        shared += 1
    return len(order) - shared, order
