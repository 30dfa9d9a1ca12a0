"""Errors reach other processes as they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from stream2llm_sdk import errors
from stream2llm_sdk.errors import EngineBusyError, MissingExtraError, PromptTooLongError, Stream2LLMError, TraceError


@pytest.mark.parametrize(
    "error",
    [
        MissingExtraError("vLLM", "cpu", "gpu"),
        TraceError("blank", file="a.csv", row=3, column="endTime"),
        EngineBusyError("full", limit="max_open_streams", tenant="a", retry_after_s=1.5),
        PromptTooLongError("9 tokens"),
    ],
)
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])  # noqa: S301
def test_an_error_is_the_same_after_it_was_pickled(error: Stream2LLMError, copied: object) -> None:
    assert callable(copied)
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_has_one_root() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    assert all(issubclass(kind, Stream2LLMError) for kind in kinds)
