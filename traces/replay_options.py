"""How traces are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.trace import Trace
from stream2llm_sdk.value_checks import is_number, is_whole, plain_numbers

__all__ = ["OnError", "ReplayOptions"]


class OnError(StrEnum):
    """What a request that fails does to the run. (An engine that died ends it in any case.)

    CONTINUE: it is recorded, and the others go on.
    STOP: the run ends, and its folder says that it failed.
    """

    CONTINUE = "continue"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How traces are replayed.

    Attributes:
        streaming: whether prompts are sent as their chunks come; else each is sent whole, when its last chunk is there.
        delay_multiplier: what the waits of each retrieval are multiplied by.
        time_scale: what every time is multiplied by, arrivals too: 0.5 replays in half the time.
        arrivals: when questions come; None for each trace's own `arrival_s`.
        seed: of arrivals that are drawn.
        max_tokens: output tokens, for traces that do not say.
        ignore_eos: whether exactly as many are generated, as a simulation does.
        concurrency: most requests under way at once; later ones wait for their turn, and then begin to retrieve. None
            for no limit. Not for simulations.
        limit: most traces to replay, the first ones; None for all.
        tenant: whose requests they are, in place of the traces' own; None to leave these.
        policy: the engine's scheduling policy, for the record; "" for what the engine says.
        sample_every_s: how often it is noted how the engine stands.
        on_error: 'continue' or 'stop'.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    streaming: bool = True
    delay_multiplier: float = 1.0
    time_scale: float = 1.0
    arrivals: Arrivals | None = None
    seed: int = 0
    max_tokens: int = 1
    ignore_eos: bool = True
    concurrency: int | None = None
    limit: int | None = None
    tenant: str | None = None
    policy: str = ""
    sample_every_s: float = 0.25
    on_error: OnError | str = OnError.CONTINUE

    def __post_init__(self) -> None:
        plain_numbers(self)
        for name in ("streaming", "ignore_eos"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, above in (("delay_multiplier", False), ("time_scale", True), ("sample_every_s", True)):
            wanted = "a finite number above 0" if above else "a finite number, 0 or more"
            self._require(name, is_number(getattr(self, name), above=above), wanted)
        for name, least in (("seed", 0), ("max_tokens", 1), ("concurrency", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None or name in ("seed", "max_tokens"):
                self._require(name, is_whole(value, least), f"a whole number, at least {least}")
        self._require("policy", isinstance(self.policy, str), "a name")
        self._require("tenant", isinstance(self.tenant, (str, type(None))), "a name, or None")
        self._require("arrivals", isinstance(self.arrivals, (Arrivals, type(None))), "Arrivals, or None")
        self._require("on_error", self.on_error in list(OnError), "'continue' or 'stop'")
        object.__setattr__(self, "on_error", OnError(self.on_error))

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigurationError(f"{name}={getattr(self, name)!r:.80}: give {wanted}")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON takes them."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.arrivals is not None:
            values["arrivals"] = {field.name: getattr(self.arrivals, field.name) for field in fields(self.arrivals)}
        return {**values, "on_error": str(self.on_error)}

    def applied_to(self, traces: Sequence[Trace]) -> list[Trace]:
        """The traces to replay, each with its final times, tenant and output tokens; in the order of their arrival.

        Raises:
            ConfigurationError: there are none, or one has no arrival.
        """
        chosen = list(traces[: self.limit])
        if not chosen:
            raise ConfigurationError("there are no traces to replay")
        if self.arrivals is None:
            arrivals_s = [_recorded_s(trace) for trace in chosen]
        else:
            arrivals_s = self.arrivals.draw(len(chosen), seed=self.seed).tolist()
        placed = [self._placed(trace, arrival_s) for trace, arrival_s in zip(chosen, arrivals_s, strict=True)]
        return sorted(placed, key=lambda trace: trace.arrival_s or 0.0)

    def _placed(self, trace: Trace, arrival_s: float) -> Trace:
        return replace(
            trace.stretched(self.delay_multiplier * self.time_scale),
            arrival_s=self.time_scale * arrival_s,
            max_tokens=trace.max_tokens or self.max_tokens,
            tenant=trace.tenant if self.tenant is None else self.tenant,
        )


def _recorded_s(trace: Trace) -> float:
    if trace.arrival_s is None:
        raise ConfigurationError(
            f"trace {trace.trace_id!r} has no arrival_s: say when questions come, like arrivals=Arrivals(rate_per_s=1)"
        )
    return trace.arrival_s
