"""What open prompts get of each step, under policies that keep steps short for those who wait for a first token."""

from __future__ import annotations

__all__ = ["OpenShare"]

_MANY_OPEN = 32
"""Open prompts with something to compute, from which on they may have the whole step."""

_MOST_OPEN_TOKENS = 2_048
"""Longer steps compute no more tokens a second: the matrices are large enough to keep a device busy."""

_MOST_DEFERRED = 2
"""Steps in a row in which open prompts may get nothing."""


class OpenShare:
    """Keeps the account of open prompts from step to step.

    They get a share of each step: more where many of them have something to compute, since short steps cost throughput,
    and what is not computed ahead is waited for later. In a step in which a complete prompt ends its prefill they get
    nothing, for its first token would wait for theirs, but not more than twice in a row; and the next step in which
    they get tokens makes up for it. So however often prompts end, open ones are computed about as fast.

    Args:
        num_tokens: the token budget of a step.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._most = min(_MOST_OPEN_TOKENS, num_tokens)
        self._num_due = 0
        self._num_owed = 0
        self._num_deferred = 0

    def limits(self, share: float, num_waiting: int) -> tuple[int, bool]:
        """The most tokens of open prompts in the next step, 0 for no limit, and whether they may be put off.

        Args:
            share: what a policy gives them at least; 1 for no limit.
            num_waiting: open prompts that have something to compute.
        """
        if share >= 1.0:
            return 0, False
        share = min(1.0, max(share, num_waiting / _MANY_OPEN))
        self._num_due = max(1, min(self._most, int(share * self._num_tokens)))
        return min(self._most, self._num_due + self._num_owed), self._num_deferred < _MOST_DEFERRED

    def planned(self, *, deferred: bool) -> None:
        """Takes notice of a step: whether open prompts were put off in it."""
        self._num_deferred = self._num_deferred + 1 if deferred else 0
        self._num_owed = self._num_owed + self._num_due if deferred else 0
