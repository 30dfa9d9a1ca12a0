"""The SVF experiments' outcome: rows, medians of paired draws, the orderings that were published, tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["SVFReport", "SVFResult", "Scenario"]

_CLOSE = 1.25
_EQUAL = 0.99
_NUM_PUBLISHED = 200
_NOTE = (
    "Orderings are asked where memory is short. With the whole device a burst of long contexts is bound by prefill, "
    "which takes as long in any order: the mean then depends on the order, and the P95 is that of the longest outputs, "
    "which SVF serves last and FCFS at any time. Where chats come at random, queues are short: the P95 is again that "
    "of the longest outputs, and which of SVF and FCFS has the lower one may change from draw to draw. SVF bounds "
    "nobody's wait: see the longest one."
)


class Scenario(NamedTuple):
    """What is served, and in how much memory.

    Attributes:
        load: the requests' kind.
        arrivals: 'burst' or 'Poisson'.
        memory: 'short' or 'ample'.
    """

    load: str
    arrivals: str
    memory: str

    def __str__(self) -> str:
        return f"{self.load}, {self.arrivals}, {self.memory} memory"


@dataclass(frozen=True, slots=True)
class SVFResult:
    """How one policy served one draw of a scenario. Times are seconds of virtual time.

    Attributes:
        scenario: what was served.
        policy: who served it.
        draw: the number of the draw; results of the same number are paired.
        mean_latency_s: from arrival to last token.
        p95_latency_s: likewise.
        p99_latency_s: likewise.
        p95_ttft_s: from the last chunk of the prompt to the first token.
        share_waiting_long: share of requests that wait more than five times as long as they take on an idle device.
        max_wait_s: longest wait, beyond what the request takes on an idle device.
        requests_per_s: served until the last one ended.
        output_tokens_per_s: likewise.
        num_preemptions: how often a request lost its KV.
    """

    scenario: Scenario
    policy: str
    draw: int
    mean_latency_s: float
    p95_latency_s: float
    p99_latency_s: float
    p95_ttft_s: float
    share_waiting_long: float
    max_wait_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_preemptions: float


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "mean_latency_s": ("mean latency s", "{:.2f}".format),
    "p95_latency_s": ("P95 s", "{:.2f}".format),
    "p99_latency_s": ("P99 s", "{:.2f}".format),
    "p95_ttft_s": ("P95 TTFT s", "{:.2f}".format),
    "share_waiting_long": ("wait > 5× service", "{:.0%}".format),
    "max_wait_s": ("longest wait s", "{:.1f}".format),
    "requests_per_s": ("requests/s", "{:.2f}".format),
    "output_tokens_per_s": ("tokens/s", "{:.0f}".format),
    "num_preemptions": ("preemptions", "{:.0f}".format),
}


@dataclass(frozen=True, slots=True)
class SVFReport:
    """All results of a run of the laboratory.

    Attributes:
        results: one per scenario, policy and draw.
        accuracies: by load, how often the trained predictor told short from long on requests that it had not seen.
        num_requests: of each draw.
    """

    results: tuple[SVFResult, ...]
    accuracies: dict[str, float]
    num_requests: int

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        """In the order in which they were run."""
        return tuple(dict.fromkeys(result.scenario for result in self.results))

    def policies(self, scenario: Scenario) -> tuple[str, ...]:
        """Those that served it, in the order in which they were run."""
        return tuple(dict.fromkeys(result.policy for result in self.results if result.scenario == scenario))

    def values(self, scenario: Scenario, policy: str, metric: str) -> list[float]:
        """One value per draw, in their order.

        Raises:
            ConfigurationError: this was not run.
        """
        chosen = [result for result in self.results if (result.scenario, result.policy) == (scenario, policy)]
        if not chosen or metric not in _COLUMNS:
            raise ConfigurationError(f"there is no {metric!r} of {policy!r} in {scenario}")
        return [float(getattr(result, metric)) for result in sorted(chosen, key=lambda result: result.draw)]

    def median(self, scenario: Scenario, policy: str, metric: str) -> float:
        """The median over the draws."""
        return statistics.median(self.values(scenario, policy, metric))

    def ratio(self, scenario: Scenario, metric: str, policy: str, base: str) -> float:
        """The median over the draws of a metric of `policy` over that of `base` in the same draw."""
        pairs = zip(self.values(scenario, policy, metric), self.values(scenario, base, metric), strict=True)
        return statistics.median(value / other if other else 1.0 for value, other in pairs)

    @property
    def orderings(self) -> dict[str, bool]:
        """What the paper (arXiv 2606.22327) found, and whether it came out where memory is short. Medians of paired
        ratios are compared; within 1 % counts as equal."""
        return {name: holds for _, name, holds in self._judged()}

    def _judged(self) -> Iterator[tuple[Scenario, str, bool]]:
        for scenario in self.scenarios:
            if scenario.memory == "short" and "Oracle-SJF" in self.policies(scenario):
                for name, holds in self._orderings(scenario):
                    yield scenario, f"{scenario}: {name}", holds

    def _orderings(self, scenario: Scenario) -> list[tuple[str, bool]]:
        def least(metric: str, policy: str, others: Sequence[str]) -> bool:
            return all(self.ratio(scenario, metric, other, policy) >= _EQUAL for other in others)

        rivals = ("FCFS", "SJF", "Oracle-SJF")
        mean, p95 = "mean_latency_s", "p95_latency_s"
        return [
            ("Oracle-SVF has the lowest mean latency of FCFS, SJF, Oracle-SJF", least(mean, "Oracle-SVF", rivals)),
            ("Oracle-SVF has the lowest P95 latency of FCFS, SJF, Oracle-SJF", least(p95, "Oracle-SVF", rivals)),
            ("SVF has a lower mean latency than FCFS and SJF", least(mean, "SVF", rivals[:2])),
            ("SVF has a lower P95 latency than FCFS and SJF", least(p95, "SVF", rivals[:2])),
            ("1-bit SVF has a lower mean latency than SJF", least(mean, "1-bit SVF", ("SJF",))),
            (
                f"1-bit SVF's mean latency is within {_CLOSE - 1:.0%} of SVF's",
                self.ratio(scenario, mean, "1-bit SVF", "SVF") <= _CLOSE,
            ),
            (
                "SVF serves as many requests a second as SJF",
                self.ratio(scenario, "requests_per_s", "SVF", "SJF") >= _EQUAL,
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "num_requests": self.num_requests,
            "predictor_accuracies": self.accuracies,
            "orderings": self.orderings,
            "medians": [
                {
                    **scenario._asdict(),
                    "policy": policy,
                    **{metric: self.median(scenario, policy, metric) for metric in _COLUMNS},
                }
                for scenario in self.scenarios
                for policy in self.policies(scenario)
            ],
            "results": [{**asdict(result), "scenario": result.scenario._asdict()} for result in self.results],
        }

    def to_markdown(self) -> str:
        """A table per scenario, then the orderings."""
        num_draws = len({result.draw for result in self.results})
        lines = [
            f"Medians over {num_draws} draw{'s' * (num_draws > 1)} of {self.num_requests} requests, the same for all "
            "policies. Latency is from arrival to last token.",
            "",
        ]
        if self.num_requests != _NUM_PUBLISHED:
            lines += [f"**As published each has {_NUM_PUBLISHED} requests; fewer may never make memory short.**", ""]
        for load, accuracy in self.accuracies.items():
            lines.append(f"The predictor for {load} tells short from long in {accuracy:.0%} of unseen requests.")
        for scenario in self.scenarios:
            lines += ["", f"**{scenario}**", "", *self._table(scenario)]
        lines += ["", _NOTE, "", "| published ordering | came out |", "|---|---|"]
        lines += [f"| {name} | {self._verdict(scenario, holds)} |" for scenario, name, holds in self._judged()]
        return "\n".join(lines) + "\n"

    def _verdict(self, scenario: Scenario, holds: bool) -> str:
        """'equal' where memory was never short: there is nothing to tell the policies apart then."""
        if not holds:
            return "no"
        return "equal: memory was never short" if self._is_without_effect(scenario) else "yes"

    def _is_without_effect(self, scenario: Scenario) -> bool:
        """Whether all policies came to the same."""
        first, *others = self.policies(scenario)
        ratios = [
            self.ratio(scenario, metric, other, first)
            for metric in ("mean_latency_s", "p95_latency_s")
            for other in others
        ]
        return all(_EQUAL <= ratio <= 1 / _EQUAL for ratio in ratios)

    def _table(self, scenario: Scenario) -> list[str]:
        titles = [title for title, _ in _COLUMNS.values()]
        lines = [f"| policy | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
        for policy in self.policies(scenario):
            cells = [form(self.median(scenario, policy, metric)) for metric, (_, form) in _COLUMNS.items()]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        return lines
