"""How many tokens a request will put out: guesses, their correction, and their place beside the step.

Smallest volume first (arXiv 2606.22327) ranks requests by `volume`, with the output length either predicted, or known
as a short/long bit only and replaced by the mean of its class.
"""

from __future__ import annotations

import math
import queue
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

from stream2llm_sdk.errors import ConfigurationError

__all__ = [
    "BatchedPrediction",
    "ClassMeans",
    "LengthPrediction",
    "LengthPredictor",
    "MaxTokensPredictor",
    "QuantilePredictor",
    "RequestFeatures",
    "corrected",
    "volume",
]


_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class RequestFeatures:
    """What a prediction may use of a request.

    Attributes:
        num_prompt_tokens: prompt tokens; of an open stream the forecast of them, or those so far.
        max_tokens: the most tokens that the request may put out, None if it has no limit of its own.
        tag: the retriever, or the kind of request.
        tenant: whose request it is.
        question_token_ids: ids of the question, or of the prompt's end.
    """

    num_prompt_tokens: int
    max_tokens: int | None = None
    tag: str = ""
    tenant: str = ""
    question_token_ids: tuple[int, ...] = ()


class LengthPrediction(NamedTuple):
    """An expected number of output tokens, and whether the request is a long one."""

    num_tokens: float
    is_long: bool


class LengthPredictor(Protocol):
    """Predicts the output length of requests. Subclasses get `predict_batch`, and an `observe` that learns nothing."""

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        """The prediction for one request."""
        ...

    def predict_batch(self, batch: Sequence[RequestFeatures]) -> list[LengthPrediction]:
        """The predictions for several requests, in their order."""
        return [self.predict(features) for features in batch]

    def observe(self, features: RequestFeatures, num_output_tokens: int) -> None:
        """A request has ended of itself after `num_output_tokens`."""
        return


class MaxTokensPredictor(LengthPredictor):
    """Takes a request at its word: it will put out `max_tokens`.

    Args:
        long_from: from how many tokens a request is long.
        default: the length of a request without `max_tokens`.
    """

    def __init__(self, *, long_from: int = 256, default: int = 256) -> None:
        self._long_from = _positive("long_from", long_from)
        self._default = _positive("default", default)

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        num_tokens = self._default if features.max_tokens is None else features.max_tokens
        return LengthPrediction(float(num_tokens), num_tokens >= self._long_from)


class QuantilePredictor(LengthPredictor):
    """A quantile of the latest outputs of the same tenant and tag; of the tag, of all, or `fallback` while those are
    too few.

    The quantile is exact over a window, so that no outlier and no old habit stays in it. At most `max_keys` windows
    are kept for either kind of key; the least recently observed is forgotten.

    Args:
        quantile: between 0 and 1; 0.5 is the median.
        long_from: from how many tokens a request is long.
        window: outputs that a window holds.
        min_outputs: outputs that a window must have to be asked.
        max_keys: windows kept.
        fallback: what answers before anything is known.
    """

    def __init__(
        self,
        *,
        quantile: float = 0.5,
        long_from: int = 256,
        window: int = 256,
        min_outputs: int = 8,
        max_keys: int = 1024,
        fallback: LengthPredictor | None = None,
    ) -> None:
        if not 0 < quantile < 1:
            raise ConfigurationError(f"a quantile lies between 0 and 1, {quantile!r} does not")
        self._quantile = quantile
        self._long_from = _positive("long_from", long_from)
        self._window = _positive("window", window)
        self._min_outputs = min(_positive("min_outputs", min_outputs), window)
        self._max_keys = _positive("max_keys", max_keys)
        self._fallback = MaxTokensPredictor(long_from=long_from) if fallback is None else fallback
        self._windows: OrderedDict[tuple[str, ...], _Window] = OrderedDict()
        self._all = _Window(window)

    def __len__(self) -> int:
        """Windows held, beside that of all."""
        return len(self._windows)

    def predict(self, features: RequestFeatures) -> LengthPrediction:
        for key in ((features.tag, features.tenant), (features.tag,)):
            window = self._windows.get(key)
            if window is not None and len(window) >= self._min_outputs:
                break
        else:
            window = self._all
        if len(window) < self._min_outputs:
            return self._fallback.predict(features)
        num_tokens = window.quantile(self._quantile)
        if features.max_tokens is not None:
            num_tokens = min(num_tokens, features.max_tokens)
        return LengthPrediction(float(num_tokens), num_tokens >= self._long_from)

    def observe(self, features: RequestFeatures, num_output_tokens: int) -> None:
        for key in ((features.tag,), (features.tag, features.tenant)):
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = _Window(self._window)
            self._windows.move_to_end(key)
            window.add(num_output_tokens)
        while len(self._windows) > 2 * self._max_keys:
            self._windows.popitem(last=False)
        self._all.add(num_output_tokens)


class _Window:
    """The latest numbers, also in order of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, number: int) -> None:
        if len(self._latest) == self._size:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(number)
        insort(self._sorted, number)

    def quantile(self, quantile: float) -> int:
        return self._sorted[min(len(self._sorted) - 1, math.floor(quantile * len(self._sorted)))]


def corrected(prediction: LengthPrediction, num_output_so_far: int, max_tokens: int | None = None) -> LengthPrediction:
    """A prediction in the light of the output so far.

    One that the output has reached was too short: it is doubled until it exceeds the output, at most to `max_tokens`,
    and the request is long. Others stay.
    """
    if num_output_so_far < prediction.num_tokens:
        return prediction
    num_tokens = max(1.0, prediction.num_tokens)
    while num_tokens <= num_output_so_far:
        num_tokens *= 2
    if max_tokens is not None:
        num_tokens = max(float(num_output_so_far), min(num_tokens, float(max_tokens)))
    return LengthPrediction(num_tokens, True)


def volume(num_prompt_tokens: float, num_output_tokens: float) -> float:
    """Token-steps of KV that a request will hold: v = s·o + (o² + o) / 2 for a prompt of s tokens and an output of o
    (arXiv 2606.22327)."""
    return num_prompt_tokens * num_output_tokens + (num_output_tokens * num_output_tokens + num_output_tokens) / 2


class ClassMeans:
    """The mean output of requests that were predicted short, and of those predicted long: the lengths that stand in
    for the bit in a 1-bit volume.

    They are means given the *predicted* class, and so allow for the predictor's mistakes.

    Args:
        short, long: the means before anything was observed, which count for 4 requests.
        window: how many recent requests of a class count; older ones fade exponentially.
    """

    def __init__(self, *, short: float = 64.0, long: float = 512.0, window: int = 1024) -> None:
        self._decay = 1.0 - 1.0 / _positive("window", window)
        self._totals = [4.0 * short, 4.0 * long]
        self._counts = [4.0, 4.0]

    def __getitem__(self, is_long: bool) -> float:
        return self._totals[is_long] / self._counts[is_long]

    def observe(self, predicted_long: bool, num_output_tokens: int) -> None:
        """A request that was predicted short or long has ended."""
        self._totals[predicted_long] = self._decay * self._totals[predicted_long] + num_output_tokens
        self._counts[predicted_long] = self._decay * self._counts[predicted_long] + 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A request whose output length is of interest. One that is added again is another entry."""

    request_id: str
    features: RequestFeatures


class _Ended(NamedTuple):
    """What the predictor learns of a request that has ended."""

    features: RequestFeatures
    num_output_tokens: int


_Job = _Entry | _Ended | None


class BatchedPrediction:
    """Predicts beside the step: a thread takes what was added meanwhile as one batch, the step picks up results.

    Until a result is picked up, and for good where the predictor fails, the fallback's prediction holds. All methods
    are called from one thread, the step's, and never wait for the predictor; the predictor is only ever touched by
    the thread, the fallback only by the caller.

    Args:
        predictor: what predicts in the thread.
        fallback: what predicts at once; it must be cheap.
        max_batch: requests predicted together. A predictor in Python holds the interpreter for so long, so keep it to a
            fraction of a millisecond.
        max_waiting: requests and observations that may wait for the thread; what comes beyond is left to the
            fallback.

    Attributes:
        num_errors: calls of the predictor that raised, or gave another number of results than requests.
        last_error: the last of them.
        num_left_out: requests and observations that found the queue full.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        fallback: LengthPredictor | None = None,
        *,
        max_batch: int = 32,
        max_waiting: int = 4096,
    ) -> None:
        self._predictor = predictor
        self._fallback = MaxTokensPredictor() if fallback is None else fallback
        self._max_batch = _positive("max_batch", max_batch)
        self._max_waiting = _positive("max_waiting", max_waiting)
        self._entries: dict[str, _Entry] = {}
        self._predictions: dict[str, LengthPrediction] = {}
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._results: deque[tuple[_Entry, LengthPrediction]] = deque()
        self._stop = threading.Event()
        self.num_errors = 0
        self.last_error: Exception | None = None
        self.num_left_out = 0
        self._thread = threading.Thread(target=self._work, name="length-prediction", daemon=True)
        self._thread.start()

    def __enter__(self) -> BatchedPrediction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Requests that are neither finished nor forgotten."""
        return len(self._entries)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def add(self, request_id: str, features: RequestFeatures) -> LengthPrediction:
        """Queues a request, or one with new features, and gives the fallback's prediction."""
        entry = self._entries[request_id] = _Entry(request_id, features)
        prediction = self._predictions[request_id] = self._fallback.predict(features)
        self._submit(entry)
        return prediction

    def pick_up(self) -> Mapping[str, LengthPrediction]:
        """Takes what the thread has finished, and gives the predictions that hold now by request id. Called once a
        step, so that predictions hold still within it; the mapping is the same object each time."""
        while self._results:
            entry, prediction = self._results.popleft()
            # A request that was replaced meanwhile has another entry; one that is gone has none.
            if self._entries.get(entry.request_id) is entry:
                self._predictions[entry.request_id] = prediction
        return self._predictions

    def finished(self, request_id: str, num_output_tokens: int) -> None:
        """A request has ended of itself: predictor and fallback learn of its length, and it is forgotten."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            del self._predictions[request_id]
            self._fallback.observe(entry.features, num_output_tokens)
            self._submit(_Ended(entry.features, num_output_tokens))

    def forget(self, request_id: str) -> None:
        """A request was aborted: nothing is learned of it."""
        if self._entries.pop(request_id, None) is not None:
            del self._predictions[request_id]

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stops the thread after the batch it is in, and waits for it at most so long. Returns whether it ended.
        Requests may still be added; they get the fallback's predictions."""
        self._stop.set()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, job: _Job) -> None:
        if self._stop.is_set():
            return
        if self._jobs.qsize() >= self._max_waiting:
            self.num_left_out += 1
        else:
            self._jobs.put(job)

    def _work(self) -> None:
        # The pause lets go of the interpreter between batches, and lets requests gather.
        while not self._stop.wait(_PAUSE_S):
            jobs = [self._jobs.get(), *self._without_waiting()]
            added = [job for job in jobs if isinstance(job, _Entry)]
            if added and not self._stop.is_set():
                self._predict(added)
            for job in jobs:
                if isinstance(job, _Ended):
                    self._observe(job)

    def _without_waiting(self) -> list[_Job]:
        jobs: list[_Job] = []
        for _ in range(self._max_batch - 1):
            try:
                jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                break
        return jobs

    def _predict(self, batch: list[_Entry]) -> None:
        try:
            predictions = self._predictor.predict_batch([entry.features for entry in batch])
            results = list(zip(batch, predictions, strict=True))
        except Exception as error:
            self._failed(error)
        else:
            self._results.extend(results)

    def _observe(self, ended: _Ended) -> None:
        try:
            self._predictor.observe(ended.features, ended.num_output_tokens)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_errors += 1
        self.last_error = error


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigurationError(f"{name} must be at least 1, not {value!r}")
    return value
