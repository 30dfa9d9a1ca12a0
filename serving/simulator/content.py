"""What a KV slot holds, and what a model without weights samples.

A transformer's KV entry at position `p` depends on the tokens `0..p` and on nothing else, and its greedy
next token depends on all tokens so far. Both are stood for by one number here: the hash of the token prefix.
The hash is a sum (modulo 2**64) of one mixed term per `(position, token)`, so a prefix extends in place, a
whole prompt is hashed in one vectorised pass, and two different sequences agree with probability 2**-64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PLACEHOLDER_TOKEN_ID", "SamplingRule", "TokenRow", "prefix_hashes"]

PLACEHOLDER_TOKEN_ID = -1
"""What a runner keeps for a token that was sampled but never copied to the host."""

_MASK = (1 << 64) - 1
_POSITION_STEP = 0x9E3779B97F4A7C15
_TOKEN_STEP = 0xD1B54A32D192ED03
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

HashArray = NDArray[np.uint64]


def _mix(value: int) -> int:
    """Scatter one 64-bit value (the finaliser of splitmix64)."""
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def _term(position: int, token_id: int) -> int:
    return _mix(((position + 1) * _POSITION_STEP + token_id * _TOKEN_STEP) & _MASK)


def _terms(first_position: int, token_ids: NDArray[np.int64]) -> HashArray:
    """The terms of `token_ids` placed from `first_position` on; same values as `_term`."""
    positions = np.arange(first_position + 1, first_position + 1 + len(token_ids), dtype=np.uint64)
    value = positions * np.uint64(_POSITION_STEP) + token_ids.astype(np.uint64) * np.uint64(_TOKEN_STEP)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    scattered: HashArray = value ^ (value >> np.uint64(31))
    return scattered


def prefix_hashes(token_ids: Sequence[int]) -> HashArray:
    """Entry `p` is the content of a KV slot that was computed from `token_ids[: p + 1]`."""
    return TokenRow(token_ids).hashes.copy()


class TokenRow:
    """One sequence of token ids together with the hash of each of its prefixes.

    Appending and overwriting cost only what changed; a prefix is never hashed twice.
    """

    __slots__ = ("_hashes", "_length", "_tokens")

    def __init__(self, token_ids: Iterable[int]) -> None:
        tokens = np.array(
            token_ids if isinstance(token_ids, (list, tuple, np.ndarray)) else list(token_ids), dtype=np.int64
        )
        self._length = len(tokens)
        capacity = self._length + 64
        self._tokens = np.empty(capacity, dtype=np.int64)
        self._hashes = np.empty(capacity, dtype=np.uint64)
        self._tokens[: self._length] = tokens
        self._rehash(0)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The token ids, as a view that the next change may invalidate."""
        return self._tokens[: self._length]

    @property
    def hashes(self) -> HashArray:
        """`hashes[p]` covers the tokens `0..p`; a view that the next change may invalidate."""
        return self._hashes[: self._length]

    def hash_of(self, length: int) -> int:
        """The hash of the first `length` tokens; 0 for none."""
        return int(self._hashes[length - 1]) if length else 0

    def append(self, token_id: int) -> None:
        """Add one token at the end."""
        if self._length == len(self._tokens):
            self._grow()
        previous = self.hash_of(self._length)
        self._tokens[self._length] = token_id
        self._hashes[self._length] = (previous + _term(self._length, token_id)) & _MASK
        self._length += 1

    def put(self, position: int, token_id: int) -> None:
        """Overwrite the token at `position`; the prefixes that contain it are hashed again."""
        if int(self._tokens[position]) == token_id:
            return
        self._tokens[position] = token_id
        self._rehash(position)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        self._length = min(self._length, length)

    def common_prefix(self, other: TokenRow) -> int:
        """How many leading tokens the two sequences share."""
        shorter = min(self._length, other._length)
        different = np.flatnonzero(self._tokens[:shorter] != other._tokens[:shorter])
        return int(different[0]) if len(different) else shorter

    def _rehash(self, first: int) -> None:
        if first + 1 == self._length:
            token_id = int(self._tokens[first])
            self._hashes[first] = (self.hash_of(first) + _term(first, token_id)) & _MASK
            return
        terms = _terms(first, self._tokens[first : self._length])
        np.cumsum(terms, out=self._hashes[first : self._length])
        if first:
            self._hashes[first : self._length] += self._hashes[first - 1]

    def _grow(self) -> None:
        extra = max(64, self._length)
        self._tokens = np.concatenate([self._tokens, np.empty(extra, dtype=np.int64)])
        self._hashes = np.concatenate([self._hashes, np.empty(extra, dtype=np.uint64)])


@dataclass(frozen=True)
class SamplingRule:
    """Which token follows a prefix: a pure function of the prefix hash.

    Attributes:
        vocab_size: token ids are below it.
        special_token_ids: never sampled, but for the next.
        eos_token_id: the end of a sequence; None if there is none.
        eos_period: `n` ends a sequence at each position with probability `1 / n` (still a pure function of the
            prefix); 0 never samples an end.
    """

    vocab_size: int
    special_token_ids: frozenset[int] = frozenset()
    eos_token_id: int | None = None
    eos_period: int = 0

    def __post_init__(self) -> None:
        reserved = self.special_token_ids | ({self.eos_token_id} if self.eos_token_id is not None else set())
        if len([token for token in reserved if 0 <= token < self.vocab_size]) >= self.vocab_size:
            raise ValueError(f"a vocabulary of {self.vocab_size} tokens has no ordinary token to sample")
        if self.eos_period < 0:
            raise ValueError(f"eos_period must not be negative, got {self.eos_period}")
        if self.eos_period and self.eos_token_id is None:
            raise ValueError("eos_period needs an eos_token_id")

    def next_token(self, prefix_hash: int) -> int:
        """The token sampled after the prefix with this hash."""
        value = _mix(prefix_hash ^ _TOKEN_STEP)
        if self.eos_period and self.eos_token_id is not None and (value >> 40) % self.eos_period == 0:
            return self.eos_token_id
        token_id = value % self.vocab_size
        while token_id in self.special_token_ids or token_id == self.eos_token_id:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def expected_output(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy output of a correct engine for `prompt_ids`: `num_tokens` tokens, or fewer if it ends with EOS."""
        row = TokenRow(prompt_ids)
        start = len(row)
        while len(row) - start < num_tokens:
            token_id = self.next_token(row.hash_of(len(row)))
            row.append(token_id)
            if self.eos_period and token_id == self.eos_token_id:
                break
        return [int(token_id) for token_id in row.tokens[start:]]
