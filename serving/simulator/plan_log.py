"""The plans of a simulated load, with what the scheduler knew when it made them: who gets tokens, who loses KV, why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, overload

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.decoding_run import DecodingRun
from stream2llm_sdk.serving.planner import Candidate, Limits, Plan
from stream2llm_sdk.serving.simulator.plan_reasons import PlanReasons

__all__ = ["Outcome", "PlanLog", "PlannedRequest", "PlannedStep"]


class Outcome(StrEnum):
    """What a plan means for a request. The value is what a reader is told."""

    ADMITTED = "gets tokens, admitted"
    SERVED = "gets tokens"
    VICTIM = "loses its KV"
    WAITS = "gets nothing"
    IDLE = "waits for its next chunk"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request in one step, as it was when the step was planned.

    Attributes:
        request_id: its name in the scheduler.
        place: in the order in which it was considered, from 1; None if the planner did not get to it.
        is_open: whether more prompt may come.
        arrival_s: when it came, in seconds of virtual time.
        num_prompt_tokens: its prompt and output so far.
        num_computed: those of them that have KV.
        num_blocks: KV blocks that it holds.
        num_wanted: tokens that it could use in this step.
        num_granted: tokens that it gets.
        outcome: what the plan means for it.
        reason: why, in a few words.
    """

    request_id: str
    place: int | None
    is_open: bool
    arrival_s: float
    num_prompt_tokens: int
    num_computed: int
    num_blocks: int
    num_wanted: int
    num_granted: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and all requests that the scheduler had, those that were considered first, in their order.

    Attributes:
        at_s: when it was planned, in seconds of virtual time.
        policy: name of the scheduling policy.
        token_budget: the most tokens of a step.
        num_free_blocks: KV blocks that were free.
        num_blocks: KV blocks in all.
        num_blocks_short: blocks that the plan takes beyond those that were free.
        is_forced: whether nobody could have been served by the rules.
        requests: one for each request.
    """

    at_s: float
    policy: str
    token_budget: int
    num_free_blocks: int
    num_blocks: int
    num_blocks_short: int
    is_forced: bool
    requests: tuple[PlannedRequest, ...] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(request.num_granted for request in self.requests)

    @property
    def victims(self) -> tuple[PlannedRequest, ...]:
        """Those that lose their KV."""
        return tuple(request for request in self.requests if request.outcome is Outcome.VICTIM)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.plan_view import step_html

        return step_html(self)


class PlanLog(Sequence[PlannedStep]):
    """Keeps plans while a load is simulated: give it to `simulate` as `plans`, then read it as a sequence.

    Args:
        keep: which plans are kept; left out, all are. `lambda plan: plan.victims` keeps those that take KV away.
        most: so many are kept, the first ones.

    Raises:
        ConfigurationError: `most` is not at least 1.
    """

    def __init__(self, keep: Callable[[Plan], object] | None = None, *, most: int = 10_000) -> None:
        if most < 1:
            raise ConfigurationError(f"most must be at least 1, got {most}")
        self._keep = keep
        self._most = most
        self._steps: list[PlannedStep] = []

    def attach(self, scheduler: Any) -> None:
        """Takes down what this scheduler plans from now on.

        Raises:
            ConfigurationError: it is one that does not plan.
        """
        if not hasattr(scheduler, "planner"):
            raise ConfigurationError(
                f"{type(scheduler).__name__} makes no plans to keep: use this project's scheduler (a policy, "
                "and system='stream2llm'), or leave `plans` out"
            )
        scheduler.planner = _LoggedPlanner(scheduler, self)
        scheduler.decoding_run = DecodingRun({}, 0, 0)  # each request is to be considered

    def add(self, plan: Plan, describe: Callable[[], PlannedStep]) -> None:
        """Keeps what `describe` makes of a plan, if this plan is to be kept."""
        if len(self._steps) < self._most and (self._keep is None or self._keep(plan)):
            self._steps.append(describe())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} steps>"

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> PlannedStep: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedStep]: ...

    def __getitem__(self, index: int | slice) -> PlannedStep | Sequence[PlannedStep]:
        return self._steps[index]


class _LoggedPlanner:
    """A scheduler's planner, which tells of its plans."""

    def __init__(self, scheduler: Any, log: PlanLog) -> None:
        self._scheduler = scheduler
        self._planner = scheduler.planner
        self._log = log

    def plan(
        self,
        candidates: Iterable[Candidate],
        holders: Callable[[], Iterable[Candidate]],
        limits: Limits,
        plan: Plan | None = None,
    ) -> Plan:
        plan = Plan() if plan is None else plan
        grants = _Grants(plan)
        plan.num_tokens = grants  # the same object is asked about grants while candidates are drawn
        considered: list[Candidate] = []

        def noted() -> Iterator[Candidate]:
            for candidate in candidates:
                considered.append(candidate)
                yield candidate

        made: Plan = self._planner.plan(noted(), holders, limits, plan)
        self._log.add(made, lambda: self._step(made, considered, limits, grants.taken_for))
        return made

    def _step(
        self, plan: Plan, considered: Sequence[Candidate], limits: Limits, taken_for: dict[str, str]
    ) -> PlannedStep:
        """Nothing has changed yet: all that is read here is what the planner saw."""
        scheduler = self._scheduler
        reasons = PlanReasons(plan, limits, considered, taken_for)
        # A step that is forced considers some of them again.
        first_seen = {candidate.request.request_id: candidate for candidate in reversed(considered)}
        order = dict.fromkeys(candidate.request.request_id for candidate in considered)
        places = {request_id: place for place, request_id in enumerate(order, 1)}
        for request_id in scheduler.requests:
            order.setdefault(request_id)
        requests = tuple(
            self._request(plan, reasons, scheduler.requests[request_id], first_seen.get(request_id), places)
            for request_id in order
            if request_id in scheduler.requests
        )
        return PlannedStep(
            at_s=scheduler.now_s(),
            policy=scheduler.scheduling_policy.name,
            token_budget=limits.num_tokens,
            num_free_blocks=scheduler.kv.num_free,
            num_blocks=scheduler.kv.num_total,
            num_blocks_short=plan.num_blocks_short,
            is_forced=plan.is_forced,
            requests=requests,
        )

    def _request(
        self, plan: Plan, reasons: PlanReasons, request: Any, candidate: Candidate | None, places: dict[str, int]
    ) -> PlannedRequest:
        request_id = request.request_id
        prompt = self._scheduler.prompts.get(request_id)
        is_open = prompt is not None and prompt.is_open
        is_idle = request_id in self._scheduler.parked
        num_granted = plan.num_tokens.get(request_id, 0)
        if num_granted:
            outcome = Outcome.ADMITTED if request in plan.admitted else Outcome.SERVED
            reason = reasons.of_served(candidate, num_granted)
        elif request in plan.victims:
            outcome, reason = Outcome.VICTIM, reasons.of_victim(request_id, is_idle, places)
        elif is_idle or (candidate is not None and not candidate.num_wanted):
            outcome, reason = Outcome.IDLE, ""
        else:
            outcome, reason = Outcome.WAITS, reasons.of_waiting(request, candidate)
        return PlannedRequest(
            request_id=request_id,
            place=places.get(request_id),
            is_open=is_open,
            arrival_s=request.arrival_time,
            num_prompt_tokens=request.num_tokens,
            num_computed=request.num_computed_tokens,
            num_blocks=self._scheduler.kv.num_held(request_id),
            num_wanted=0 if candidate is None else candidate.num_wanted,
            num_granted=num_granted,
            outcome=outcome,
            reason=reason,
        )


class _Grants(dict[str, int]):
    """Tokens by request id, as the planner grants them; notes for whom the victims chosen since the last grant go: a
    plan names them just before it serves whom they make room for."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.num_tokens)
        self._victims = plan.victims
        self.taken_for: dict[str, str] = {}

    def __setitem__(self, request_id: str, num_tokens: int) -> None:
        for victim in self._victims[len(self.taken_for) :]:
            self.taken_for[victim.request_id] = request_id
        super().__setitem__(request_id, num_tokens)
