"""The look-ahead: nobody is let in who could not end, the first that waits is not held up, and short ones pass it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.serving.look_ahead import LookAhead, Memory, fits_to_the_end

MEMORIES = st.tuples(st.integers(1, 40), st.integers(1, 20))


def look_ahead(admitted: list[Memory], capacity: float) -> LookAhead:
    return LookAhead(lambda: admitted, capacity)


def test_whoever_is_first_comes_in_where_nobody_is() -> None:
    assert look_ahead([], 10).lets_in((500, 500))


def test_one_that_could_not_end_waits() -> None:
    assert look_ahead([(40, 10)], 100).lets_in((40, 10))
    assert not look_ahead([(40, 10)], 100).lets_in((41, 10))


def test_behind_one_that_waits_come_only_those_that_end_in_time() -> None:
    looking = look_ahead([(40, 10), (20, 4)], 100)
    assert not looking.lets_in((60, 1)), "it fits in ten steps"
    assert not looking.lets_in((1, 11))
    assert looking.lets_in((1, 10))
    looking.admitted((1, 10))
    assert not looking.lets_in((30, 5)), "it ends in time, but there is no memory for it"


def test_who_fits_sooner_is_held_up_less() -> None:
    looking = look_ahead([(40, 10), (20, 4)], 100)
    assert not looking.lets_in((45, 1)), "it fits in four steps"
    assert not looking.lets_in((1, 5))
    assert looking.lets_in((1, 4))


def test_who_turns_out_to_fit_sooner_is_not_held_up_by_the_next_short_one() -> None:
    looking = look_ahead([(1, 11), (17, 11)], 90)
    assert not looking.lets_in((40, 11)), "the others' last steps and its own would need 91"
    assert looking.lets_in((1, 1))
    looking.admitted((1, 1))
    assert not looking.lets_in((1, 9)), "after one step it fits"


def test_what_nobody_can_make_room_for_holds_nobody_up() -> None:
    looking = LookAhead(list, 100, num_kept=30)
    assert not looking.lets_in((80, 5)), "no memory until those 30 come free"
    assert looking.lets_in((60, 1_000)), "which may be never"
    assert LookAhead(list, 100, num_kept=30).lets_in((900, 5), num_certain=60), "a forecast keeps nobody out"
    assert LookAhead(list, 100).lets_in((900, 5))


@given(st.lists(MEMORIES, max_size=6), st.lists(MEMORIES, max_size=8), st.integers(20, 200))
def test_what_was_let_in_can_run_to_its_end_and_the_first_that_waits_begins_as_soon(
    admitted: list[Memory], candidates: list[Memory], capacity: int
) -> None:
    if not fits_to_the_end(admitted, capacity):
        return
    looking = look_ahead(admitted, capacity)
    together, first = list(admitted), None
    for memory in candidates:
        if looking.lets_in(memory):
            assert fits_to_the_end([*together, memory], capacity) or not together
            if first is not None:
                assert begin(first, [*together, memory], capacity) <= begin(first, together, capacity)
            looking.admitted(memory)
            together.append(memory)
        elif first is None:
            first = memory


def begin(memory: Memory, together: list[Memory], capacity: float) -> float:
    """The steps until it can be let in, if nobody else is."""
    for end in [0, *sorted(to_come for _, to_come in together)]:
        left = [(tokens + end, to_come - end) for tokens, to_come in together if to_come > end]
        if not left or fits_to_the_end([*left, memory], capacity):
            return end
    raise AssertionError("all have ended")
