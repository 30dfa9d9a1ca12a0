"""Whether requests that run to their ends together fit into memory all the way (SVF's admission check)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["fits_to_the_end"]


def fits_to_the_end(requests: Iterable[tuple[float, float]], capacity: float) -> bool:
    """Whether requests of `(tokens now, output tokens still to come)` never need more than `capacity` tokens of KV.

    All of them grow by one token a step, and each gives its memory back at its end, so the need peaks at the ends: at
    the end of one with r tokens to come, those with r or more are there, each grown by r (arXiv 2606.22327).
    """
    num_tokens = 0.0
    for count, (tokens_now, to_come) in enumerate(sorted(requests, key=lambda request: -request[1]), 1):
        num_tokens += tokens_now
        if num_tokens + count * to_come > capacity:
            return False
    return True
