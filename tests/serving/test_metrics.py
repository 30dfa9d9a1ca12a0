"""Metrics: what hand-made trails and snapshots come to, in Prometheus' own reading."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from stream2llm_sdk.errors import ConfigurationError, EngineBusyError, MissingExtraError
from stream2llm_sdk.serving.admission import Admission, StreamLimits
from stream2llm_sdk.serving.metrics import SchedulerMetrics
from stream2llm_sdk.serving.trail_recorder import TrailRecorder
from stream2llm_sdk.trail import EventTrail, EventType, TrailEvent

Q, S, K = EventType.QUEUED, EventType.SCHEDULED, EventType.KV_ON_GPU
SWAP, RECOMPUTE = EventType.PREEMPTED_SWAP, EventType.PREEMPTED_RECOMPUTE
CHUNK, UPDATED = EventType.CHUNK_ARRIVED, EventType.PROMPT_UPDATED
COMPLETE, FIRST = EventType.CONTEXT_COMPLETE, EventType.FIRST_TOKEN
FINISHED, ABORTED = EventType.FINISHED, EventType.ABORTED


RESUMED = EventType.RESUMED

COUNTERS = {
    "num_tokens_computed": 120,
    "num_tokens_recomputed": 30,
    "num_tokens_invalidated": 12,
    "num_tokens_cached": 16,
    "num_preemptions": 2,
    "num_updates": 2,
}


def trail_of(*events: tuple[Any, ...]) -> EventTrail:
    """Events as (type, seconds) or (type, seconds, data)."""
    return EventTrail("r", [TrailEvent(kind, at_s, 1000 + at_s, *data) for kind, at_s, *data in events])


LIFE = trail_of(
    (Q, 10.0),
    (S, 10.5),
    (K, 11.0),
    (CHUNK, 12.0, {"num_tokens": 40}),
    (UPDATED, 12.0, {"lcp": 60, "num_tokens": 90, "num_invalidated": 12}),
    (SWAP, 13.0, {"num_tokens": 80, "num_blocks": 5, "predicted_s": 0.2}),
    (RESUMED, 14.0, {"num_loaded": 64, "num_found": 10, "num_recomputed": 6, "actual_s": 0.25}),
    (S, 14.0),
    (RECOMPUTE, 15.0, {"num_tokens": 85, "num_blocks": 6, "predicted_s": 0.3}),
    (RESUMED, 16.0, {"num_loaded": 0, "num_found": 60, "num_recomputed": 25, "actual_s": 0.1}),
    (S, 16.0),
    (COMPLETE, 16.5),
    (K, 17.0),
    (S, 17.5),
    (FIRST, 17.5),
    (FINISHED, 20.0, {"reason": "stop", "num_prompt_tokens": 100, **COUNTERS}),
)


def value(metrics: SchedulerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"stream2llm_{name}", labels)


def values(metrics: SchedulerMetrics, name: str, label: str) -> dict[str, float]:
    """The samples of a metric by one of their labels."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(metrics.render())
        for sample in family.samples
        if sample.name == f"stream2llm_{name}"
    }


@pytest.fixture
def metrics() -> SchedulerMetrics:
    return SchedulerMetrics()


# ---- trails ---------------------------------------------------------------------------------------------------------


def test_an_ended_trail_is_counted_by_reason_and_tenant(metrics: SchedulerMetrics) -> None:
    metrics.observe_trail(LIFE, tenant="a")
    metrics.observe_trail(LIFE, tenant="a")
    metrics.observe_trail(trail_of((Q, 1.0), (ABORTED, 2.0, {"reason": "abort"})), tenant="b", reason="idle")
    metrics.observe_trail(trail_of((Q, 1.0), (ABORTED, 2.0)))
    assert value(metrics, "requests_total", reason="stop", tenant="a") == 2
    assert value(metrics, "requests_total", reason="idle", tenant="b") == 1
    assert value(metrics, "requests_total", reason="aborted", tenant="") == 1


def test_a_trails_figures_add_up(metrics: SchedulerMetrics) -> None:
    for _ in range(2):
        metrics.observe_trail(LIFE)
    assert {name: value(metrics, f"tokens_{name}_total") for name in ("computed", "recomputed", "invalidated")} == {
        "computed": 240,
        "recomputed": 60,
        "invalidated": 24,
    }
    assert value(metrics, "tokens_cached_total") == 32
    assert values(metrics, "preemptions_total", "kind") == {"swap": 2, "recompute": 2}
    assert values(metrics, "preempted_tokens_total", "kind") == {"swap": 160, "recompute": 170}
    assert values(metrics, "preempted_blocks_total", "kind") == {"swap": 10, "recompute": 12}
    assert values(metrics, "resumed_tokens_total", "source") == {"loaded": 128, "found": 140, "recomputed": 62}


def test_both_times_to_first_token_and_the_time_on_the_gpu_are_in_seconds(metrics: SchedulerMetrics) -> None:
    metrics.observe_trail(LIFE)
    for name, seconds, below, at_most in (
        ("ttft_from_context_complete_seconds", 1.0, "0.5", "1.0"),
        ("ttft_from_request_seconds", 7.5, "5.0", "10.0"),
        ("kv_on_gpu_seconds", 2.5, "1.0", "2.5"),
    ):
        assert value(metrics, f"{name}_sum") == seconds
        assert value(metrics, f"{name}_count") == 1
        assert value(metrics, f"{name}_bucket", le=below) == 0
        assert value(metrics, f"{name}_bucket", le=at_most) == 1


def test_predicted_cost_is_compared_with_what_the_same_preemption_cost(metrics: SchedulerMetrics) -> None:
    metrics.observe_trail(LIFE)
    assert value(metrics, "preemption_cost_ratio_sum", kind="swap") == pytest.approx(0.8)
    assert value(metrics, "preemption_cost_ratio_sum", kind="recompute") == pytest.approx(3.0)


def test_a_preemption_without_a_price_has_no_ratio(metrics: SchedulerMetrics) -> None:
    priced = {"predicted_s": 1.0}
    metrics.observe_trail(
        trail_of(
            (Q, 1.0),
            (RESUMED, 2.0, {"actual_s": 5.0}),
            (RECOMPUTE, 3.0, {"num_tokens": 7}),
            (RESUMED, 4.0, {"actual_s": 5.0}),
            (RECOMPUTE, 5.0, priced),
            (RESUMED, 6.0),
            (RESUMED, 7.0, {"actual_s": 5.0}),
            (RECOMPUTE, 8.0, priced),
            (RESUMED, 9.0, {"actual_s": 0.0}),
            (RECOMPUTE, 10.0, priced),
            (ABORTED, 11.0),
        )
    )
    assert values(metrics, "preemption_cost_ratio_count", "kind") == {}
    assert values(metrics, "preemptions_total", "kind") == {"recompute": 4, "swap": 0}
    assert values(metrics, "preempted_tokens_total", "kind") == {"recompute": 7, "swap": 0}


@pytest.mark.parametrize(
    ("events", "length"),
    [
        ([(FINISHED, 5.0, {"num_prompt_tokens": 9})], 9),
        ([(UPDATED, 2.0, {"num_tokens": 5}), (UPDATED, 3.0, {"num_tokens": 7}), (FINISHED, 5.0, {})], 7),
        ([(UPDATED, 2.0, {"num_tokens": 5}), (FINISHED, 5.0, {"num_prompt_tokens": 9})], 9),
        ([(FINISHED, 5.0, {})], None),
    ],
)
def test_the_prompts_length_is_what_the_end_says_else_the_last_update(
    metrics: SchedulerMetrics, events: list[Any], length: int | None
) -> None:
    metrics.observe_trail(trail_of((Q, 1.0), *events))
    assert value(metrics, "prompt_tokens_count") == (length is not None)
    assert value(metrics, "prompt_tokens_sum") == (length or 0)


def test_a_trail_that_has_not_ended_is_not_counted(metrics: SchedulerMetrics) -> None:
    before = counts(metrics)
    metrics.observe_trail(trail_of((Q, 1.0), (S, 2.0), (RECOMPUTE, 3.0, {"num_tokens": 7})))
    metrics.observe_trail(trail_of())
    assert counts(metrics) == before


def test_the_recorders_own_trails_are_understood(metrics: SchedulerMetrics) -> None:
    recorder = TrailRecorder()
    recorder.begin("r")
    recorder.mark("r", COMPLETE)
    recorder.state("r", S)
    recorder.state("r", RECOMPUTE, num_tokens=50)
    recorder.state("r", S)
    recorder.mark("r", FIRST)
    recorder.end("r", FINISHED, reason="length", **COUNTERS)
    metrics.observe_trail(EventTrail.from_records("r", recorder.take(["r"])["r"]), tenant="a")
    assert value(metrics, "requests_total", reason="length", tenant="a") == 1
    assert value(metrics, "tokens_computed_total") == 120
    assert value(metrics, "preempted_tokens_total", kind="recompute") == 50
    assert value(metrics, "ttft_from_request_seconds_count") == 1


# ---- labels ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdef"), max_size=30), st.integers(0, 4))
def test_only_the_first_tenants_get_a_label_and_no_request_is_lost(tenants: list[str], max_tenants: int) -> None:
    metrics = SchedulerMetrics(max_tenants=max_tenants)
    for tenant in tenants:
        metrics.observe_trail(trail_of((Q, 1.0), (FINISHED, 2.0, {"reason": "stop"})), tenant=tenant)
    own = list(dict.fromkeys(tenants))[:max_tenants]
    expected = {tenant: float(tenants.count(tenant)) for tenant in own}
    if rest := sum(tenant not in own for tenant in tenants):
        expected["other"] = float(rest)
    assert values(metrics, "requests_total", "tenant") == expected


def test_reasons_are_bounded_too(metrics: SchedulerMetrics) -> None:
    for index in range(100):
        metrics.observe_trail(trail_of((Q, 1.0), (ABORTED, 2.0, {"reason": f"reason {index}"})))
    by_reason = values(metrics, "requests_total", "reason")
    assert len(by_reason) == 17
    assert by_reason["other"] == 84


def test_a_tenants_name_cannot_break_the_format(metrics: SchedulerMetrics) -> None:
    name = 'a"} 1\nstream2llm_forged_total 9\\'
    metrics.observe_trail(trail_of((Q, 1.0), (FINISHED, 2.0)), tenant=name)
    assert values(metrics, "requests_total", "tenant") == {name: 1}
    assert value(metrics, "forged_total") is None


@pytest.mark.parametrize("max_tenants", [-1, 1.5, None])
def test_a_number_of_tenants_that_cannot_work_is_refused(max_tenants: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"max_tenants={max_tenants}"):
        SchedulerMetrics(max_tenants=max_tenants)


# ---- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_sets_the_gauges_that_it_knows(metrics: SchedulerMetrics) -> None:
    metrics.observe_snapshot({"num_parked": 3, "num_free_blocks": 40, "num_host_blocks_used": 7, "something": "else"})
    metrics.observe_snapshot({"num_parked": 2, "num_free_blocks": None})
    assert value(metrics, "parked_streams") == 2
    assert value(metrics, "free_kv_blocks") == 40
    assert value(metrics, "host_blocks_used") == 7


def test_one_policy_is_in_use(metrics: SchedulerMetrics) -> None:
    assert values(metrics, "policy", "policy") == {}
    metrics.observe_snapshot({"policy": "FCFS"})
    metrics.observe_snapshot({"policy": "LCAS", "num_policy_switches": 1})
    metrics.observe_snapshot({"num_policy_switches": 1})
    assert values(metrics, "policy", "policy") == {"FCFS": 0, "LCAS": 1}
    assert value(metrics, "policy_switches_total") == 1
    metrics.observe_snapshot({"policy": "LCAS", "num_policy_switches": 5})
    assert values(metrics, "policy", "policy") == {"FCFS": 0, "LCAS": 1}
    assert value(metrics, "policy_switches_total") == 5


def test_admissions_books_are_a_snapshot(metrics: SchedulerMetrics) -> None:
    books = Admission(StreamLimits(max_open_streams=2, max_waiting_requests=1))
    books.admit("s1", "a", 10)
    books.admit("s2", "a", 20)
    for _ in range(3):
        with pytest.raises(EngineBusyError, match="max_open_streams=2"):
            books.admit("s3", "a", 1)
        metrics.observe_snapshot(books.snapshot())
    metrics.observe_snapshot(books.snapshot())
    assert value(metrics, "open_streams") == 2
    assert value(metrics, "open_tokens") == 30
    assert value(metrics, "waiting_requests") == 0
    assert values(metrics, "refusals_total", "limit") == {"max_open_streams": 3}


@given(st.lists(st.integers(0, 10)))
def test_a_counter_follows_a_total_and_never_falls(totals: list[int]) -> None:
    metrics = SchedulerMetrics()
    for index, total in enumerate(totals):
        metrics.observe_snapshot({"num_policy_switches": total})
        assert value(metrics, "policy_switches_total") == max(totals[: index + 1])


# ---- the registry and the format ------------------------------------------------------------------------------------


def counts(metrics: SchedulerMetrics) -> dict[tuple[str, str], float]:
    """All samples but the times at which they were made."""
    return {
        (sample.name, str(sample.labels)): sample.value
        for family in text_string_to_metric_families(metrics.render())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_each_engine_has_a_registry_of_its_own_unless_one_is_given() -> None:
    first, second = SchedulerMetrics(), SchedulerMetrics()
    first.observe_trail(LIFE)
    assert value(second, "tokens_computed_total") == 0
    registry = CollectorRegistry()
    third = SchedulerMetrics(registry)
    third.observe_trail(LIFE)
    assert registry.get_sample_value("stream2llm_tokens_computed_total") == 120


def test_the_text_is_prometheus_format_with_a_help_line_for_each_metric(metrics: SchedulerMetrics) -> None:
    metrics.observe_trail(LIFE, tenant="a")
    families = list(text_string_to_metric_families(metrics.render()))
    assert all(family.name.startswith("stream2llm_") and family.documentation for family in families)
    assert metrics.content_type.startswith("text/plain")
    assert counts(metrics)["stream2llm_requests_total", str({"reason": "stop", "tenant": "a"})] == 1


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"prometheus_client is not installed.*\[metrics\]"):
        SchedulerMetrics()
