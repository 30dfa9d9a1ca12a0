"""The least TTFT that any schedule could give: each request's last prefill alone on an idle machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stream2llm_sdk.serving.simulator.clock import LatencyModel, StepFacts
from stream2llm_sdk.serving.simulator.workloads import SimulatedRequest, TokenSpan

__all__ = ["last_prefill_s"]


def last_prefill_s(request: SimulatedRequest, latency: LatencyModel, token_budget: int) -> float:
    """Seconds from the last chunk to the first token on an idle machine that has computed all that came before.

    Prefill is cut into steps of `token_budget` tokens. What the last chunk has in common with the prompt before it is
    not computed again.
    """
    *earlier, last = request.chunks
    total = request.num_prompt_tokens
    if last.kind == "append":
        start = total - last.num_tokens
    else:
        before = next((chunk.spans for chunk in reversed(earlier)), ())
        start = _common(before, last.spans)
    start = min(start, total - 1)
    seconds = 0.0
    while start < total:
        stop = min(total, start + token_budget)
        seconds += latency(StepFacts(0, ((start, stop),), int(stop == total)))
        start = stop
    return seconds


def _common(before: Iterable[TokenSpan], after: Sequence[TokenSpan]) -> int:
    """The length of the longest common prefix: texts have token ids of their own."""
    length = 0
    for (first_before, length_before), (first_after, length_after) in zip(before, after, strict=False):
        if first_before != first_after:
            break
        length += min(length_before, length_after)
        if length_before != length_after:
            break
    return length
