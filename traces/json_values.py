"""Which values JSON gives back as they were."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["is_flat_json"]

_TEXTS = {str}
_SCALARS = {str, int, bool, type(None)}
_SCALARS_AND_FLOATS = {*_SCALARS, float}


def is_flat_json(value: Any) -> bool:
    """Whether a value is a dict of texts, finite numbers, booleans and None by text, which JSON gives back equal. One
    that holds other values may be given back equal too: that is not looked into."""
    if type(value) is not dict or not set(map(type, value)) <= _TEXTS:
        return False
    kinds = set(map(type, value.values()))
    return kinds <= _SCALARS or (
        kinds <= _SCALARS_AND_FLOATS
        and all(map(math.isfinite, (item for item in value.values() if type(item) is float)))
    )
