"""Checks of option values that several classes share. Each raises a ConfigurationError that names the value."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["check_instance", "check_seconds", "is_finite_number"]

_MAX_SECONDS = 1e9  # 30 years; what is longer is a mistake, and far beyond lies what no clock can count


def is_finite_number(value: Any) -> bool:
    """Whether it is a number, no bool, of a size that a time in seconds can have."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MAX_SECONDS <= value <= _MAX_SECONDS


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False) -> None:
    """Raises ConfigurationError unless `value` is a positive number of seconds, or 0 where that is allowed."""
    if not is_finite_number(value) or value < 0 or (value == 0 and not may_be_zero):
        wanted = "a number of seconds, 0 or more" if may_be_zero else "a positive number of seconds"
        raise ConfigurationError(f"{name}={value!r:.80}: give {wanted}, at most 1e9")


def check_instance(name: str, value: Any, kind: type[Any] | tuple[type[Any], ...], wanted: str) -> None:
    """Raises ConfigurationError unless `value` is None or of this kind, which `wanted` describes."""
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(f"{name}={value!r:.80}: give {wanted}")
