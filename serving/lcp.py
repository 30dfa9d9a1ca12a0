"""The longest common prefix of two prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TokenArray", "longest_common_prefix", "token_array"]

TokenArray = npt.NDArray[np.int32]


def token_array(token_ids: Sequence[int] | bytes | TokenArray) -> TokenArray:
    """Token ids as a one-dimensional int32 array. Bytes are read as little-endian int32."""
    if isinstance(token_ids, bytes):
        return np.frombuffer(token_ids, dtype="<i4")
    return np.asarray(token_ids, dtype=np.int32)


def longest_common_prefix(old: TokenArray, new: TokenArray) -> int:
    """How many leading token ids `old` and `new` (both 1-d) have in common."""
    length = min(len(old), len(new))
    differs = old[:length] != new[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
