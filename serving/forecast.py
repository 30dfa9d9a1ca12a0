"""When an open stream will be complete, and how long its prompt will be then: learned while serving."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.stream_statistics import (
    FIRST,
    GAP,
    GROWTH,
    LAST,
    LATER,
    MAX_COUNT,
    NUM_STREAMS,
    NUM_SUMS,
    LogSpread,
    Moments,
    StreamModel,
    StreamPrior,
    Sums,
)

__all__ = ["Forecast", "StreamForecaster", "StreamKey", "StreamStatistics"]

# A wider group counts for this many streams where a group has none of its own, and fades as it gets some.
_WIDER_WEIGHT = 4.0
# A model is made again after a 16th more streams, at most 8; or after 16 of others while its own are few.
_REFRESH_SHARE, _REFRESH_OWN, _REFRESH_OTHERS, _FEW = 16, 8, 16, 64
# A forecast that waits longer than it expected to is made again when the wait has grown by this share.
_PATIENCE = 0.25
_SQRT_HALF = math.sqrt(0.5)
_MAX_LOG_MEAN = 20.0  # of seconds: nobody waits for years


class StreamKey(NamedTuple):
    """What is learned apart: the retriever (its tag) and the tenant. A new tenant starts from its tag's streams, a
    new tag from all."""

    tag: str = ""
    tenant: str = ""


class Forecast(NamedTuple):
    """What is expected of a stream.

    Attributes:
        final_num_tokens: prompt tokens at completion; never less than the prompt has.
        completion_s: when it will be complete, on the clock of the times that were given; never in the past.
        num_chunks_left: chunks still to come.
        expires_s: until when the forecast holds if nothing happens.
    """

    final_num_tokens: int
    completion_s: float
    num_chunks_left: float
    expires_s: float


class StreamStatistics(NamedTuple):
    """Means of the streams of a key, as the forecasts use them.

    `num_streams` is how many they rest on: decayed, with the prior and the share of wider groups.
    """

    num_streams: float
    num_chunks: float
    first_gap_s: float
    gap_s: float
    chunk_tokens: float
    duration_s: float
    growth_tokens: float


class StreamForecaster:
    """Learns streams and forecasts the open ones.

    A forecast is conditional on what the stream has shown: its chunks so far, their sizes and gaps against those of
    other streams, and the time since its last chunk. It is computed at most once between two events of the stream
    unless the next event is overdue, so that asking in every step costs a dictionary lookup.

    Memory: one vector of sums a key, at most `max_keys` keys and as many tags (the least recently opened are
    forgotten), and a few numbers an open stream. The same calls give the same forecasts.

    Args:
        window: how many recent streams of a key count; older ones fade exponentially.
        max_keys: keys that are remembered.
        prior: what is believed before the first streams.

    Raises:
        ConfigurationError: `window` or `max_keys` is not positive.
    """

    def __init__(self, *, window: int = 256, max_keys: int = 1024, prior: StreamPrior | None = None) -> None:
        if window < 2 or max_keys < 1:
            raise ConfigurationError(f"a window of {window} streams and {max_keys} keys: give at least 2 and 1")
        self._decay = 1.0 - 1.0 / window
        self._max_keys = max_keys
        self._prior = (prior or StreamPrior()).sums()
        self._all = _Group()
        self._tags: OrderedDict[tuple[str, ...], _Group] = OrderedDict()
        self._keys: OrderedDict[tuple[str, ...], _Group] = OrderedDict()
        self._streams: dict[str, _Stream] = {}
        self._forecasts: dict[str, Forecast] = {}
        # When the first of them expires; minus infinity after an event.
        self._due_s = -math.inf

    def __len__(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def opened(self, request_id: str, key: StreamKey, num_tokens: int, now_s: float) -> None:
        """A stream was opened with a prompt of `num_tokens`. `now_s` is on a monotonic clock, as in all calls."""
        tag, own = self._group(self._tags, (key.tag,)), self._group(self._keys, key)
        self._streams[request_id] = _Stream(own, tag, num_tokens, now_s)
        self._due_s = -math.inf

    def chunk(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """A chunk arrived, or an update replaced the prompt: it has `num_tokens` now. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_complete:
            stream.event(FIRST if stream.num_chunks == 0 else LATER, num_tokens, now_s)
            stream.num_chunks += 1
            self._due_s = -math.inf

    def completed(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """The prompt was finished, with what came in the same update. Unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_complete:
            return
        stream.event(LAST, num_tokens, now_s)
        stream.is_complete = True
        stream.forecast = Forecast(num_tokens, now_s, 0.0, math.inf)
        stream.expires_s = math.inf
        self._due_s = -math.inf
        self._learn(stream)

    def ended(self, request_id: str) -> None:
        """The request is gone. One that was still open teaches that streams can have that many chunks, no more."""
        stream = self._streams.pop(request_id, None)
        self._forecasts.pop(request_id, None)
        if stream is not None and not stream.is_complete:
            self._learn(stream)

    def forecast(self, request_id: str, now_s: float) -> Forecast | None:
        """What is expected of a stream as of `now_s`; None for an unknown id."""
        stream = self._streams.get(request_id)
        return None if stream is None else self._current(stream, now_s)

    def forecasts(self, now_s: float) -> Mapping[str, Forecast]:
        """What is expected of every stream that has not ended, by request id: for those who ask for all of them in
        every step. The mapping is the same object each time and changes with the next call."""
        if now_s >= self._due_s:
            forecasts, due_s = self._forecasts, math.inf
            for request_id, stream in self._streams.items():
                forecasts[request_id] = stream.forecast if now_s < stream.expires_s else self._current(stream, now_s)
                if stream.expires_s < due_s:
                    due_s = stream.expires_s
            self._due_s = due_s
        return self._forecasts

    def statistics(self, key: StreamKey) -> StreamStatistics:
        """What has been learned of a key, or would be assumed of it; it need not be known."""
        model = self._model(self._keys.get(key, _Group()), self._tags.get((key.tag,), _Group()))
        return StreamStatistics(
            num_streams=model.num_streams,
            num_chunks=model.chunks_left[0],
            first_gap_s=model.gap[FIRST].mean,
            gap_s=model.gap[LATER].mean,
            chunk_tokens=model.growth[LATER].mean,
            duration_s=model.duration_s,
            growth_tokens=model.total_growth,
        )

    def _group(self, groups: OrderedDict[tuple[str, ...], _Group], key: tuple[str, ...]) -> _Group:
        """The group of a key, made if need be; the least recently used goes when there are too many."""
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Group()
            if len(groups) > self._max_keys:
                groups.popitem(last=False)
        else:
            groups.move_to_end(key)
        return group

    def _learn(self, stream: _Stream) -> None:
        sums = stream.sums()
        for group in (stream.own, stream.tag, self._all):
            group.sums *= self._decay
            group.sums += sums
            group.num_learned += 1

    def _current(self, stream: _Stream, now_s: float) -> Forecast:
        forecast = stream.forecast
        if now_s >= stream.expires_s:
            stream.forecast = forecast = stream.expect(self._model(stream.own, stream.tag), now_s)
            stream.expires_s = forecast.expires_s
        return forecast

    def _model(self, own: _Group, tag: _Group) -> StreamModel:
        """The model of a group: its own streams, and the wider groups' as far as those are few."""
        model = own.model
        if model is None or own.is_model_old(self._all.num_learned):
            wider = _blend(tag.sums, _blend(self._all.sums, self._prior))
            own.model = model = StreamModel(_blend(own.sums, wider))
            own.num_learned_by_model, own.num_learned_of_all = own.num_learned, self._all.num_learned
        return model


class _Group:
    """The streams of a key, of a tag, or all: decayed sums, and the model made of them when it was last needed."""

    __slots__ = ("model", "num_learned", "num_learned_by_model", "num_learned_of_all", "sums")

    def __init__(self) -> None:
        self.sums: Sums = np.zeros(NUM_SUMS)
        self.num_learned = 0
        self.model: StreamModel | None = None
        self.num_learned_by_model = 0
        self.num_learned_of_all = 0

    def is_model_old(self, num_learned_of_all: int) -> bool:
        """Whether enough was learned since the model was made that it would come out differently."""
        num_new = self.num_learned - self.num_learned_by_model
        if num_new > min(_REFRESH_OWN, self.num_learned_by_model // _REFRESH_SHARE):
            return True
        return self.num_learned < _FEW and num_learned_of_all - self.num_learned_of_all >= _REFRESH_OTHERS


class _Stream:
    """One stream: what it has shown so far, in a fixed number of sums."""

    __slots__ = (
        "expires_s",
        "forecast",
        "is_complete",
        "last_s",
        "moments",
        "num_chunks",
        "num_tokens",
        "opened_num_tokens",
        "opened_s",
        "own",
        "tag",
    )

    def __init__(self, own: _Group, tag: _Group, num_tokens: int, now_s: float) -> None:
        self.own, self.tag = own, tag
        self.opened_num_tokens = self.num_tokens = num_tokens
        self.opened_s = self.last_s = now_s
        self.num_chunks = 0
        self.moments = Moments()
        self.is_complete = False
        self.forecast = Forecast(num_tokens, now_s, 0.0, -math.inf)
        self.expires_s = -math.inf

    def event(self, kind: int, num_tokens: int, now_s: float) -> None:
        self.moments.add(GROWTH, kind, num_tokens - self.num_tokens)
        self.moments.add(GAP, kind, max(0.0, now_s - self.last_s))
        self.num_tokens, self.last_s = num_tokens, max(self.last_s, now_s)
        self.expires_s = -math.inf

    def sums(self) -> Sums:
        growth = self.num_tokens - self.opened_num_tokens
        return self.moments.sums(self.num_chunks, self.is_complete, self.last_s - self.opened_s, growth)

    def expect(self, model: StreamModel, now_s: float) -> Forecast:
        """The conditional means of what is left: one event that is already waited for, then whole ones."""
        kind = LATER if self.num_chunks else FIRST
        waited_s = max(0.0, now_s - self.last_s)
        count = min(self.num_chunks, MAX_COUNT)
        growth_factor, gap_factor, next_gap = self._own_share(model, kind)
        last, wait_s = _next_event(model.hazards[count], model.gap[LAST], next_gap, waited_s)
        chunks_after = model.chunks_left[min(count + 1, MAX_COUNT)]
        time_left_s = (1.0 - last) * (chunks_after * gap_factor * model.gap[LATER].mean + model.gap[LAST].mean)
        chunk_tokens = model.growth[LATER].mean
        growth = (1.0 - last) * growth_factor * (model.growth[kind].mean + chunks_after * chunk_tokens)
        growth = model.growth_scale * (growth + model.growth[LAST].mean)
        completion_s = now_s + wait_s + model.time_scale * time_left_s
        return Forecast(
            self.num_tokens + max(0, round(growth)),
            completion_s,
            (1.0 - last) * (1.0 + chunks_after),
            min(completion_s, now_s + max(wait_s, _PATIENCE * waited_s)),
        )

    def _own_share(self, model: StreamModel, kind: int) -> tuple[float, float, LogSpread]:
        """How this stream's chunks and gaps compare with others': factors of size and gap, and its next gap."""
        values = self.moments.values
        num_first, first_log = values[2:4]
        num, log = values[7:9]
        residuals = first_log - num_first * model.growth[FIRST].log_mean + log - num * model.growth[LATER].log_mean
        growth_factor = model.growth_effect.factor(model.growth_effect.posterior(num + num_first, residuals))
        num, log = values[22:24]
        effect = model.gap_effect.posterior(num, log - num * model.gap[LATER].log_mean)
        next_gap = model.gap[kind]
        if kind == LATER:
            variance = model.gap_effect.within + effect[1]
            next_gap = LogSpread(next_gap.mean, next_gap.log_mean + effect[0], variance)
        return growth_factor, model.gap_effect.factor(effect), next_gap


def _next_event(hazard: float, last: LogSpread, chunk: LogSpread, waited_s: float) -> tuple[float, float]:
    """Probability that the next event is the completion, and the expected wait for the next event, after a wait."""
    last_survival, last_wait_s = _log_normal_rest(last, waited_s)
    chunk_survival, chunk_wait_s = _log_normal_rest(chunk, waited_s)
    ends, goes_on = hazard * last_survival, (1.0 - hazard) * chunk_survival
    if ends + goes_on > 0:
        hazard = ends / (ends + goes_on)
    return hazard, hazard * last_wait_s + (1.0 - hazard) * chunk_wait_s


def _log_normal_rest(spread: LogSpread, waited_s: float) -> tuple[float, float]:
    """P(X > w) and E[X - w | X > w] of a log-normal X."""
    mean_s = math.exp(min(_MAX_LOG_MEAN, spread.log_mean + spread.log_variance / 2))
    if waited_s <= 0:
        return 1.0, mean_s
    sd = math.sqrt(spread.log_variance)
    distance = (math.log(waited_s) - spread.log_mean) / sd
    if distance > 6.0:
        # The mean excess far out, where the difference of the exact form has no digits left.
        return 0.5 * math.erfc(distance * _SQRT_HALF), waited_s * sd / distance
    survival = 0.5 * math.erfc(distance * _SQRT_HALF)
    rest_s = mean_s * 0.5 * math.erfc((distance - sd) * _SQRT_HALF) / survival - waited_s
    return survival, max(rest_s, 0.0)


def _blend(sums: Sums, wider: Sums) -> Sums:
    """A group's sums with those of a wider group, scaled to a few streams and fewer the more the group has."""
    weight = _WIDER_WEIGHT * (_WIDER_WEIGHT / (_WIDER_WEIGHT + float(sums[NUM_STREAMS]))) ** 2
    return sums + wider * (weight / float(wider[NUM_STREAMS]))
