"""The context of several sources in one order, in which a change of one costs the others as little as it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from urllib.parse import urlsplit

from stream2llm_sdk.context import Append, Chunk, ContextUpdate
from stream2llm_sdk.retrievers.budget_shares import whole_shares

__all__ = ["MergedContext", "SourceRules"]

# Chunks of one source that wait for room. More could only be of use if others left that much of the budget unused.
_MAX_WAITING = 1000


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What one source may put into the merged context: see `Weighted`."""

    appends: bool
    weight: float = 1.0
    max_chunks: int | None = None
    max_tokens: int | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """A chunk that a source offers. `due_s`: when it goes in although what stands before it may still change."""

    source: int
    chunk: Chunk
    num_tokens: int
    due_s: float
    order: int
    url: str
    text: str


@dataclass(slots=True)
class _Offer:
    """What one source wants in the context now, by identity, best or first one first."""

    rules: SourceRules
    items: dict[tuple[str, str, str], _Item] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def is_volatile(self) -> bool:
        """Whether what is there may still be replaced."""
        return not (self.rules.appends or self.has_ended)


class MergedContext:
    """What is in the context, and in which order. It knows no clock and no tasks.

    The order is that of arrival, since whatever is put before something makes that be prefilled again. But

    * what comes at the same time goes in with the stable first: appended chunks and pools that have settled, then
      pools that may still change;
    * when a pool drops a chunk, all behind it has to be prefilled anyway, and is arranged so anew;
    * what would stand behind another source's volatile pool waits for that to settle, `hold_s` seconds at most.

    Args:
        sources: the rules of each source.
        max_chunks, max_tokens: budgets of all sources together, shared by weight.
        count_tokens: tokens of a text.
        hold_s: longest wait of a chunk for another source's pool to settle.
        drop_duplicates: whether a text, or a URL that another source has brought, goes in once only.
    """

    def __init__(
        self,
        sources: Sequence[SourceRules],
        *,
        max_chunks: int | None,
        max_tokens: int | None,
        count_tokens: Callable[[str], int],
        hold_s: float,
        drop_duplicates: bool,
    ) -> None:
        self._offers = [_Offer(rules) for rules in sources]
        self._max_chunks = max_chunks
        self._max_tokens = max_tokens
        self._count_tokens = count_tokens
        self._hold_s = hold_s
        self._drop_duplicates = drop_duplicates
        self._laid: list[_Item] = []
        self._num_items = 0
        self._num_refused = [0] * len(sources)
        self.due_s: float | None = None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The context as it was arranged last."""
        return tuple(item.chunk for item in self._laid)

    def take(self, source: int, update: ContextUpdate, now_s: float) -> None:
        """Takes in what a source says."""
        offer = self._offers[source]
        known, kept = offer.items, offer.items if isinstance(update, Append) else {}
        num_laid = sum(item.source == source for item in self._laid)
        for chunk in update.chunks:
            identity = (chunk.source, chunk.title, chunk.text)
            item = known.get(identity)
            if item is None and len(kept) - num_laid < _MAX_WAITING:
                item = self._item(source, chunk, now_s)
            if item is not None:
                item.chunk = chunk  # its score may be another one now
                kept.setdefault(identity, item)
        offer.items = kept

    def end(self, source: int) -> None:
        """The source has said all: what it wants stays."""
        self._offers[source].has_ended = True

    def num_placed(self, source: int) -> int:
        """Chunks of the source that are in the context."""
        return sum(item.source == source for item in self._laid)

    def num_refused(self, source: int) -> int:
        """Chunks that it wants in the context and that are not, for want of room."""
        return self._num_refused[source]

    def arrange(self, now_s: float) -> bool:
        """Arranges the context anew, and says whether it is another one than before. `due_s` then says when to call
        this again though nothing new has come; None, if nothing waits for that."""
        selected = self._selected()
        wanted = set(selected)
        before = self._laid
        kept = list(takewhile(wanted.__contains__, before))
        self._laid = kept + self._placed(self._behind(kept, selected), kept, now_s)
        return self._laid != before

    # ---- order --------------------------------------------------------------------------------------------------

    def _behind(self, kept: list[_Item], selected: list[_Item]) -> list[_Item]:
        """What goes behind `kept`: the stable, then the volatile source by source; what was there before what is new,
        since what stayed once is likely to stay again."""
        stays = set(kept)
        places = {item: place for place, item in enumerate(self._laid)}
        rest = [(rank, item) for rank, item in enumerate(selected) if item not in stays]

        def position(ranked: tuple[int, _Item]) -> tuple[float, float, int]:
            rank, item = ranked
            is_volatile = self._offers[item.source].is_volatile
            return item.source if is_volatile else -1, places.get(item, math.inf), rank if is_volatile else item.order

        return [item for _, item in sorted(rest, key=position)]

    def _placed(self, behind: Iterable[_Item], kept: Iterable[_Item], now_s: float) -> list[_Item]:
        """Those of `behind` that need not wait."""
        volatile = {item.source for item in kept if self._offers[item.source].is_volatile}
        placed: list[_Item] = []
        waiting: list[_Item] = []
        for item in behind:
            if volatile - {item.source} and now_s < item.due_s:
                waiting.append(item)
                continue
            placed.append(item)
            if self._offers[item.source].is_volatile:
                volatile.add(item.source)
        self.due_s = min((item.due_s for item in waiting), default=None)
        return placed

    # ---- choice -------------------------------------------------------------------------------------------------

    def _selected(self) -> list[_Item]:
        """What is in, source by source, the stable sources first."""
        candidates = self._without_duplicates()
        weights = [offer.rules.weight for offer in self._offers]
        chunk_shares = whole_shares(self._max_chunks, weights, self._demands(candidates, "max_chunks", lambda _: 1))
        token_shares = whole_shares(
            self._max_tokens, weights, self._demands(candidates, "max_tokens", lambda item: item.num_tokens)
        )
        laid = set(self._laid)
        selected: list[_Item] = []
        for source, items in candidates.items():
            # What was appended stays, whatever the others do.
            stays = laid if self._offers[source].rules.appends else set()
            fitting = _fitting(items, chunk_shares[source], token_shares[source], stays)
            self._num_refused[source] = len(items) - len(fitting)
            selected += fitting
        return selected

    def _without_duplicates(self) -> dict[int, list[_Item]]:
        """Each source's chunks; of several that say the same, the one that is in the context, or that is stable."""
        claims = _Claims(self._drop_duplicates)
        for item in self._laid:
            if self._offers[item.source].items.get((item.chunk.source, item.chunk.title, item.chunk.text)) is item:
                claims.claim(item)
        order = sorted(range(len(self._offers)), key=lambda i: (self._offers[i].is_volatile, i))
        return {i: [item for item in self._offers[i].items.values() if claims.claim(item)] for i in order}

    def _demands(self, candidates: dict[int, list[_Item]], limit: str, size: Callable[[_Item], int]) -> list[float]:
        """How much each source can still use: without end while it runs, but for its own limit."""
        demands = []
        for source, offer in enumerate(self._offers):
            own = getattr(offer.rules, limit)
            most = math.inf if own is None else float(own)
            demands.append(min(most, sum(map(size, candidates[source]))) if offer.has_ended else most)
        return demands

    def _item(self, source: int, chunk: Chunk, now_s: float) -> _Item:
        self._num_items += 1
        counts = self._max_tokens is not None or self._offers[source].rules.max_tokens is not None
        return _Item(
            source=source,
            chunk=chunk,
            num_tokens=self._count_tokens(chunk.text) if counts else 0,
            due_s=now_s + self._hold_s,
            order=self._num_items,
            url=_url_key(chunk.source),
            text=" ".join(chunk.text.split()) if self._drop_duplicates else "",
        )


class _Claims:
    """Who was first with a text, and with a URL."""

    def __init__(self, is_exclusive: bool) -> None:
        self._is_exclusive = is_exclusive
        self._texts: dict[str, _Item] = {}
        self._urls: dict[str, int] = {}

    def claim(self, item: _Item) -> bool:
        """Whether the item may be in. A source may bring many chunks of one URL: passages of a page."""
        if not self._is_exclusive:
            return True
        if item.text and self._texts.get(item.text, item) is not item:
            return False
        if item.url and self._urls.get(item.url, item.source) != item.source:
            return False
        self._texts.setdefault(item.text, item)
        self._urls.setdefault(item.url, item.source)
        return True


def _fitting(items: Iterable[_Item], max_chunks: float, max_tokens: float, stays: set[_Item]) -> list[_Item]:
    items = list(items)
    fitting = {item for item in items if item in stays}
    chunks_left = max_chunks - len(fitting)
    tokens_left = max_tokens - sum(item.num_tokens for item in fitting)
    for item in items:
        if item not in fitting and chunks_left >= 1 and item.num_tokens <= tokens_left:
            fitting.add(item)
            chunks_left -= 1
            tokens_left -= item.num_tokens
    return [item for item in items if item in fitting]


def _url_key(source: str) -> str:
    """What two ways of writing an http(s) URL have in common; empty for what is no such URL."""
    try:
        parts = urlsplit(source)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return ""
        return f"{parts.hostname}:{parts.port or ''}{parts.path.rstrip('/')}?{parts.query}"
    except ValueError:
        return ""
