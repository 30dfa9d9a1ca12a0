"""What a simulated load came to: one record per request, and percentiles over them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = ["RequestResult", "SimulationResult"]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """How one request fared. Times are seconds of virtual time; tokens and times of output are as the client sees them.

    Attributes:
        arrival_s: when the user asked.
        context_complete_s: when the last chunk of the prompt was sent.
        first_token_s: when the client had the first output token.
        finished_s: when it had the last one.
        tenant: as given.
        tag: as given.
        num_prompt_tokens: the final prompt's length.
        num_output_tokens: tokens generated.
        num_tokens_computed: tokens run through the model for it.
        num_tokens_recomputed: those of them that had been computed before for the same prompt prefix.
        num_tokens_invalidated: computed tokens that prompt updates made void.
        num_tokens_cached: tokens found in the prefix cache when it was admitted.
        num_recompute_preemptions: how often its KV was dropped.
        num_swap_preemptions: how often its KV was moved to host memory.
    """

    arrival_s: float
    context_complete_s: float
    first_token_s: float
    finished_s: float
    tenant: str
    tag: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_tokens_computed: int
    num_tokens_recomputed: int
    num_tokens_invalidated: int
    num_tokens_cached: int
    num_recompute_preemptions: int
    num_swap_preemptions: int

    @property
    def ttft_from_context_complete_s(self) -> float:
        """From the last chunk to the first token: the published definition, without the retrieval."""
        return self.first_token_s - self.context_complete_s

    @property
    def ttft_from_request_s(self) -> float:
        """From the question to the first token: what a person waits."""
        return self.first_token_s - self.arrival_s

    @property
    def num_preemptions(self) -> int:
        """How often its KV was taken away, in either way."""
        return self.num_recompute_preemptions + self.num_swap_preemptions


_METRICS = (
    *(field.name for field in fields(RequestResult) if field.name not in ("tenant", "tag")),
    "ttft_from_context_complete_s",
    "ttft_from_request_s",
    "num_preemptions",
)


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of one simulated load.

    Attributes:
        requests: one result per request, in the order in which they were given.
        num_steps: steps that ran the model.
        virtual_s: seconds of virtual time until the last request ended.
        busy_s: those of them that steps took.
        peak_kv_usage: largest share of the KV blocks in use after a step.
        wall_s: seconds that the simulation itself took; not part of comparisons.
    """

    requests: tuple[RequestResult, ...] = field(repr=False)
    num_steps: int
    virtual_s: float
    busy_s: float
    peak_kv_usage: float
    wall_s: float = field(compare=False)

    @property
    def tenants(self) -> tuple[str, ...]:
        """The names of all tenants, sorted."""
        return tuple(sorted({request.tenant for request in self.requests}))

    def values(self, metric: str, *, tenant: str | None = None) -> npt.NDArray[np.float64]:
        """One value per request, of one tenant or of all.

        Args:
            metric: the name of an attribute of `RequestResult`, other than tenant and tag.
            tenant: None for all.

        Raises:
            ConfigurationError: there is no such metric, or no request of this tenant.
        """
        if metric not in _METRICS:
            raise ConfigurationError(f"a request has no metric {metric!r}: choose one of {', '.join(_METRICS)}")
        chosen = [request for request in self.requests if tenant is None or request.tenant == tenant]
        if not chosen:
            raise ConfigurationError(
                f"no request of tenant {tenant!r}; tenants are {', '.join(self.tenants) or 'none'}"
            )
        return np.array([getattr(request, metric) for request in chosen], dtype=np.float64)

    def percentile(self, metric: str, percent: float, *, tenant: str | None = None) -> float:
        """The `percent`-th percentile (0 to 100) of a metric over the requests; see `values`."""
        return float(np.percentile(self.values(metric, tenant=tenant), percent))

    def total(self, metric: str, *, tenant: str | None = None) -> float:
        """The sum of a metric over the requests; see `values`."""
        return float(self.values(metric, tenant=tenant).sum())

    def summary(self, *, tenant: str | None = None) -> dict[str, Any]:
        """The figures that runs are compared by: both TTFTs at P50, P95 and P99 in seconds, preemptions, tokens."""
        figures = {
            f"{metric.removesuffix('_s')}_p{percent}_s": self.percentile(metric, percent, tenant=tenant)
            for metric in ("ttft_from_context_complete_s", "ttft_from_request_s")
            for percent in (50, 95, 99)
        }
        totals = (
            "num_recompute_preemptions",
            "num_swap_preemptions",
            "num_tokens_computed",
            "num_tokens_recomputed",
            "num_tokens_invalidated",
        )
        return figures | {metric: int(self.total(metric, tenant=tenant)) for metric in totals}

    def plot(self) -> Plot:
        """Both TTFTs as the share of requests that took longer; `stream2llm_sdk.traces.comparison` shows several runs.

        Raises:
            ConfigurationError: there is no request.
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.traces.comparison import Comparison

        return Comparison({"": self}).plot()

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.run_view import load_html

        return load_html(self)
