"""The longest common prefix of two prompts, and prompts as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.serving.lcp import longest_common_prefix, token_array

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(TOKENS, TOKENS)
def test_it_is_the_longest_and_it_is_common(old: list[int], new: list[int]) -> None:
    lcp = longest_common_prefix(token_array(old), token_array(new))
    assert old[:lcp] == new[:lcp]
    assert lcp == min(len(old), len(new)) or old[lcp] != new[lcp]


@given(TOKENS, TOKENS)
def test_a_prefix_is_common_as_a_whole(beginning: list[int], rest: list[int]) -> None:
    short, long = token_array(beginning), token_array(beginning + rest)
    assert longest_common_prefix(short, long) == longest_common_prefix(long, short) == len(beginning)


@pytest.mark.parametrize("tokens", [[], [1], [0, 511, 2**31 - 1]])
def test_lists_bytes_and_arrays_give_the_same_array(tokens: list[int]) -> None:
    packed = np.array(tokens, dtype="<i4").tobytes()
    for given_tokens in (tokens, tuple(tokens), packed, np.array(tokens, dtype=np.int32)):
        array = token_array(given_tokens)
        assert array.dtype == np.int32
        assert array.tolist() == tokens


def test_bytes_that_are_no_whole_number_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        token_array(b"\x01\x00\x00")


def test_tokens_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        token_array([2**31])
