"""What forecasts of streams and predictions of output length cost a step, and how good the trained bit is.

50 open streams of a synthetic crawler in steps of 10 ms; a stream that ends makes place for the next. In every step
the forecaster is told what arrived, predictions are picked up, and the forecast and the prediction of all 50 are
read. Figures, the first three as shares of a step, in processor time of the thread (other processes do not count):

- `prediction_cost_per_step`: the time of all that on the step's thread, mean.
- `read_cost_per_step`: the part of it for reading and picking up, median: what a step without arrivals pays.
- `trained_cost_per_step`: the trained predictor's time beside the step, in batches as they come.
- `trained_prediction_us`: its time a request in batches of 32.
- `one_bit_accuracy_over_always_short`: accuracy of the trained bit on 1,000 synthetic held-out records, less that of
  calling every request short.

Expected: 0.001 to 0.002 (two clock readings a step included), 0.0005, 0.0001, 5 us, about 0.1. Needs scikit-learn.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

from synthetic_requests import HEAD_TOKENS, StreamEvent, crawler_stream, length_records

from stream2llm_sdk.serving.forecast import StreamForecaster, StreamKey
from stream2llm_sdk.serving.length_prediction import (
    BatchedPrediction,
    LengthPrediction,
    LengthPredictor,
    QuantilePredictor,
    RequestFeatures,
)
from stream2llm_sdk.serving.length_training import TrainedPredictor, evaluate, split, train

NUM_STREAMS = 50
STEP_S = 0.010
NUM_STEPS = 3_000
NUM_WARM_UP = 1_000
ROUNDS = 5

Opening = tuple[str, StreamKey, RequestFeatures, list[StreamEvent]]


class Timed(LengthPredictor):
    """The trained predictor with a stopwatch."""

    def __init__(self, predictor: TrainedPredictor) -> None:
        self.predictor = predictor
        self.seconds = 0.0

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        return self.predict_batch([features])[0]

    def predict_batch(self, batch: Sequence[RequestFeatures]) -> list[LengthPrediction]:
        started_s = time.thread_time()
        predictions = self.predictor.predict_batch(batch)
        self.seconds += time.thread_time() - started_s
        return predictions


class Load:
    """50 open streams in virtual time, and the calls that a scheduler makes for them."""

    def __init__(self, prediction: BatchedPrediction, rng: random.Random) -> None:
        self.rng = rng
        self.prediction = prediction
        self.forecaster = StreamForecaster()
        self.features = [record.features for record in length_records(200, rng)]
        self.keys = [StreamKey(tag, tenant) for tag in ("crawler", "diskann") for tenant in "abc"]
        self.now_s = 0.0
        self.num_opened = 0
        self.open: dict[str, None] = {}
        # (at_s, request id, tokens, whether it is the last), as a heap.
        self.arrivals: list[tuple[float, str, int, bool]] = []

    def due(self) -> list[tuple[float, str, int, bool]]:
        due = []
        while self.arrivals and self.arrivals[0][0] <= self.now_s:
            due.append(heapq.heappop(self.arrivals))
        return due

    def tell(self, due: list[tuple[float, str, int, bool]], opening: list[Opening]) -> None:
        """What reaches the forecaster and the predictions in a step."""
        forecaster, prediction = self.forecaster, self.prediction
        for at_s, request_id, num_tokens, is_last in due:
            if is_last:
                forecaster.completed(request_id, num_tokens, at_s)
                forecaster.ended(request_id)
                prediction.finished(request_id, 50)
            else:
                forecaster.chunk(request_id, num_tokens, at_s)
        for request_id, key, features, _ in opening:
            forecaster.opened(request_id, key, HEAD_TOKENS, self.now_s)
            prediction.add(request_id, features)

    def read(self) -> None:
        """What a policy asks for in a step."""
        forecasts, predictions = self.forecaster.forecasts(self.now_s), self.prediction.pick_up()
        for request_id in self.open:
            forecasts.get(request_id)
            predictions.get(request_id)

    def step(self) -> tuple[float, float]:
        """One step. Gives the seconds for all of it and those for reading."""
        self.now_s += STEP_S
        due = self.due()
        for _, request_id, _, is_last in due:
            if is_last:
                del self.open[request_id]
        opening = [self.next_stream() for _ in range(NUM_STREAMS - len(self.open))]
        for request_id, _, _, events in opening:
            self.open[request_id] = None
            for event in events:
                is_last = event is events[-1]
                heapq.heappush(self.arrivals, (self.now_s + event.at_s, request_id, event.num_tokens, is_last))
        started_s = time.thread_time()
        self.tell(due, opening)
        told_s = time.thread_time()
        self.read()
        ended_s = time.thread_time()
        return ended_s - started_s, ended_s - told_s

    def next_stream(self) -> Opening:
        request_id = f"r{self.num_opened}"
        self.num_opened += 1
        return request_id, self.rng.choice(self.keys), self.rng.choice(self.features), crawler_stream(self.rng)


def trained_us(predictor: TrainedPredictor, batch: Sequence[RequestFeatures]) -> float:
    started_s = time.thread_time()
    for _ in range(50):
        predictor.predict_batch(batch)
    return (time.thread_time() - started_s) / 50 / len(batch) * 1e6


def one_round(trained: TrainedPredictor, seed: int) -> dict[str, float]:
    timed = Timed(trained)
    with BatchedPrediction(timed, QuantilePredictor()) as prediction:
        load = Load(prediction, random.Random(seed))
        for _ in range(NUM_WARM_UP):
            load.step()
        timed.seconds = 0.0
        steps = [load.step() for _ in range(NUM_STEPS)]
        if prediction.num_errors:
            raise RuntimeError(f"the predictor failed: {prediction.last_error!r}")
    return {
        "prediction_cost_per_step": statistics.fmean(whole for whole, _ in steps) / STEP_S,
        "read_cost_per_step": statistics.median(read for _, read in steps) / STEP_S,
        "trained_cost_per_step": timed.seconds / NUM_STEPS / STEP_S,
        "trained_prediction_us": trained_us(trained, load.features[:32]),
    }


def measure() -> tuple[dict[str, float], list[dict[str, float]]]:
    training, held_out = split(length_records(4_000, random.Random(0)))
    trained = train(training)
    report = evaluate(trained, held_out)
    runs = [one_round(trained, seed) for seed in range(ROUNDS)]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**figures, "one_bit_accuracy_over_always_short": report.accuracy_over_always_short}, runs


if __name__ == "__main__":
    main(__doc__, measure)
