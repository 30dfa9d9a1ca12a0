"""Which values JSON gives back as they were."""

from __future__ import annotations

import json
import math
from typing import Any

from stream2llm_sdk.traces.checked_files import not_unicode

__all__ = ["is_flat_json", "json_text"]

_ENCODER = json.JSONEncoder(allow_nan=False)
_TEXTS = {str}
_SCALARS = {str, int, bool, type(None), float}


def is_flat_json(value: Any) -> bool:
    """Whether a value is a dict of texts, finite numbers, booleans and None by text, which JSON gives back equal. One
    that holds other values may be given back equal too: that is not looked into."""
    if type(value) is not dict or not set(map(type, value)) <= _TEXTS:
        return False
    kinds = set(map(type, value.values()))
    if not kinds <= _SCALARS:
        return False
    # JSON makes one character of the two halves of a surrogate pair.
    texts = "".join([*value, *(item for item in value.values() if type(item) is str)])
    is_finite = float not in kinds or all(math.isfinite(item) for item in value.values() if type(item) is float)
    return is_finite and not_unicode(texts) is None


def json_text(value: Any) -> str | None:
    """A value as JSON; None where that would not be given back equal, or cannot be written."""
    try:
        text = _ENCODER.encode(value)
        same = is_flat_json(value) or json.loads(text) == value
    except (TypeError, ValueError, RecursionError):
        return None
    return text if same else None
