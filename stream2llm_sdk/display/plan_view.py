"""A scheduler's plan as tables: who gets tokens, who loses KV, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, bar, block, facts, fold, note, seconds, table
from stream2llm_sdk.display.svg import Svg
from stream2llm_sdk.display.theme import INK, OCHRE, PHASES, Fill
from stream2llm_sdk.serving.simulator.plan_log import Outcome
from stream2llm_sdk.traces.report.phases import Phase

if TYPE_CHECKING:
    from stream2llm_sdk.serving.planner import Plan
    from stream2llm_sdk.serving.simulator.plan_log import PlannedRequest, PlannedStep

__all__ = ["plan_html", "step_html"]

_FILLS = {
    Outcome.SERVED: PHASES[Phase.RUNNING],
    Outcome.ADMITTED: PHASES[Phase.RUNNING],
    Outcome.WAITS: Fill(OCHRE),
    Outcome.IDLE: PHASES[Phase.AWAITING_CHUNK],
    Outcome.VICTIM: PHASES[Phase.DROPPED],
}
_NAMES = {
    Outcome.SERVED: "held by who gets tokens",
    Outcome.WAITS: "by who gets nothing now",
    Outcome.IDLE: "by idle streams",
    Outcome.VICTIM: "taken from victims",
}
_MOST_ROWS = 16
_WIDTH, _STRIP = 770.0, 18.0


def plan_html(plan: Plan) -> str:
    """The plan alone: what it says of each request."""
    admitted = {request.request_id for request in plan.admitted}
    rows: list[tuple[object, ...]] = []
    for request_id, num_tokens in plan.num_tokens.items():
        marks = [word for word, is_so in _words(request_id, admitted, plan.trimmed) if is_so]
        rows.append((request_id, num_tokens, ", ".join(marks)))
    rows += [(request.request_id, None, "victim: loses its KV") for request in plan.victims]
    rows += [(request.request_id, None, "found in the prefix cache whole") for request in plan.nothing_to_compute]
    named: list[tuple[object, object]] = [
        ("tokens", sum(plan.num_tokens.values())),
        ("requests served", len(plan.num_tokens)),
        ("victims", len(plan.victims)),
        ("blocks short", plan.num_blocks_short),
    ]
    shown = _folded(("request", "tokens", ""), rows) if rows else note("nobody gets tokens")
    forced = note("forced: nobody could be served by the rules") if plan.is_forced else ""
    return str(block(facts(named), forced, shown, title="Plan of one step"))


def _words(request_id: str, admitted: set[str], trimmed: set[str]) -> Iterator[tuple[str, bool]]:
    yield "admitted", request_id in admitted
    yield "less than it wants", request_id in trimmed


def step_html(step: PlannedStep) -> str:
    """A plan with what the scheduler saw: memory as a strip, and a row for each request."""
    named: list[tuple[object, object]] = [
        ("policy", step.policy),
        ("at", seconds(step.at_s)),
        ("tokens of the step", f"{step.num_tokens:,} of {step.token_budget:,}"),
        ("free KV blocks", f"{step.num_free_blocks:,} of {step.num_blocks:,}"),
        ("blocks short", step.num_blocks_short),
        ("victims", len(step.victims)),
    ]
    most = max((request.num_blocks for request in step.requests), default=0) or 1
    # Those of which something is decided first: idle streams are many.
    told = [request for request in step.requests if request.outcome is not Outcome.IDLE]
    rest = [request for request in step.requests if request.outcome is Outcome.IDLE]
    headings = ("place", "request", "arrived", "computed", "KV blocks", "gets, of wanted", "what, and why")
    rows = [_row(request, most) for request in (*told, *rest)]
    forced = note("forced: nobody could be served by the rules") if step.is_forced else ""
    parts = (facts(named), forced, _memory(step), _folded(headings, rows, right=(0, 5)))
    return str(block(*parts, title=f"Plan of one step, {step.policy}"))


def _row(request: PlannedRequest, most: int) -> tuple[object, ...]:
    fill = _FILLS[request.outcome]
    why = f"{request.outcome.value}: {request.reason}" if request.reason else request.outcome.value
    name = Markup("<b>{}</b>").format(request.request_id) if request.outcome is Outcome.VICTIM else request.request_id
    blocks = Markup("{}{}").format(
        f"{request.num_blocks:,}", bar(request.num_blocks / most, fill.colour, opacity=fill.opacity)
    )
    kind = "open" if request.is_open else "complete"
    computed = f"{request.num_computed:,} of {request.num_prompt_tokens:,}, {kind}"
    return (
        request.place,
        name,
        seconds(request.arrival_s),
        Markup("<div style='white-space:nowrap'>{}</div>").format(computed),
        blocks if request.num_blocks else None,
        f"{request.num_granted:,} of {request.num_wanted:,}" if request.num_wanted else None,
        Markup("<div style='min-width:18em'>{}</div>").format(why),
    )


def _folded(headings: Sequence[str], rows: Sequence[tuple[object, ...]], *, right: Sequence[int] = ()) -> Markup:
    """A table of the first rows, and one of the others that opens on a click."""
    shown = table(headings, rows[:_MOST_ROWS], right=right)
    if len(rows) <= _MOST_ROWS:
        return shown
    return shown + fold(f"{len(rows) - _MOST_ROWS:,} more requests", table(headings, rows[_MOST_ROWS:], right=right))


def _memory(step: PlannedStep) -> Markup:
    """All KV blocks as one strip, by who holds them."""
    held: Counter[Outcome] = Counter()
    for request in step.requests:
        is_served = request.outcome in (Outcome.SERVED, Outcome.ADMITTED)
        held[Outcome.SERVED if is_served else request.outcome] += request.num_blocks
    # Blocks that several requests share are in each one's table.
    whole = max(step.num_blocks, sum(held.values()) + step.num_free_blocks)
    svg = Svg(_WIDTH, _STRIP + 24, f"KV memory: {step.num_free_blocks:,} of {step.num_blocks:,} blocks are free")
    x = 0.0
    legend_x = 0.0
    for outcome, name in _NAMES.items():
        if not held[outcome]:
            continue
        width = _WIDTH * held[outcome] / whole
        label = f"{name}: {held[outcome]:,}"
        svg.rect(x, 0, width, _STRIP, _FILLS[outcome], tip=label)
        svg.rect(legend_x, _STRIP + 9, 10, 10, _FILLS[outcome])
        svg.text(legend_x + 15, _STRIP + 18, label, size=11)
        x += width
        legend_x += 28 + 6.2 * len(label)
    svg.frame(0.5, 0.5, _WIDTH - 1, _STRIP - 1, Fill(INK, 0.3))
    svg.text(legend_x, _STRIP + 18, f"free: {step.num_free_blocks:,}", size=11, opacity=0.72)
    return svg.markup()
