"""One question's prompt while its context grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from stream2llm_sdk.chunk_tokens import ChunkEncoder
from stream2llm_sdk.context import Append, ContextMode, ContextUpdate, Replace
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.placement import (
    LEAST_CUT_TOKENS,
    ChunkOrder,
    DroppedChunk,
    DropReason,
    Fitted,
    Placement,
    Room,
    fit_append,
    fit_replace,
)

__all__ = ["Contents", "Prompt", "PromptChange", "Section", "chunk_order_of", "positive_or_none"]

Contents = tuple[tuple[Sequence[Fitted], Sequence[DroppedChunk]], ...]
"""For each section of a prompt what it holds, and what was cut or left out of it."""


@dataclass(frozen=True, slots=True)
class PromptChange:
    """What an update did to a prompt.

    Attributes:
        ids: the tokens to put behind those that are there (may be empty), or, for a replacement, all tokens
            of head and context.
        is_replace: whether `ids` takes the place of what is there.
    """

    ids: list[int]
    is_replace: bool

    def __bool__(self) -> bool:
        """False when the prompt is what it was."""
        return self.is_replace or bool(self.ids)


class Prompt:
    """One question's prompt while its context grows. Made by `PromptAssembler.begin`.

    A single retriever's updates go to `apply`. Several retrievers get a `section` each.
    """

    def __init__(
        self,
        question: str,
        head: tuple[int, ...],
        tail: tuple[int, ...],
        chunks: ChunkEncoder,
        room: Room,
        order: ChunkOrder,
        max_answer_tokens: int,
    ) -> None:
        self.question = question
        self.max_answer_tokens = max_answer_tokens
        self._head = head
        self._tail = tail
        self._chunks = chunks
        self._room = room
        self._order = order
        self._sections: list[Section] = []
        self._ids = list(head)

    @property
    def head_ids(self) -> list[int]:
        """The tokens before the context."""
        return list(self._head)

    @property
    def tail_ids(self) -> list[int]:
        """The tokens behind the context: the question and the beginning of the answer's turn."""
        return list(self._tail)

    @property
    def ids(self) -> list[int]:
        """Head and the context so far."""
        return list(self._ids)

    @property
    def final_ids(self) -> list[int]:
        """The whole prompt, for when the context is complete."""
        return [*self._ids, *self._tail]

    @property
    def num_context_tokens(self) -> int:
        """Tokens of context so far."""
        return len(self._ids) - len(self._head)

    @property
    def room_tokens(self) -> int:
        """Tokens of context that may still be added."""
        return self._room.num_tokens - self.num_context_tokens

    @property
    def is_full(self) -> bool:
        """Whether chunks that are appended from now on will be dropped, but for the tiniest."""
        return self.room_tokens < LEAST_CUT_TOKENS

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Every chunk in the prompt with its token offsets, in the prompt's order."""
        places, start = [], len(self._head)
        for section in self._sections:
            for fitted in section._fitted:
                end = start + len(fitted.ids)
                places.append(Placement(fitted.chunk, start, end, fitted.was_cut, section.name))
                start = end
        return tuple(places)

    @property
    def dropped(self) -> tuple[DroppedChunk, ...]:
        """What was cut or left out: of everything appended, and of the latest replacement."""
        return tuple(chain.from_iterable(section._dropped for section in self._sections))

    @property
    def contents(self) -> Contents:
        """What the sections hold, in the prompt's order. Later updates make new lists and leave these as they are."""
        return tuple((section._fitted, section._dropped) for section in self._sections)

    def section(
        self,
        name: str,
        mode: ContextMode | str,
        *,
        max_tokens: int | None = None,
        order: ChunkOrder | str | None = None,
    ) -> Section:
        """The section called `name`, made when it is asked for first, for a retriever of this `mode`.

        Sections in append mode come before those in update mode, so that what is stable goes first. They
        share the context's room, first come first served, each up to its own `max_tokens` if it has one.
        `order` is how replacements are arranged when the section is made here; left out, as the prompt's are.

        Raises:
            ConfigurationError: an unknown mode or order, or a section that exists with another mode or budget.
        """
        try:
            mode = ContextMode(mode)
        except ValueError:
            raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
        positive_or_none("max_tokens", max_tokens)
        chunk_order = self._order if order is None else chunk_order_of(order)
        for section in self._sections:
            if section.name == name:
                if (section.mode, section.max_tokens) != (mode, max_tokens):
                    raise ConfigurationError(
                        f"section {name!r} has mode={section.mode.value!r}, max_tokens={section.max_tokens}: "
                        f"it cannot be asked for with mode={mode.value!r}, max_tokens={max_tokens}"
                    )
                return section
        section = Section(self, name, mode, max_tokens, chunk_order)
        self._sections.append(section)
        self._sections.sort(key=lambda section: section.mode is ContextMode.UPDATE)
        return section

    def apply(self, update: ContextUpdate) -> PromptChange:
        """Takes in one update of the only retriever and says what it did to the token ids."""
        if not self._sections:
            self.section("", ContextMode.UPDATE if isinstance(update, Replace) else ContextMode.APPEND)
        if len(self._sections) != 1:
            names = ", ".join(repr(section.name) for section in self._sections)
            raise ConfigurationError(f"the prompt has sections {names}: apply the update to one of these")
        return self._sections[0].apply(update)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.prompt_view import prompt_html

        return prompt_html(self)

    def _relayout(self) -> PromptChange:
        before = self._ids
        pieces = chain.from_iterable(section._fitted for section in self._sections)
        self._ids = list(chain(self._head, chain.from_iterable(fitted.ids for fitted in pieces)))
        if self._ids[: len(before)] == before:
            return PromptChange(self._ids[len(before) :], is_replace=False)
        return PromptChange(list(self._ids), is_replace=True)

    def _room_of(self, section: Section, own_tokens: int) -> Room:
        """Room for `section` beyond `own_tokens` of its own that stay."""
        others = self.num_context_tokens - section.num_tokens
        room = Room(self._room.num_tokens - others - own_tokens, self._room.reason)
        if section.max_tokens is not None and section.max_tokens - own_tokens < room.num_tokens:
            room = Room(section.max_tokens - own_tokens, DropReason.SECTION_BUDGET)
        return room


class Section:
    """The part of a prompt that belongs to one retriever. Made by `Prompt.section`."""

    def __init__(self, prompt: Prompt, name: str, mode: ContextMode, max_tokens: int | None, order: ChunkOrder) -> None:
        self.name = name
        self.mode = mode
        self.max_tokens = max_tokens
        self.order = order
        self._prompt = prompt
        self._fitted: list[Fitted] = []
        self._dropped: list[DroppedChunk] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunks that are in the prompt, separators included."""
        return sum(len(fitted.ids) for fitted in self._fitted)

    def apply(self, update: ContextUpdate) -> PromptChange:
        """Takes in one update and says what it did to the whole prompt's token ids.

        Raises:
            ConfigurationError: `update` is neither `Append` nor `Replace`.
        """
        if isinstance(update, Append):
            self._append(update)
        elif isinstance(update, Replace):
            self._replace(update)
        else:
            raise ConfigurationError(f"an update is Append or Replace, not {type(update).__name__}: {update!r:.80}")
        return self._prompt._relayout()

    def _append(self, update: Append) -> None:
        prompt = self._prompt
        fitted, dropped = fit_append(
            prompt._chunks,
            update.chunks,
            prompt._room_of(self, self.num_tokens),
            least_cut=LEAST_CUT_TOKENS if prompt.num_context_tokens else 1,
            section=self.name,
        )
        self._fitted = [*self._fitted, *fitted]
        self._dropped = [*self._dropped, *dropped]

    def _replace(self, update: Replace) -> None:
        prompt = self._prompt
        stands_alone = prompt.num_context_tokens == self.num_tokens
        self._fitted, self._dropped = fit_replace(
            prompt._chunks,
            update.chunks,
            prompt._room_of(self, 0),
            least_cut=1 if stands_alone else LEAST_CUT_TOKENS,
            order=self.order,
            current=self._fitted,
            section=self.name,
        )


def chunk_order_of(order: ChunkOrder | str) -> ChunkOrder:
    """The order of this name.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return ChunkOrder(order)
    except ValueError:
        raise ConfigurationError(f"order={order!r}: choose 'stable' or 'rank'") from None


def positive_or_none(name: str, value: int | None) -> int | None:
    """`value` if it is None or a whole number of tokens from 1.

    Raises:
        ConfigurationError: it is anything else.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name}={value!r} must be a whole number of tokens, 1 or more")
    return value
