"""Predictions of output length: the simple ones, the trained one, and their place beside the step."""

from __future__ import annotations

import json
import math
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_requests import length_records

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.serving.length_prediction import (
    BatchedPrediction,
    ClassMeans,
    LengthPrediction,
    LengthPredictor,
    MaxTokensPredictor,
    QuantilePredictor,
    RequestFeatures,
    corrected,
    volume,
)
from stream2llm_sdk.serving.length_training import (
    LengthRecord,
    TrainedPredictor,
    evaluate,
    read_trails,
    split,
    train,
)
from stream2llm_sdk.trail import EventTrail, EventType

PLAIN = RequestFeatures(100)


def random_predictor(seed: int = 0) -> TrainedPredictor:
    bit, length = np.random.default_rng(seed).normal(size=(2, 581)).tolist()
    return TrainedPredictor(bit, length, 200)


# ---- volume and correction ------------------------------------------------------------------------------------------


@given(prompt=st.integers(0, 100_000), output=st.integers(0, 3_000))
def test_volume_is_the_sum_of_kv_tokens_over_the_output_steps(prompt: int, output: int) -> None:
    assert volume(prompt, output) == sum(prompt + step for step in range(1, output + 1))


@given(predicted=st.floats(0, 1e6), is_long=st.booleans(), so_far=st.integers(0, 100_000), room=st.integers(0, 10_000))
def test_a_corrected_prediction_exceeds_the_output_so_far_within_max_tokens(
    predicted: float, is_long: bool, so_far: int, room: int
) -> None:
    prediction = LengthPrediction(predicted, is_long)
    after = corrected(prediction, so_far, so_far + room)
    if so_far < predicted:
        assert after == prediction
    else:
        assert so_far <= after.num_tokens <= so_far + room
        assert after.num_tokens > so_far or room == 0
        assert after.is_long
        assert so_far < corrected(prediction, so_far).num_tokens <= max(2 * so_far, 1, 2 * predicted)


def test_a_prediction_is_doubled_when_it_is_reached_and_holds_until_it_is_reached_again() -> None:
    prediction = LengthPrediction(50.0, False)
    assert [corrected(prediction, so_far).num_tokens for so_far in (0, 49, 50, 99, 100, 399)] == [
        50,
        50,
        100,
        100,
        200,
        400,
    ]
    assert corrected(prediction, 100, 120) == LengthPrediction(120.0, True)


# ---- simple predictors ----------------------------------------------------------------------------------------------


def test_max_tokens_is_taken_at_its_word() -> None:
    predictor = MaxTokensPredictor(long_from=100, default=64)
    assert predictor.predict(RequestFeatures(10, 500)) == LengthPrediction(500.0, True)
    assert predictor.predict(RequestFeatures(10)) == LengthPrediction(64.0, False)


def test_the_quantile_of_a_tenant_and_tag_is_learned_apart_and_falls_back_to_the_tag_and_to_all() -> None:
    predictor = QuantilePredictor(long_from=200)
    rng = random.Random(0)
    for _ in range(500):
        predictor.observe(RequestFeatures(10, tag="crawler", tenant="a"), round(100 * math.exp(rng.gauss(0, 0.3))))
        predictor.observe(RequestFeatures(10, tag="crawler", tenant="b"), round(400 * math.exp(rng.gauss(0, 0.3))))

    def predicted(tag: str, tenant: str, max_tokens: int | None = None) -> LengthPrediction:
        return predictor.predict(RequestFeatures(10, max_tokens, tag, tenant))

    assert predicted("crawler", "a").num_tokens == pytest.approx(100, rel=0.1)
    assert not predicted("crawler", "a").is_long
    assert predicted("crawler", "b").num_tokens == pytest.approx(400, rel=0.1)
    assert predicted("crawler", "b").is_long
    assert 110 < predicted("crawler", "new").num_tokens < 390
    assert predicted("new", "new") == predicted("crawler", "new")
    assert predicted("crawler", "b", max_tokens=50) == LengthPrediction(50.0, False)


def test_before_anything_was_observed_the_fallback_answers() -> None:
    predictor = QuantilePredictor(min_outputs=3)
    for _ in range(2):
        predictor.observe(PLAIN, 10)
        assert predictor.predict(RequestFeatures(1, 77)).num_tokens == 77
    predictor.observe(PLAIN, 10)
    assert predictor.predict(RequestFeatures(1, 77)).num_tokens == 10


@given(
    lengths=st.lists(st.integers(0, 10_000), min_size=1, max_size=60),
    quantile=st.floats(0.01, 0.99),
    window=st.integers(1, 20),
)
def test_the_quantile_is_that_of_the_latest_outputs(lengths: list[int], quantile: float, window: int) -> None:
    predictor = QuantilePredictor(quantile=quantile, window=window, min_outputs=1)
    for length in lengths:
        predictor.observe(PLAIN, length)
    latest = np.array(lengths[-window:])
    predicted = predictor.predict(PLAIN).num_tokens
    assert predicted in latest
    assert (latest < predicted).mean() <= quantile
    assert (latest <= predicted).mean() >= quantile - 1e-9


def test_the_number_of_windows_is_bounded() -> None:
    predictor = QuantilePredictor(max_keys=5)
    for tenant in range(100):
        predictor.observe(RequestFeatures(1, tag=f"t{tenant % 7}", tenant=str(tenant)), 5)
    assert len(predictor) == 10


def test_class_means_converge_to_the_mean_output_of_either_predicted_class() -> None:
    means = ClassMeans(window=200)
    assert means[False] < means[True]
    rng = random.Random(1)
    for _ in range(3_000):
        predicted_long = rng.random() < 0.3
        means.observe(predicted_long, round(rng.uniform(900, 1_100) if predicted_long else rng.uniform(20, 40)))
    assert means[True] == pytest.approx(1_000, rel=0.05)
    assert means[False] == pytest.approx(30, rel=0.05)


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="quantile"):
        QuantilePredictor(quantile=1.5)
    with pytest.raises(ConfigurationError, match="window must be at least 1, not 0"):
        QuantilePredictor(window=0)


# ---- the trained predictor ------------------------------------------------------------------------------------------


def test_a_trained_bit_beats_always_short_on_held_out_records() -> None:
    pytest.importorskip("sklearn")
    training, held_out = split(length_records(2_000, random.Random(0)), seed=1)
    assert (len(training), len(held_out)) == (1_500, 500)
    predictor = train(training)
    report = evaluate(predictor, held_out)
    assert report.num_records == 500
    assert 0.6 < report.always_short_accuracy < 0.9
    assert report.accuracy_over_always_short > 0.05, report
    assert report.mean_absolute_error < report.constant_mean_absolute_error, report


def test_training_on_requests_of_one_class_gives_that_class() -> None:
    pytest.importorskip("sklearn")
    records = length_records(100, random.Random(0))
    assert not any(p.is_long for p in train(records, long_from=100_000).predict_batch([r.features for r in records]))
    assert all(p.is_long for p in train(records, long_from=1).predict_batch([r.features for r in records]))


def test_too_few_records_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="10 records are too few"):
        train(length_records(10, random.Random(0)))
    with pytest.raises(ConfigurationError, match="needs records"):
        evaluate(MaxTokensPredictor(), [])


def test_training_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"stream2llm-sdk\[predict\]"):
        train(length_records(100, random.Random(0)))


def test_a_stored_predictor_predicts_the_same_and_is_plain_json(tmp_path: Path) -> None:
    predictor = random_predictor()
    predictor.save(tmp_path / "lengths.json")
    assert set(json.loads((tmp_path / "lengths.json").read_text())) == {
        "format",
        "version",
        "long_from",
        "bit",
        "length",
    }
    loaded = TrainedPredictor.load(tmp_path / "lengths.json")
    batch = [record.features for record in length_records(50, random.Random(0))]
    assert loaded.predict_batch(batch) == predictor.predict_batch(batch)
    assert loaded.long_from == predictor.long_from


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"format": "other", "version": 1}',
        '{"format": "stream2llm-length-predictor", "version": 9}',
        '{"format": "stream2llm-length-predictor", "version": 1, "long_from": 9, "bit": [1.0], "length": [1.0]}',
        '{"format": "stream2llm-length-predictor", "version": 1, "long_from": 9, "bit": ["a"], "length": [1.0]}',
        '{"format": "stream2llm-length-predictor", "version": 1, "bit": [1.0], "length": [1.0]}',
        '{"format": "stream2llm-length-predictor", "version": 1, "long_from": 9}',
    ],
)
def test_a_file_that_is_no_predictor_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths.json").write_text(content)
    with pytest.raises(ConfigurationError):
        TrainedPredictor.load(tmp_path / "lengths.json")
    with pytest.raises(ConfigurationError, match=r"absent\.json: a length predictor cannot be read"):
        TrainedPredictor.load(tmp_path / "absent.json")


def test_coefficients_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="finite"):
        TrainedPredictor([math.nan] * 581, [0.0] * 581, 10)


@given(
    prompt=st.integers(0, 1 << 20),
    max_tokens=st.none() | st.integers(1, 1 << 16),
    name=st.text(max_size=20),
    ids=st.lists(st.integers(0, 300_000), max_size=100),
)
def test_a_batch_predicts_as_single_requests_do_and_within_max_tokens(
    prompt: int, max_tokens: int | None, name: str, ids: list[int]
) -> None:
    predictor = random_predictor()
    features = RequestFeatures(prompt, max_tokens, name, name, tuple(ids))
    prediction = predictor.predict(features)
    assert predictor.predict_batch([features, PLAIN]) == [prediction, predictor.predict(PLAIN)]
    assert 0 <= prediction.num_tokens < math.inf
    if max_tokens is not None:
        assert prediction.num_tokens <= max_tokens
        assert not (prediction.is_long and max_tokens < predictor.long_from)


# ---- recorded trails ------------------------------------------------------------------------------------------------


def trail(request_id: str, end: EventType, **data: object) -> EventTrail:
    records = [("QUEUED", 0.0, 0.0, {}), ("FIRST_TOKEN", 1.0, 1.0, {}), (end.value, 2.0, 2.0, data)]
    return EventTrail.from_records(request_id, records)


def test_records_come_from_the_finished_events_of_written_trails(tmp_path: Path) -> None:
    full = {"num_prompt_tokens": 900, "num_output_tokens": 40, "max_tokens": 64, "tag": "crawler", "tenant": "a"}
    trail("full", EventType.FINISHED, **full, question_token_ids=[5, 6]).to_jsonl(tmp_path / "1.jsonl")
    trail("sparse", EventType.FINISHED, num_prompt_tokens=10, num_output_tokens=3).to_jsonl(tmp_path / "2.jsonl")
    trail("aborted", EventType.ABORTED, **full).to_jsonl(tmp_path / "3.jsonl")
    trail("bare", EventType.FINISHED, reason="stop").to_jsonl(tmp_path / "4.jsonl")
    both = tmp_path / "both.jsonl"
    both.write_text((tmp_path / "1.jsonl").read_text() + "\n" + (tmp_path / "2.jsonl").read_text())
    assert read_trails([both, tmp_path / "3.jsonl", tmp_path / "4.jsonl"]) == [
        LengthRecord(RequestFeatures(900, 64, "crawler", "a", (5, 6)), 40),
        LengthRecord(RequestFeatures(10), 3),
    ]


def test_a_file_that_is_no_trail_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"type": "QUEUED", "data": {}}\n{"kind": 1}\n')
    with pytest.raises(ConfigurationError, match="line 2"):
        read_trails([tmp_path / "x.jsonl"])


# ---- beside the step ------------------------------------------------------------------------------------------------


class Gate(LengthPredictor):
    """Predicts the prompt's length, once it is let through; a prompt of 13 tokens makes it fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []
        self.observed: list[int] = []
        self.changed = threading.Condition()

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        if features.num_prompt_tokens == 13:
            raise ValueError("thirteen")
        return LengthPrediction(float(features.num_prompt_tokens), True)

    def predict_batch(self, batch: Sequence[RequestFeatures]) -> list[LengthPrediction]:
        self.entered.release()
        assert self.open.wait(30)
        self.batches.append(len(batch))
        return super().predict_batch(batch)

    def observe(self, features: RequestFeatures, num_output_tokens: int) -> None:
        with self.changed:
            self.observed.append(num_output_tokens)
            self.changed.notify_all()

    def wait_until_observed(self, num: int) -> None:
        """Jobs are done in order, so that what was added before has been predicted then."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.observed) >= num, 30)


def test_the_fallback_holds_until_a_result_is_picked_up_and_what_waits_is_predicted_as_one_batch() -> None:
    gate = Gate()
    with BatchedPrediction(gate, MaxTokensPredictor(default=7)) as prediction:
        assert prediction.add("first", RequestFeatures(1)).num_tokens == 7
        assert gate.entered.acquire(timeout=30)
        for number in range(2, 12):
            prediction.add(str(number), RequestFeatures(number))
        held = prediction.pick_up()
        prediction.add("marker", RequestFeatures(99))
        prediction.finished("marker", 5)
        gate.open.set()
        gate.wait_until_observed(1)
        assert held["5"] == LengthPrediction(7.0, False), "not before it is picked up"
        assert prediction.pick_up() is held
        assert held == {str(n) if n > 1 else "first": LengthPrediction(float(n), True) for n in range(1, 12)}
        assert gate.batches == [1, 11]
    assert not prediction.is_running


def test_results_for_requests_that_are_gone_or_were_replaced_are_dropped() -> None:
    gate = Gate()
    with BatchedPrediction(gate) as prediction:
        prediction.add("gone", RequestFeatures(1))
        prediction.add("replaced", RequestFeatures(2))
        assert gate.entered.acquire(timeout=30)
        prediction.forget("gone")
        prediction.add("replaced", RequestFeatures(3))
        prediction.add("marker", RequestFeatures(9))
        prediction.finished("marker", 5)
        gate.open.set()
        gate.wait_until_observed(1)
        assert prediction.pick_up() == {"replaced": LengthPrediction(3.0, True)}
        assert len(prediction) == 1


def test_a_predictor_that_raises_leaves_the_fallback_and_is_asked_again() -> None:
    gate = Gate()
    gate.open.set()
    with BatchedPrediction(gate, MaxTokensPredictor(default=7)) as prediction:
        for number, request_id in enumerate(("bad", "good")):
            prediction.add(request_id, RequestFeatures(13 if request_id == "bad" else 20))
            prediction.add(f"marker {number}", RequestFeatures(1))
            prediction.finished(f"marker {number}", 5)
            gate.wait_until_observed(number + 1)
        assert prediction.pick_up() == {"bad": LengthPrediction(7.0, False), "good": LengthPrediction(20.0, True)}
        assert prediction.num_errors >= 1
        assert isinstance(prediction.last_error, ValueError)
        assert prediction.is_running


def test_the_fallback_learns_from_finished_requests() -> None:
    gate = Gate()
    gate.open.set()
    with BatchedPrediction(gate, QuantilePredictor(min_outputs=1)) as prediction:
        prediction.add("a", PLAIN)
        prediction.finished("a", 33)
        assert prediction.add("b", PLAIN).num_tokens == 33
        prediction.finished("unknown", 1)
        gate.wait_until_observed(1)
        assert gate.observed == [33]


def test_a_full_queue_is_left_to_the_fallback() -> None:
    gate = Gate()
    with BatchedPrediction(gate, max_waiting=2) as prediction:
        prediction.add("taken", PLAIN)
        assert gate.entered.acquire(timeout=30)
        for number in range(5):
            assert prediction.add(str(number), PLAIN).num_tokens == 256
        assert prediction.num_left_out == 3
        gate.open.set()


def test_closing_ends_the_thread_even_with_work_waiting_and_requests_may_still_be_added() -> None:
    gate = Gate()
    prediction = BatchedPrediction(gate, max_batch=1)
    prediction.add("in work", PLAIN)
    assert gate.entered.acquire(timeout=30)
    for number in range(50):
        prediction.add(str(number), PLAIN)
    assert not prediction.close(timeout_s=0.0), "a predictor that hangs is not waited for"
    gate.open.set()
    assert prediction.close(timeout_s=30)
    assert not prediction.is_running
    assert prediction.add("late", RequestFeatures(1, 9)).num_tokens == 9
    assert gate.batches == [1]
