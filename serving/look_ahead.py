"""Whether requests that run to their ends together fit into memory all the way (SVF's admission check)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

__all__ = ["LookAhead", "fits_to_the_end"]

Memory = tuple[float, float]
"""Tokens that a request will hold before its next output token, and steps still to come."""


def fits_to_the_end(requests: Iterable[Memory], capacity: float) -> bool:
    """Whether requests of `(tokens now, steps still to come)` never need more than `capacity` tokens of KV.

    All of them grow by at most one token a step, and each gives its memory back at its end, so the need peaks at the
    ends: at the end of one with r steps to come, those with r or more are there, each grown by r (arXiv 2606.22327).
    """
    num_tokens = 0.0
    for count, (tokens_now, to_come) in enumerate(sorted(requests, key=_longest_first), 1):
        num_tokens += tokens_now
        if num_tokens + count * to_come > capacity:
            return False
    return True


class LookAhead:
    """Who may be admitted in one step's plan: those that can run to their ends with all that were admitted before.

    The first that cannot is next, so that large ones do not wait for ever: what comes behind it is let in only if it
    ends before the memory for that one comes free (EASY backfilling, Lifka 1995).

    Args:
        admitted: gives the memory of those that were admitted in earlier steps; called when it is first needed.
        capacity: tokens of KV that there are.
        num_kept: those of them that nobody gets for as long as can be foreseen.
    """

    def __init__(self, admitted: Callable[[], Iterable[Memory]], capacity: float, *, num_kept: float = 0.0) -> None:
        self._earlier = admitted
        self._capacity = capacity - num_kept
        self._num_kept = num_kept
        self._admitted: list[Memory] | None = None
        self._begin: float | None = None

    def lets_in(self, memory: Memory, num_certain: float | None = None) -> bool:
        """Whether one more may come in. With nobody admitted the first always may if it fits: to keep it out protects
        nobody.

        Args:
            memory: what is expected of it.
            num_certain: tokens that it is certain to hold; left out, what is expected.
        """
        certain = memory[0] if num_certain is None else num_certain
        if self._admitted is None:
            self._admitted = sorted(self._earlier(), key=_longest_first)
        if not self._admitted and not self._is_kept_out(certain):
            return True
        if self._begin is not None and memory[1] > self._begin:
            return False
        fits = self._fits(memory, self._admitted)
        if not fits and self._begin is None:
            self._begin = math.inf if self._is_kept_out(certain) else self._when_it_fits(memory)
        return fits

    def admitted(self, memory: Memory) -> None:
        """One that was let in got tokens."""
        assert self._admitted is not None
        insort(self._admitted, memory, key=_longest_first)

    def _fits(self, memory: Memory, others: list[Memory]) -> bool:
        together = list(others)
        insort(together, memory, key=_longest_first)
        return fits_to_the_end(together, self._capacity)

    def _when_it_fits(self, memory: Memory) -> float:
        """The steps until so many have ended that it fits beside the others."""
        assert self._admitted
        ends = sorted({to_come for _, to_come in self._admitted})
        index = bisect_left(ends, True, key=lambda end: self._fits(memory, self._left_after(end)))
        return ends[min(index, len(ends) - 1)]

    def _is_kept_out(self, num_tokens: float) -> bool:
        """Whether there is no memory for so many tokens, whoever ends."""
        return bool(self._num_kept) and num_tokens > self._capacity

    def _left_after(self, num_steps: float) -> list[Memory]:
        assert self._admitted is not None
        return [
            (tokens_now + num_steps, to_come - num_steps)
            for tokens_now, to_come in self._admitted
            if to_come > num_steps
        ]


def _longest_first(memory: Memory) -> float:
    return -memory[1]
