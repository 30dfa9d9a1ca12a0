"""The published bound of smallest volume first, in the model that it is stated in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.volume_model import (
    LatencyBound,
    VolumeRequest,
    by_volume,
    latency_bound,
    run_in_order,
)

Burst = tuple[list[VolumeRequest], int]


def burst(memory: int, *sizes: tuple[int, int]) -> Burst:
    return [VolumeRequest(prompt, output) for prompt, output in sizes], memory


def total(requests: list[VolumeRequest], memory: int, order: list[int] | None = None) -> int:
    return sum(run_in_order(requests, by_volume(requests) if order is None else order, memory))


@st.composite
def random_bursts(draw: st.DrawFn) -> Burst:
    memory = draw(st.integers(4, 120))
    output = st.integers(1, max(1, memory // draw(st.integers(1, 8))))
    requests = [
        VolumeRequest(draw(st.integers(0, memory - num_output)), num_output)
        for num_output in draw(st.lists(output, min_size=1, max_size=25))
    ]
    return requests, memory


@st.composite
def adversarial_bursts(draw: st.DrawFn) -> Burst:
    """Shapes that waste memory: triangles that leave half of it unused, equal volumes of opposite shapes, and a wide
    one that keeps narrow ones waiting."""
    memory = draw(st.integers(8, 150))
    largest = draw(st.integers(2, memory))
    shapes = [
        VolumeRequest(0, largest),  # grows from nothing
        VolumeRequest(largest - 1, 1),  # wide and short
        VolumeRequest(0, 1),
        VolumeRequest(largest // 2, largest - largest // 2),
        VolumeRequest(0, max(1, int((2 * (largest - 1)) ** 0.5))),  # a volume like the wide one's, as a triangle
    ]
    counts = draw(st.lists(st.integers(0, 12), min_size=len(shapes), max_size=len(shapes)).filter(any))
    return [shape for shape, count in zip(shapes, counts, strict=True) for _ in range(count)], memory


bursts = st.one_of(random_bursts(), adversarial_bursts())


@settings(max_examples=150, deadline=None)
@given(bursts)
@example(burst(100, (0, 51), (0, 51), (0, 51)))  # one at a time, each using a quarter of the memory
@example(burst(1000, *[(0, 400)] * 40))
def test_smallest_volume_first_stays_within_the_published_ratio_of_the_lower_bound(case: Burst) -> None:
    requests, memory = case
    bound, latency = latency_bound(requests, memory), total(requests, memory)
    assert latency <= bound.ratio * bound.combined * (1 + 1e-9)
    assert latency <= bound.smallest_volume_first * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(bursts, st.randoms(use_true_random=False))
def test_no_order_of_service_goes_below_the_lower_bound(case: Burst, random: object) -> None:
    requests, memory = case
    order = list(range(len(requests)))
    random.shuffle(order)  # type: ignore[attr-defined]
    bound = latency_bound(requests, memory)
    assert total(requests, memory, order) >= bound.combined * (1 - 1e-9)
    assert bound.combined >= max(bound.volume, bound.output) * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(bursts)
def test_memory_is_never_exceeded(case: Burst) -> None:
    requests, memory = case
    ends = run_in_order(requests, by_volume(requests), memory)
    for step in range(max(ends)):
        held = sum(
            request.peak - (end - step - 1)
            for request, end in zip(requests, ends, strict=True)
            if end - request.num_output_tokens <= step < end
        )
        assert held <= memory


def test_against_volumes_alone_the_ratio_does_not_hold() -> None:
    """Why the bound counts outputs too: a lone small request takes o steps, however much memory there is."""
    requests, memory = burst(1000, (1, 1))
    bound = latency_bound(requests, memory)
    assert bound.volume == pytest.approx(0.002)
    assert total(requests, memory) == bound.output == bound.combined == 1
    assert total(requests, memory) > 300 * bound.ratio * bound.volume / 2


def test_the_ratio_is_5_for_requests_of_half_the_memory_and_tends_to_3() -> None:
    assert LatencyBound(volume=1, output=1, combined=1, alpha=0.5).ratio == 5
    assert LatencyBound(volume=1, output=1, combined=1, alpha=1e-6).ratio == pytest.approx(3, abs=1e-5)
    assert LatencyBound(volume=1, output=1, combined=1, alpha=1).ratio == float("inf")


def test_a_hand_computed_burst() -> None:
    # In their steps they hold 2; 4, 5; and 3, 4, 5, 6: all three would need 9 in the first.
    requests, memory = burst(8, (2, 4), (1, 1), (3, 2))
    assert [request.volume for request in requests] == [18, 2, 9]
    assert by_volume(requests) == [1, 2, 0]
    assert run_in_order(requests, by_volume(requests), memory) == [5, 1, 2]


def test_smallest_volume_first_is_best_of_all_orders_where_one_fits_at_a_time() -> None:
    requests, memory = burst(10, (5, 4), (7, 2), (8, 1), (6, 3))
    best = min(total(requests, memory, list(order)) for order in itertools.permutations(range(4)))
    assert total(requests, memory) == best == 1 + 3 + 6 + 10


@pytest.mark.parametrize(
    ("order", "memory", "message"), [([0], 4, "needs 5 tokens"), ([1], 9, "each of 1 requests"), ([], 9, "each of 1")]
)
def test_what_cannot_run_is_refused(order: list[int], memory: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_in_order([VolumeRequest(2, 3)], order, memory)
    with pytest.raises(ConfigurationError):
        VolumeRequest(2, 0)
    with pytest.raises(ConfigurationError):
        latency_bound([], 5)
