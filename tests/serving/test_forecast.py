"""Forecasts of open streams: what they learn, of whom, and what they never say."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_requests import (
    EMPTY_SHARE,
    GAP_S,
    GAP_SD,
    HEAD_TOKENS,
    PAGE_SD,
    PAGE_TOKENS,
    PAGES_MEAN,
    PAGES_SD,
    QUERY_SD,
    StreamEvent,
    crawler_stream,
)

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.forecast import Forecast, StreamForecaster, StreamKey
from stream2llm_sdk.serving.stream_statistics import StreamPrior

CRAWLER = StreamKey("crawler", "a")


def play(
    forecaster: StreamForecaster, key: StreamKey, events: list[StreamEvent], start_s: float = 0.0, request_id: str = "r"
) -> list[Forecast]:
    """Runs a whole stream. Gives the forecasts at its opening and after each chunk but the last."""
    forecaster.opened(request_id, key, HEAD_TOKENS, start_s)
    forecasts = [expected(forecaster, request_id, start_s)]
    for event in events[:-1]:
        forecaster.chunk(request_id, event.num_tokens, start_s + event.at_s)
        forecasts.append(expected(forecaster, request_id, start_s + event.at_s))
    forecaster.completed(request_id, events[-1].num_tokens, start_s + events[-1].at_s)
    forecaster.ended(request_id)
    return forecasts


def expected(forecaster: StreamForecaster, request_id: str, now_s: float) -> Forecast:
    forecast = forecaster.forecast(request_id, now_s)
    assert forecast is not None
    return forecast


def regular(num_chunks: int, tokens: int, gap_s: float) -> list[StreamEvent]:
    return [StreamEvent(gap_s * i, HEAD_TOKENS + tokens * i) for i in range(1, num_chunks + 1)]


# ---- learning -------------------------------------------------------------------------------------------------------


@cache
def pages_left(count: int) -> float:
    """E[N - count | N > count] of the synthetic crawler."""
    rng = random.Random(7)
    pages = [max(1, round(rng.gauss(PAGES_MEAN, PAGES_SD))) for _ in range(50_000)]
    return statistics.fmean(num - count for num in pages if num > count)


def best_forecast(events: list[StreamEvent]) -> tuple[float, float]:
    """The exact conditional means of final tokens and completion after these events, parameters and all known."""
    lengths = [HEAD_TOKENS, *(event.num_tokens for event in events)]
    sizes = [after - before for before, after in itertools.pairwise(lengths)]
    logs = [math.log(size / PAGE_TOKENS) for size in sizes if size > 0]
    precision = 1 / QUERY_SD**2 + len(logs) / PAGE_SD**2
    query = sum(logs) / PAGE_SD**2 / precision
    page = (1 - EMPTY_SHARE) * PAGE_TOKENS * math.exp(query + 1 / precision / 2 + PAGE_SD**2 / 2)
    left = pages_left(len(events))
    return events[-1].num_tokens + left * page, events[-1].at_s + left * GAP_S * math.exp(GAP_SD**2 / 2)


def test_forecasts_of_a_crawler_come_close_to_the_exact_conditional_means_and_leave_the_prior_behind() -> None:
    rng = random.Random(3)
    learned = StreamForecaster()
    for index in range(600):
        play(learned, CRAWLER, crawler_stream(rng), 100.0 * index)
    off: dict[str, list[float]] = {"tokens": [], "time": [], "prior tokens": [], "prior time": []}
    for index in range(300):
        events = crawler_stream(rng)
        start_s = 1e6 + 100.0 * index
        forecasts = play(learned, CRAWLER, events, start_s)
        priors = play(StreamForecaster(), CRAWLER, events)
        for count in range(1, min(len(events), 9)):
            tokens, time_s = best_forecast(events[:count])
            off["tokens"].append(abs(math.log(forecasts[count].final_num_tokens / tokens)))
            off["time"].append(abs(forecasts[count].completion_s - start_s - time_s))
            off["prior tokens"].append(abs(math.log(priors[count].final_num_tokens / tokens)))
            off["prior time"].append(abs(priors[count].completion_s - time_s))
    mean = {name: statistics.fmean(values) for name, values in off.items()}
    assert mean["tokens"] < 0.15, mean
    assert mean["time"] < 0.5, mean
    assert mean["prior tokens"] > 2 * mean["tokens"], mean
    assert mean["prior time"] > 2 * mean["time"], mean


def test_forecasts_at_opening_are_right_on_average() -> None:
    rng = random.Random(5)
    forecaster = StreamForecaster()
    tokens, times = [], []
    for index in range(1_500):
        events = crawler_stream(rng)
        first = play(forecaster, CRAWLER, events, 100.0 * index)[0]
        if index >= 300:
            tokens.append(first.final_num_tokens - events[-1].num_tokens)
            times.append(first.completion_s - 100.0 * index - events[-1].at_s)
    assert abs(statistics.fmean(tokens)) < 900, "of 8,800"
    assert abs(statistics.fmean(times)) < 0.3, "of 8.9"


def test_regular_streams_are_forecast_almost_exactly() -> None:
    forecaster = StreamForecaster()
    events = regular(8, 300, 0.5)
    for index in range(60):
        forecasts = play(forecaster, CRAWLER, events, 10.0 * index)
    final, completion_s = events[-1].num_tokens, 590.0 + events[-1].at_s
    for forecast in forecasts:
        assert forecast.final_num_tokens == pytest.approx(final, rel=0.05)
        assert forecast.completion_s == pytest.approx(completion_s, abs=0.3)


def test_a_stream_with_large_chunks_is_expected_to_go_on_with_large_chunks() -> None:
    rng = random.Random(11)
    forecaster = StreamForecaster()
    for index in range(300):
        play(forecaster, CRAWLER, crawler_stream(rng), 100.0 * index)
    growth = []
    for request_id, tokens in (("small", 100), ("large", 3_000)):
        forecaster.opened(request_id, CRAWLER, 0, 1e6)
        for count in range(1, 5):
            forecaster.chunk(request_id, tokens * count, 1e6 + count)
        growth.append(expected(forecaster, request_id, 1e6 + 4).final_num_tokens - 4 * tokens)
    assert growth[1] > 2 * growth[0]


def test_an_update_stream_whose_length_settles_is_forecast_to_keep_its_length() -> None:
    rng = random.Random(2)
    forecaster = StreamForecaster()
    key = StreamKey("diskann")

    def top_k() -> list[StreamEvent]:
        size = rng.randint(1_800, 2_200)
        return [StreamEvent(0.1 * i, size + rng.randint(-30, 30)) for i in range(1, rng.randint(6, 12))]

    for index in range(200):
        play(forecaster, key, top_k(), 10.0 * index)
    for index in range(20):
        events = top_k()
        for forecast in play(forecaster, key, events, 1e5 + index)[1:]:
            assert forecast.final_num_tokens == pytest.approx(events[-1].num_tokens, rel=0.1)


def test_a_completion_that_always_follows_at_once_is_no_longer_expected_after_a_wait() -> None:
    forecaster = StreamForecaster()
    rng = random.Random(4)
    for index in range(200):
        events = regular(rng.randint(2, 6), 200, 1.0)
        # The completion brings nothing and comes a moment after the last chunk.
        play(forecaster, CRAWLER, [*events, StreamEvent(events[-1].at_s + 0.001, events[-1].num_tokens)], 20.0 * index)
    forecaster.opened("r", CRAWLER, HEAD_TOKENS, 1e6)
    forecaster.chunk("r", 240, 1e6 + 1)
    forecaster.chunk("r", 440, 1e6 + 2)
    forecaster.chunk("r", 640, 1e6 + 3)
    before = expected(forecaster, "r", 1e6 + 3)
    later = expected(forecaster, "r", 1e6 + 3.9)
    assert later.num_chunks_left > before.num_chunks_left + 0.2
    assert later.num_chunks_left >= 1.0
    assert later.final_num_tokens >= 800


def test_aborted_streams_teach_that_streams_can_be_that_long() -> None:
    forecaster = StreamForecaster()
    for index in range(100):
        play(forecaster, CRAWLER, regular(4, 100, 1.0), 20.0 * index)
    before = forecaster.statistics(CRAWLER).num_chunks
    for index in range(100):
        forecaster.opened("r", CRAWLER, 0, 1e5 + 100 * index)
        for count in range(1, 20):
            forecaster.chunk("r", 100 * count, 1e5 + 100 * index + count)
        forecaster.ended("r")
    assert forecaster.statistics(CRAWLER).num_chunks > before + 2


def test_old_streams_are_forgotten_when_a_retriever_changes() -> None:
    forecaster = StreamForecaster(window=32)
    for index in range(200):
        play(forecaster, CRAWLER, regular(3, 100, 1.0), 20.0 * index)
    for index in range(200):
        play(forecaster, CRAWLER, regular(9, 400, 1.0), 1e5 + 20.0 * index)
    assert forecaster.statistics(CRAWLER).duration_s == pytest.approx(9.0, rel=0.1)
    assert forecaster.statistics(CRAWLER).growth_tokens == pytest.approx(3_600, rel=0.1)


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_retrievers_and_tenants_are_learned_apart() -> None:
    forecaster = StreamForecaster()
    sizes = {StreamKey("crawler", "a"): 100, StreamKey("crawler", "b"): 1_000, StreamKey("diskann", "a"): 10_000}
    for index in range(200):
        for key, tokens in sizes.items():
            play(forecaster, key, regular(5, tokens, 1.0), 20.0 * index)
    for key, tokens in sizes.items():
        forecaster.opened("r", key, 0, 1e6)
        assert expected(forecaster, "r", 1e6).final_num_tokens == pytest.approx(5 * tokens, rel=0.1)


def test_a_new_tenant_starts_from_its_retriever_and_a_new_retriever_from_all() -> None:
    forecaster = StreamForecaster()
    for index in range(200):
        play(forecaster, StreamKey("crawler", "a"), regular(5, 1_000, 1.0), 20.0 * index)
    for key in (StreamKey("crawler", "new"), StreamKey("new", "new")):
        assert forecaster.statistics(key).growth_tokens == pytest.approx(5_000, rel=0.1)
    for index in range(200):
        play(forecaster, StreamKey("diskann", "a"), regular(5, 100, 1.0), 20.0 * index)
    assert forecaster.statistics(StreamKey("crawler", "new")).growth_tokens == pytest.approx(5_000, rel=0.1)
    assert 500 < forecaster.statistics(StreamKey("new", "new")).growth_tokens < 4_500


def test_memory_is_bounded_by_the_number_of_keys_and_the_least_recent_goes() -> None:
    forecaster = StreamForecaster(max_keys=8)
    old, kept = StreamKey("crawler", "old"), StreamKey("crawler", "kept")
    for index in range(50):
        play(forecaster, old, regular(5, 9_000, 1.0), 20.0 * index)
        play(forecaster, kept, regular(5, 100, 1.0), 20.0 * index)
    for tenant in range(100):
        play(forecaster, StreamKey("diskann", str(tenant)), regular(5, 5_000, 1.0), 1e5 + tenant)
        play(forecaster, kept, regular(5, 100, 1.0), 1e5 + tenant)
    assert forecaster.num_keys == 8
    assert len(forecaster) == 0
    assert forecaster.statistics(kept).growth_tokens == pytest.approx(500, rel=0.1)


# ---- what never happens ---------------------------------------------------------------------------------------------

events_of_a_stream = st.lists(
    st.tuples(st.floats(0.0, 1e4), st.integers(0, 200_000), st.floats(0.0, 1e4)), min_size=1, max_size=80
)


@given(events=events_of_a_stream, num_learned=st.integers(0, 12), seed=st.integers(0, 99))
def test_a_forecast_is_never_in_the_past_and_never_less_than_what_is_there(
    events: list[tuple[float, int, float]], num_learned: int, seed: int
) -> None:
    forecaster = StreamForecaster(window=8)
    rng = random.Random(seed)
    for index in range(num_learned):
        play(forecaster, CRAWLER, crawler_stream(rng) * rng.randint(1, 12), 1e3 * index)
    now_s, num_tokens = 0.0, 10
    forecaster.opened("r", CRAWLER, num_tokens, now_s)
    for gap_s, tokens, wait_s in events:
        now_s += gap_s
        num_tokens = tokens
        forecaster.chunk("r", num_tokens, now_s)
        for now in (now_s, now_s + wait_s / 2, now_s + wait_s):
            forecast = expected(forecaster, "r", now)
            assert forecast.final_num_tokens >= num_tokens
            assert now <= forecast.completion_s < math.inf
            assert forecast.num_chunks_left >= 0
        now_s += wait_s
    forecaster.completed("r", num_tokens, now_s)
    assert forecaster.forecast("r", now_s + 5) == Forecast(num_tokens, now_s, 0.0, math.inf)


@given(waits=st.lists(st.floats(0.0, 1e5), min_size=2, max_size=20).map(sorted))
def test_a_longer_silence_before_the_first_chunk_moves_the_completion_out(waits: list[float]) -> None:
    forecaster = StreamForecaster()
    rng = random.Random(1)
    for index in range(50):
        play(forecaster, CRAWLER, crawler_stream(rng), 100.0 * index)
    forecaster.opened("r", CRAWLER, 0, 0.0)
    times_s = [expected(forecaster, "r", wait).completion_s for wait in waits]
    for earlier, later in itertools.pairwise(times_s):
        assert later >= earlier - 1e-6 * earlier - 0.5


def test_between_events_a_forecast_is_computed_once_until_it_expires() -> None:
    forecaster = StreamForecaster()
    forecaster.opened("r", CRAWLER, 10, 0.0)
    first = expected(forecaster, "r", 0.0)
    assert first.expires_s > 0.0
    assert expected(forecaster, "r", first.expires_s * 0.99) is first
    overdue = expected(forecaster, "r", first.expires_s)
    assert overdue is not first
    forecaster.chunk("r", 20, first.expires_s)
    assert expected(forecaster, "r", first.expires_s) is not overdue


def test_all_forecasts_at_once_are_those_of_the_single_streams() -> None:
    rng = random.Random(6)
    arrivals = sorted(
        (index + event.at_s, f"r{index}", event.num_tokens, event is events[-1])
        for index, events in enumerate(crawler_stream(rng) for _ in range(30))
        for event in events
    )
    one, all_at_once = StreamForecaster(), StreamForecaster()
    for step in range(900):
        now_s = step * 0.05
        for forecaster in (one, all_at_once):
            if step % 20 == 0 and step < 600:
                forecaster.opened(f"r{step // 20}", CRAWLER, HEAD_TOKENS, now_s)
            for at_s, request_id, num_tokens, is_last in arrivals:
                if now_s - 0.05 < at_s <= now_s:
                    (forecaster.completed if is_last else forecaster.chunk)(request_id, num_tokens, at_s)
                    if is_last and num_tokens % 2:
                        forecaster.ended(request_id)
        forecasts = all_at_once.forecasts(now_s)
        assert len(forecasts) == len(all_at_once)
        assert dict(forecasts) == {request_id: one.forecast(request_id, now_s) for request_id in forecasts}


def test_the_same_calls_give_the_same_forecasts() -> None:
    def run() -> list[Forecast]:
        rng = random.Random(9)
        forecaster = StreamForecaster()
        keys = [StreamKey(tag, tenant) for tag in ("crawler", "diskann") for tenant in "ab"]
        return [f for i in range(100) for f in play(forecaster, rng.choice(keys), crawler_stream(rng), 50.0 * i)]

    assert run() == run()


def test_calls_for_unknown_or_complete_streams_change_nothing() -> None:
    forecaster = StreamForecaster()
    forecaster.chunk("x", 10, 1.0)
    forecaster.completed("x", 10, 1.0)
    forecaster.ended("x")
    assert forecaster.forecast("x", 2.0) is None
    play(forecaster, CRAWLER, regular(3, 100, 1.0))
    forecaster.opened("r", CRAWLER, 10, 0.0)
    forecaster.completed("r", 50, 1.0)
    before = forecaster.statistics(CRAWLER)
    forecaster.chunk("r", 90, 2.0)
    forecaster.completed("r", 90, 2.0)
    forecaster.ended("r")
    assert forecaster.statistics(CRAWLER) == before
    assert len(forecaster) == 0


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="window of 0"):
        StreamForecaster(window=0)
    with pytest.raises(ConfigurationError, match="gap_s"):
        StreamPrior(gap_s=-1.0)
