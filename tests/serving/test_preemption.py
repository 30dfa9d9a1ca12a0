"""Recompute or swap is decided by what the victim itself would cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import CostCurve
from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B, CostModel
from stream2llm_sdk.serving.preemption import InvalidationHistory, PreemptionMode, VictimFacts, decide

COST, RECOMPUTE, SWAP = PreemptionMode.COST, PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def linear_costs(recompute: float, swap_out: float, swap_in: float) -> CostModel:
    """Seconds per 1,000 tokens."""
    one, two, three = (CostCurve((1000,), (seconds,)) for seconds in (recompute, swap_out, swap_in))
    return CostModel("test", "test", one, two, three)


# Recompute takes 4 s for 1,000 tokens; a copy takes 1 s each way.
COSTS = linear_costs(4.0, 1.0, 1.0)
VICTIM = VictimFacts(1000)


@st.composite
def facts(draw: st.DrawFn) -> VictimFacts:
    num_tokens = draw(st.integers(0, 200_000))
    return VictimFacts(
        num_tokens=num_tokens,
        num_tokens_cached_again=draw(st.integers(0, num_tokens)),
        survival=draw(st.floats(0, 1)),
        num_tokens_copied=draw(st.integers(0, num_tokens)),
        expected_away_s=draw(st.none() | st.floats(0, 100)),
        cache_lifetime_s=draw(st.none() | st.floats(0, 100)),
    )


def test_a_victim_that_is_dearer_to_recompute_than_to_copy_out_and_in_is_swapped() -> None:
    decision = decide(COSTS, VICTIM, COST, fits_host_pool=True)
    assert (decision.mode, decision.recompute_s, decision.swap_s) == (SWAP, 4.0, 2.0)
    assert decide(linear_costs(1.9, 1.0, 1.0), VICTIM, COST, fits_host_pool=True).mode is RECOMPUTE


def test_equal_costs_are_recomputed_because_that_takes_no_host_memory() -> None:
    assert decide(linear_costs(2.0, 1.0, 1.0), VICTIM, COST, fits_host_pool=True).mode is RECOMPUTE


def test_what_the_prefix_cache_gives_back_is_neither_recomputed_nor_copied_in() -> None:
    decision = decide(COSTS, replace(VICTIM, num_tokens_cached_again=750), COST, fits_host_pool=True)
    assert (decision.mode, decision.recompute_s, decision.swap_s) == (RECOMPUTE, 1.0, 1.25)


def test_tokens_behind_a_long_cached_prefix_are_charged_for_their_attention_to_it() -> None:
    costs = replace(COSTS, seconds_per_pair=1e-6)
    victim = VictimFacts(100_000, num_tokens_cached_again=90_000)
    decision = decide(costs, victim, COST, fits_host_pool=True)
    assert decision.recompute_s == pytest.approx(40 + 1e-6 * (10_000 * 90_000 + 10_000 * 10_001 / 2))


def test_a_victim_that_will_be_invalidated_is_not_worth_a_copy_out() -> None:
    decision = decide(COSTS, replace(VICTIM, survival=0.25), COST, fits_host_pool=True)
    assert (decision.mode, decision.recompute_s, decision.swap_s) == (RECOMPUTE, 1.0, 1.25)


def test_a_victim_whose_copies_are_in_the_host_already_is_swapped_for_the_copy_back_alone() -> None:
    costs = linear_costs(1.5, 1.0, 1.0)
    assert decide(costs, VICTIM, COST, fits_host_pool=True).mode is RECOMPUTE
    decision = decide(costs, replace(VICTIM, num_tokens_copied=1000), COST, fits_host_pool=True)
    assert (decision.mode, decision.swap_s) == (SWAP, 1.0)


def test_the_longer_a_victim_is_away_the_less_the_prefix_cache_gives_back() -> None:
    victim = VictimFacts(1000, num_tokens_cached_again=1000, cache_lifetime_s=10.0)
    found = [replace(victim, expected_away_s=away).num_tokens_found_again for away in (0.0, 2.5, 10.0, 99.0)]
    assert found == [1000, 750, 0, 0]
    soon = decide(COSTS, replace(victim, expected_away_s=0.0), COST, fits_host_pool=True)
    late = decide(COSTS, replace(victim, expected_away_s=99.0), COST, fits_host_pool=True)
    assert (soon.mode, soon.recompute_s) == (RECOMPUTE, 0.0)
    assert (late.mode, late.recompute_s) == (SWAP, 4.0)


@pytest.mark.parametrize("unknown", [{"expected_away_s": 5.0}, {"cache_lifetime_s": 5.0}, {}])
def test_an_unknown_return_or_lifetime_discounts_nothing(unknown: dict[str, float]) -> None:
    assert replace(VICTIM, num_tokens_cached_again=600, **unknown).num_tokens_found_again == 600  # type: ignore[arg-type]


@given(facts(), st.booleans())
def test_the_pure_modes_do_as_they_say_where_the_host_pool_allows(victim: VictimFacts, fits: bool) -> None:
    assert decide(H200_LLAMA_8B, victim, RECOMPUTE, fits_host_pool=fits).mode is RECOMPUTE
    expected = SWAP if fits and victim.num_tokens else RECOMPUTE
    assert decide(H200_LLAMA_8B, victim, SWAP, fits_host_pool=fits).mode is expected


@given(facts())
def test_deciding_by_cost_is_never_expected_to_lose_to_a_pure_mode(victim: VictimFacts) -> None:
    decision = decide(H200_LLAMA_8B, victim, COST, fits_host_pool=True)
    chosen = decision.recompute_s if decision.mode is RECOMPUTE else decision.swap_s
    assert chosen == min(decision.recompute_s, decision.swap_s)
    assert decide(H200_LLAMA_8B, victim, COST, fits_host_pool=False).mode is RECOMPUTE


@given(facts(), st.floats(0, 1))
def test_a_lower_chance_to_survive_never_turns_recompute_into_swap(victim: VictimFacts, share: float) -> None:
    weaker = replace(victim, survival=victim.survival * share)
    if decide(H200_LLAMA_8B, victim, COST, fits_host_pool=True).mode is RECOMPUTE:
        assert decide(H200_LLAMA_8B, weaker, COST, fits_host_pool=True).mode is RECOMPUTE


@pytest.mark.parametrize("name", ["cost", "COST", " Recompute\n", "swap"])
def test_a_mode_is_found_by_its_name_in_any_case(name: str) -> None:
    assert PreemptionMode.parse(name) == name.strip().lower()


def test_an_unknown_mode_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="cost, recompute, swap, got 'both'"):
        PreemptionMode.parse("both")


# ---- history ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_expects_no_update_survives_whole() -> None:
    history = InvalidationHistory()
    history.record("a", "g", lcp=0, num_computed=100)
    assert history.survival("a", "g", 0) == 1.0
    assert history.survival("never seen", "never seen", 0) == 1.0


def test_without_observations_the_prior_answers() -> None:
    assert InvalidationHistory().kept_share("a", "g") == 0.5
    assert InvalidationHistory(prior_share=0.9).survival("a", "g", 2) == pytest.approx(0.81)


def test_a_stream_learns_from_its_own_updates() -> None:
    history = InvalidationHistory()
    for _ in range(50):
        history.record("keeps", "g", lcp=90, num_computed=100)
        history.record("loses", "h", lcp=10, num_computed=100)
    assert history.kept_share("keeps", "g") == pytest.approx(0.9, abs=0.02)
    assert history.kept_share("loses", "h") == pytest.approx(0.1, abs=0.03)


def test_a_new_stream_starts_from_its_group() -> None:
    history = InvalidationHistory()
    for index in range(100):
        history.record(f"s{index}", "diskann/tenant", lcp=80, num_computed=100)
    assert history.kept_share("new", "diskann/tenant") == pytest.approx(0.8, abs=0.01)
    assert history.kept_share("new", "other") == 0.5


def test_a_group_follows_a_change_of_the_load() -> None:
    history = InvalidationHistory(group_memory=32)
    for share in [100] * 1000 + [20] * 150:
        history.record("s", "g", lcp=share, num_computed=100)
        history.forget("s")
    assert history.kept_share("new", "g") == pytest.approx(0.2, abs=0.03)


@given(
    st.lists(st.tuples(st.integers(-5, 2000), st.integers(-5, 1000)), max_size=50),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_survival_is_a_share_that_falls_with_every_expected_update(
    updates: list[tuple[int, int]], fewer: float, more: float
) -> None:
    history = InvalidationHistory()
    for lcp, num_computed in updates:
        history.record("s", "g", lcp=lcp, num_computed=num_computed)
    assert 0 <= history.kept_share("s", "g") <= 1
    fewer, more = sorted((fewer, more))
    assert 0 <= history.survival("s", "g", more) <= history.survival("s", "g", fewer) <= 1


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_an_update_that_keeps_everything_never_lowers_the_estimate(lcps: list[int]) -> None:
    history = InvalidationHistory()
    for lcp in lcps:
        history.record("s", "g", lcp=lcp, num_computed=100)
    before = history.kept_share("s", "g")
    history.record("s", "g", lcp=100, num_computed=100)
    assert history.kept_share("s", "g") >= before - 1e-12


def test_an_update_before_anything_was_computed_tells_nothing() -> None:
    history = InvalidationHistory()
    history.record("s", "g", lcp=0, num_computed=0)
    assert history.num_streams == 0
    assert history.kept_share("s", "g") == 0.5


def test_nothing_remains_of_ended_streams_and_old_groups() -> None:
    history = InvalidationHistory(max_groups=3)
    for index in range(100):
        history.record(f"s{index}", f"g{index}", lcp=0, num_computed=10)
        history.forget(f"s{index}")
    assert history.num_streams == 0
    assert history.kept_share("new", "g0") == 0.5
    assert history.kept_share("new", "g99") < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_share": 1.5}, "prior_share.*1.5"),
        ({"prior_weight": 0.0}, "prior_weight.*0.0"),
        ({"group_memory": 0}, "group_memory.*0"),
        ({"max_groups": 0}, "max_groups.*0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        InvalidationHistory(**options)  # type: ignore[arg-type]
