"""The requests that decode at the head of the order: what they take of a step is known without asking each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["DecodingRun"]


@dataclass(frozen=True, slots=True)
class _Member:
    """A request of the run.

    Attributes:
        phase: it needs a block at steps that leave this rest when divided by the tokens of a block.
        last_step: the last step at which it is certain to want its one token.
    """

    request: Request
    phase: int
    last_step: int


class DecodingRun:
    """Requests that stand next to each other at the head of the order, each of which takes one token in every step.

    As long as nothing happens to any of them, a step changes all of them alike: each computes one position, and those
    whose last block was full take a block. So one count for each position in a block tells what the run needs, however
    many requests it has. What happens to a request passes through the order, which tells from where on it changed;
    a step in which not every member got its token ends the run.

    Args:
        tables: each request's blocks by its id.
        block_size: tokens of a block; 0 where layers differ in what they attend to, and there is no run then.
        longest: tokens that a request may have at most to want one more.
    """

    def __init__(self, tables: Mapping[str, Sized], block_size: int, longest: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._longest = longest
        self._members: list[_Member] = []
        self._num_due = [0] * block_size
        self._num_steps = 0
        self._last_step: float = math.inf
        self.num_tokens: dict[str, int] = {}
        """What each of them takes, by its id, in the order of their places."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (member.request for member in self._members)

    @property
    def num_blocks(self) -> int:
        """Free blocks that the next step takes."""
        return self._num_due[self._num_steps % self._block_size] if self._members else 0

    def begin(self, num_unchanged: int, num_tokens: int, num_free: int) -> None:
        """Prepares for a step: keeps what is certain to be served in it.

        Args:
            num_unchanged: leading entries of the order that are as they were when the step before began.
            num_tokens: the step's token budget; the run leaves at least one.
            num_free: free blocks.
        """
        if num_unchanged < len(self._members):
            self._cut(num_unchanged)
        if not self._members:
            return
        if self._last_step < self._num_steps:
            self._cut(next(i for i, member in enumerate(self._members) if member.last_step < self._num_steps))
        # They were served together ever since they joined: what is in flight of one is in flight of all.
        wants_one = not self._members or _wants_one_token(self._members[0].request)
        if len(self) >= num_tokens or self.num_blocks > num_free or not wants_one:
            self.clear()

    def end(self, newcomers: Sequence[Request]) -> None:
        """After a step in which each member got its token: the next requests in the order, which got one too, join."""
        self._num_steps += 1
        for request in newcomers:
            num_computed = request.num_computed_tokens
            room = len(self._tables.get(request.request_id, ())) * self._block_size - num_computed
            # The last token that is certain to be wanted: of the model's length, or of the answer. A session's answer
            # may be followed by another prompt.
            num_left = min(self._longest, request.num_prompt_tokens + request.max_tokens - 1) - num_computed - 1
            if request.resumable or not 0 <= room < self._block_size or num_left < 0:
                return
            phase, last_step = (self._num_steps + room) % self._block_size, self._num_steps + num_left
            self._members.append(_Member(request, phase, last_step))
            self._num_due[phase] += 1
            self._last_step = min(self._last_step, last_step)
            self.num_tokens[request.request_id] = 1

    def clear(self) -> None:
        """Forgets all of them."""
        self._cut(0)

    def _cut(self, num_kept: int) -> None:
        for member in self._members[num_kept:]:
            self._num_due[member.phase] -= 1
            del self.num_tokens[member.request.request_id]
        del self._members[num_kept:]
        self._last_step = min((member.last_step for member in self._members), default=math.inf)


def _wants_one_token(request: Request) -> bool:
    """Whether all but one token of a request are computed, those in flight included."""
    return bool(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens == 1)
