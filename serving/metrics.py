"""What the engine did, as counters, histograms and gauges for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.trail import EventTrail, EventType, TrailEvent

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

__all__ = ["SchedulerMetrics"]

_NAMESPACE = "stream2llm"
_OTHER = "other"
_MAX_REASONS = 16
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_HOLD_BUCKETS_S = (0, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_RATIO_BUCKETS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 5, 10)
_PROMPT_BUCKETS = tuple(2**exponent for exponent in range(5, 21))
# By the name of the trail's event.
_PREEMPTIONS = {"PREEMPTED_SWAP": "swap", "PREEMPTED_RECOMPUTE": "recompute"}
_SOURCES = ("loaded", "found", "recomputed")

# Counters fed from the figures that a trail ends with: (figure, name, help).
_END_FIGURES = (
    ("num_tokens_computed", "tokens_computed", "Tokens run through the model."),
    ("num_tokens_recomputed", "tokens_recomputed", "Those of the computed tokens that had been computed before."),
    ("num_tokens_invalidated", "tokens_invalidated", "Computed tokens that prompt updates made void."),
    ("num_tokens_cached", "tokens_cached", "Tokens found in the prefix cache at admission."),
)
# Gauges fed from snapshots: (figure, name, help).
_GAUGES = (
    ("num_open_streams", "open_streams", "Streams whose prompt is not finished."),
    ("num_open_tokens", "open_tokens", "Prompt tokens of the open streams."),
    ("num_waiting", "waiting_requests", "Requests with a complete prompt that have not ended."),
    ("num_parked", "parked_streams", "Open streams with nothing to compute."),
    ("num_free_blocks", "free_kv_blocks", "KV blocks that can be given out."),
    ("num_host_blocks_used", "host_blocks_used", "KV blocks held in the pool in host memory."),
    ("num_host_blocks", "host_blocks", "KV blocks that the pool in host memory has room for."),
)


class SchedulerMetrics:
    """The metrics of one engine, fed with the trails of its ended requests and with snapshots of its state.

    Everything that comes from trails is counted when the request ends, not when it happens.

    Args:
        registry: where the metrics are registered; left out, one of their own. A registry takes one engine's.
        max_tenants: how many tenants get a label of their own; the requests of all later ones count as "other".

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigurationError: `max_tenants` is negative.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_tenants: int = 100) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError("prometheus_client", "metrics") from error
        if not isinstance(max_tenants, int) or max_tenants < 0:
            raise ConfigurationError(f"max_tenants={max_tenants!r}: give a whole number, at least 0")
        if registry is not None and not isinstance(registry, prometheus_client.CollectorRegistry):
            raise ConfigurationError(f"registry={registry!r:.80}: give a prometheus_client.CollectorRegistry")
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self._tenants = _BoundedLabel(max_tenants)
        self._reasons = _BoundedLabel(_MAX_REASONS)
        self._totals: dict[str, float] = {}
        self._policy: str | None = None
        self._make_counters()
        self._make_histograms()
        gauge = partial(prometheus_client.Gauge, namespace=_NAMESPACE, registry=self.registry)
        self._gauges = {figure: gauge(name, text) for figure, name, text in _GAUGES}
        self._policies = gauge("policy", "1 for the scheduling policy in use.", ["policy"])

    def _make_counters(self) -> None:
        from prometheus_client import Counter

        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        self._requests = counter("requests", "Requests that ended.", ["reason", "tenant"])
        self._end_figures = {figure: counter(name, text) for figure, name, text in _END_FIGURES}
        self._preemptions = counter("preemptions", "How often a request's KV was taken away.", ["kind"])
        self._preempted_tokens = counter("preempted_tokens", "Computed tokens of preempted requests.", ["kind"])
        self._preempted_blocks = counter("preempted_blocks", "KV blocks of preempted requests.", ["kind"])
        self._resumed_tokens = counter(
            "resumed_tokens",
            "Tokens that preempted requests got back: loaded from host memory, found in the prefix cache, recomputed.",
            ["source"],
        )
        self._switches = counter("policy_switches", "How often the scheduling policy was changed.")
        self._refusals = counter("refusals", "Calls refused, because a limit was reached.", ["limit"])
        # A series that begins with its first increment shows that increment to nobody.
        for kind in _PREEMPTIONS.values():
            for preempted in (self._preemptions, self._preempted_tokens, self._preempted_blocks):
                preempted.labels(kind)
        for source in _SOURCES:
            self._resumed_tokens.labels(source)

    def _make_histograms(self) -> None:
        from prometheus_client import Histogram

        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        self._ttft_from_context = histogram(
            "ttft_from_context_complete_seconds",
            "From the end of the context to the first token.",
            buckets=_TTFT_BUCKETS_S,
        )
        self._ttft_from_request = histogram(
            "ttft_from_request_seconds", "From the request to the first token.", buckets=_TTFT_BUCKETS_S
        )
        self._kv_on_gpu = histogram(
            "kv_on_gpu_seconds", "How long a request held KV without being scheduled.", buckets=_HOLD_BUCKETS_S
        )
        self._cost_ratio = histogram(
            "preemption_cost_ratio", "Predicted by actual cost of a preemption.", ["kind"], buckets=_RATIO_BUCKETS
        )
        self._prompt_tokens = histogram("prompt_tokens", "Length of final prompts.", buckets=_PROMPT_BUCKETS)

    @property
    def content_type(self) -> str:
        """The media type of what `render` gives."""
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    # ---- ended requests -----------------------------------------------------------------------------------------

    def observe_trail(self, trail: EventTrail, *, tenant: str = "", reason: str | None = None) -> None:
        """Counts a request that has ended; a trail without an end is not counted. To be called once a request.

        Args:
            trail: its events.
            tenant: whom it is counted for.
            reason: why it ended, where the sender knows it better than the engine (such as "idle").
        """
        end = next((event for event in reversed(trail) if event.type.is_terminal), None)
        if end is None:
            return
        reason = reason or str(end.data.get("reason") or end.type.value.lower())
        self._requests.labels(self._reasons(reason), self._tenants(tenant)).inc()
        for figure, counter in self._end_figures.items():
            counter.inc(_figure(end, figure))
        for histogram, seconds in (
            (self._ttft_from_context, trail.ttft_from_context_complete_s),
            (self._ttft_from_request, trail.ttft_from_request_s),
            (self._kv_on_gpu, trail.duration_s(EventType.KV_ON_GPU)),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        num_prompt_tokens = _num_prompt_tokens(trail, end)
        if num_prompt_tokens is not None:
            self._prompt_tokens.observe(num_prompt_tokens)
        self._observe_preemptions(trail)

    def _observe_preemptions(self, trail: EventTrail) -> None:
        preemption: TrailEvent | None = None
        for event in trail:
            kind = _PREEMPTIONS.get(event.type.value)
            if kind is not None:
                preemption = event
                self._preemptions.labels(kind).inc()
                self._preempted_tokens.labels(kind).inc(_figure(event, "num_tokens"))
                self._preempted_blocks.labels(kind).inc(_figure(event, "num_blocks"))
            elif event.type is EventType.RESUMED:
                for source in _SOURCES:
                    self._resumed_tokens.labels(source).inc(_figure(event, f"num_{source}"))
                if preemption is not None:
                    self._observe_cost(preemption, event)
                    preemption = None

    def _observe_cost(self, preemption: TrailEvent, resumption: TrailEvent) -> None:
        predicted_s, actual_s = preemption.data.get("predicted_s"), resumption.data.get("actual_s")
        if predicted_s is not None and actual_s:
            self._cost_ratio.labels(_PREEMPTIONS[preemption.type.value]).observe(predicted_s / actual_s)

    # ---- the engine's state -------------------------------------------------------------------------------------

    def observe_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Takes over figures of the engine's state. What a snapshot leaves out, or knows only as None, stays.

        Gauges: `num_open_streams`, `num_open_tokens`, `num_waiting`, `num_parked`, `num_free_blocks`,
        `num_host_blocks_used`, `num_host_blocks`, and the name `policy`. Totals since the engine started:
        `num_policy_switches`, and `num_refused` by limit. Other figures are passed over.
        """
        for figure, gauge in self._gauges.items():
            if (value := snapshot.get(figure)) is not None:
                gauge.set(value)
        if (policy := snapshot.get("policy")) is not None:
            if self._policy is not None:
                self._policies.labels(self._policy).set(0)
            self._policies.labels(policy).set(1)
            self._policy = policy
        self._advance(self._switches, "num_policy_switches", snapshot.get("num_policy_switches"))
        for limit, total in (snapshot.get("num_refused") or {}).items():
            self._advance(self._refusals.labels(limit), f"num_refused {limit}", total)

    def _advance(self, counter: Counter, name: str, total: float | None) -> None:
        """Brings a counter up to a total that somebody else keeps."""
        if total is not None:
            counter.inc(max(0, total - self._totals.get(name, 0)))
            self._totals[name] = max(total, self._totals.get(name, 0))


class _BoundedLabel:
    """The values of a label: the first `max_values` as they are, all later ones as "other"."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._max_values:
                return _OTHER
            self._known.add(value)
        return value


def _figure(event: TrailEvent, name: str) -> float:
    return float(event.data.get(name) or 0)


def _num_prompt_tokens(trail: EventTrail, end: TrailEvent) -> int | None:
    """The prompt's length: what the end says, else the last update; None for a trail that says neither."""
    last = trail.last(EventType.PROMPT_UPDATED)
    length: int | None = end.data.get("num_prompt_tokens", None if last is None else last.data.get("num_tokens"))
    return length
