"""How many tokens of a step open prompts get, and how often they are put off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.serving.open_share import OpenShare


@pytest.mark.parametrize(
    ("num_tokens", "share", "num_waiting", "expected"),
    [
        (2_048, 0.25, 1, 512),
        (2_048, 0.25, 16, 1_024),
        (2_048, 0.25, 99, 2_048),
        (8_192, 0.25, 1, 2_048),  # longer steps compute no more a second
        (8_192, 0.25, 99, 2_048),
        (2, 0.25, 1, 1),
        (2_048, 1.0, 1, 0),
    ],
)
def test_many_get_more_but_never_more_than_keeps_a_device_busy(
    num_tokens: int, share: float, num_waiting: int, expected: int
) -> None:
    assert OpenShare(num_tokens).limits(share, num_waiting)[0] == expected


@given(st.lists(st.booleans(), max_size=60))
def test_they_are_put_off_twice_in_a_row_at_most_and_get_back_what_they_missed(ends: list[bool]) -> None:
    account, granted, in_a_row, missed = OpenShare(2_048), 0, 0, 0
    for end in ends:
        num_tokens, may_be_put_off = account.limits(0.25, 1)
        deferred = end and may_be_put_off
        account.planned(deferred=deferred)
        in_a_row = in_a_row + 1 if deferred else 0
        missed = missed + 512 if deferred else 0
        granted += 0 if deferred else num_tokens
        assert in_a_row <= 2
    assert granted + missed == 512 * len(ends)


def test_a_policy_that_gives_them_everything_puts_nobody_off() -> None:
    assert OpenShare(2_048).limits(1.0, 1) == (0, False)
