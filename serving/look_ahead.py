"""Whether requests that run to their ends together fit into memory all the way (SVF's admission check)."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator

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
        """The steps until it fits beside the others to its end, and they beside it."""
        assert self._admitted
        if sum(memory) > self._capacity:
            return self._admitted[0][1]
        begin = 0.0
        for start, is_open, end in sorted(self._blocked(*memory)):
            if start > begin or (start == begin and is_open):
                break
            begin = max(begin, end)
        return begin

    def _blocked(self, num_tokens: float, num_steps: float) -> Iterator[tuple[float, bool, float]]:
        """When one of so many tokens and steps may not begin: from `start` (or right behind it, if that is open) to
        `end`. The need peaks at ends, as in `fits_to_the_end`: at its own, and at each other's before that."""
        assert self._admitted
        held, count = 0.0, 0  # tokens of those that end last, and how many they are
        longest = math.inf
        for tokens_now, to_come in [*self._admitted, (0.0, 0.0)]:
            if count:  # its own end lies between this one and the one before
                last = (self._capacity - num_tokens - num_steps - held) / count
                yield max(last, to_come) - num_steps, True, longest - num_steps
            held, count, longest = held + tokens_now, count + 1, to_come
            until = num_tokens + to_come + held + count * to_come - self._capacity
            yield to_come - num_steps, False, min(to_come, until)

    def _is_kept_out(self, num_tokens: float) -> bool:
        """Whether there is no memory for so many tokens, whoever ends."""
        return bool(self._num_kept) and num_tokens > self._capacity


def _longest_first(memory: Memory) -> float:
    return -memory[1]
