"""Which chunks fit a prompt, in which order, and what is left out of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from stream2llm_sdk.chunk_tokens import ChunkEncoder
from stream2llm_sdk.context import Chunk

__all__ = [
    "LEAST_CUT_TOKENS",
    "ChunkOrder",
    "DropReason",
    "DroppedChunk",
    "Fitted",
    "Placement",
    "Room",
    "arranged",
    "fit_append",
    "fit_replace",
]

KeyT = TypeVar("KeyT", bound=Hashable)

LEAST_CUT_TOKENS = 16
"""A chunk is not cut to less than this behind others: so little text says nothing."""


class ChunkOrder(StrEnum):
    """Order of the chunks of an update-mode section.

    Attributes:
        RANK: as the retriever ranks them, best first.
        STABLE: chunks that stay keep their order and new ones go behind them, so that the prompts before and
            after an update share a long prefix.
    """

    RANK = "rank"
    STABLE = "stable"


class DropReason(StrEnum):
    """Why a chunk, or a part of it, is not in the prompt; a budget is named after its option.

    Attributes:
        EMPTY: it has no text.
        DUPLICATE: the same chunk is there already.
        CHUNK_BUDGET: it is longer than `max_chunk_tokens`.
        SECTION_BUDGET: its section has reached its own `max_tokens`.
        CONTEXT_BUDGET: all chunks have reached `max_context_tokens`.
        MODEL_LENGTH: with the answer they have reached the model's length.
    """

    EMPTY = "empty"
    DUPLICATE = "duplicate"
    CHUNK_BUDGET = "max_chunk_tokens"
    SECTION_BUDGET = "max_section_tokens"
    CONTEXT_BUDGET = "max_context_tokens"
    MODEL_LENGTH = "max_model_len"


@dataclass(frozen=True, slots=True)
class DroppedChunk:
    """A chunk that was left out of the prompt, or cut.

    Attributes:
        chunk: the chunk.
        reason: what left it out.
        num_tokens: tokens of its text left out; extrapolated where the text is far longer than the budget.
        kept_tokens: tokens of its text that are in the prompt; above 0 the chunk was cut.
        section: the prompt's section that it was for.
    """

    chunk: Chunk
    reason: DropReason
    num_tokens: int
    kept_tokens: int = 0
    section: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """A chunk's place in the prompt.

    Attributes:
        chunk: the chunk.
        start, end: its tokens, `end` excluded, counted from the prompt's first token.
        was_cut: whether only its beginning fitted.
        section: the prompt's section that it is in.
    """

    chunk: Chunk
    start: int
    end: int
    was_cut: bool
    section: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens may still be placed, and the budget that says so."""

    num_tokens: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Fitted:
    """A chunk with the token ids that stand for it in the prompt."""

    chunk: Chunk
    ids: tuple[int, ...]
    was_cut: bool

    @property
    def identity(self) -> tuple[str, str, str]:
        return _identity(self.chunk)


def fit_append(
    encoder: ChunkEncoder, chunks: Iterable[Chunk], room: Room, *, least_cut: int, section: str
) -> tuple[list[Fitted], list[DroppedChunk]]:
    """The chunks in their order while there is room; the one that overruns it is cut.

    `least_cut` is the fewest tokens that the first of them may be cut to.
    """
    fit = _Fit(encoder, room, section)
    for chunk in chunks:
        fit.add(chunk, least_cut=LEAST_CUT_TOKENS if fit.fitted else least_cut)
    return fit.fitted, fit.dropped


def fit_replace(
    encoder: ChunkEncoder,
    chunks: Iterable[Chunk],
    room: Room,
    *,
    least_cut: int,
    order: ChunkOrder,
    current: Sequence[Fitted],
    section: str,
) -> tuple[list[Fitted], list[DroppedChunk]]:
    """The chunks that fit whole, best first, arranged in `order`.

    Only the best chunk may be cut, to `least_cut` tokens or more: others would be cut elsewhere with every
    update, and lose their KV.
    """
    fit = _Fit(encoder, room, section)
    for chunk in chunks:
        fit.add(chunk, least_cut=None if fit.fitted else least_cut)
    by_identity = {fitted.identity: fitted for fitted in fit.fitted}
    identities = arranged(by_identity, (old.identity for old in current), order)
    return [by_identity[identity] for identity in identities], fit.dropped


def arranged(best_first: Iterable[KeyT], current: Iterable[KeyT], order: ChunkOrder) -> list[KeyT]:
    """What is wanted, as it follows in the prompt after what is there now: see `ChunkOrder`."""
    wanted = dict.fromkeys(best_first)
    if order is ChunkOrder.RANK:
        return list(wanted)
    kept = dict.fromkeys(key for key in current if key in wanted)
    return [*kept, *(key for key in wanted if key not in kept)]


class _Fit:
    """One update's chunks being placed within its room."""

    def __init__(self, encoder: ChunkEncoder, room: Room, section: str) -> None:
        self.fitted: list[Fitted] = []
        self.dropped: list[DroppedChunk] = []
        self._encoder = encoder
        self._left = room.num_tokens
        self._room_reason = room.reason
        self._section = section
        self._seen: set[tuple[str, str, str]] = set()

    def add(self, chunk: Chunk, *, least_cut: int | None) -> None:
        """Places `chunk`, cut if need be to no less than `least_cut` tokens (None: whole or not at all)."""
        encoded = self._encoder.encode(chunk)
        num_separator = len(self._encoder.separator_ids)
        total = len(encoded.ids) - num_separator + encoded.num_left_out
        if not encoded.ids:
            return self._drop(chunk, DropReason.EMPTY, 0)
        if _identity(chunk) in self._seen:
            return self._drop(chunk, DropReason.DUPLICATE, total)
        self._seen.add(_identity(chunk))

        reason = DropReason.CHUNK_BUDGET
        if len(encoded.ids) > self._left:
            reason = self._room_reason
            if least_cut is None or self._left < least_cut + num_separator:
                return self._drop(chunk, reason, total)
            encoded = self._encoder.cut(chunk, self._left)
        kept = len(encoded.ids) - num_separator
        if kept < total:
            self._drop(chunk, reason, total - kept, kept)
        self._left -= len(encoded.ids)
        self.fitted.append(Fitted(chunk, encoded.ids, was_cut=kept < total))
        return None

    def _drop(self, chunk: Chunk, reason: DropReason, num_tokens: int, kept_tokens: int = 0) -> None:
        self.dropped.append(DroppedChunk(chunk, reason, num_tokens, kept_tokens, self._section))


def _identity(chunk: Chunk) -> tuple[str, str, str]:
    """What makes two chunks the same document: not their score, which changes while a search goes on."""
    return chunk.source, chunk.title, chunk.text
