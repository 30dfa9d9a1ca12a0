"""What must hold of a scheduler with streaming prompts between any two steps, and when everything has ended."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from prompt_scripts import Prompts

from stream2llm_sdk.serving.planner import Limits, Plan
from stream2llm_sdk.trail import EventTrail, EventType

__all__ = ["SchedulerChecks", "check_trail", "snapshot"]

_PREEMPTED = {EventType.PREEMPTED_RECOMPUTE, EventType.PREEMPTED_SWAP}
_NEXT_STATES = {
    EventType.QUEUED: {EventType.SCHEDULED},
    EventType.SCHEDULED: {EventType.KV_ON_GPU, EventType.QUEUED, *_PREEMPTED},
    EventType.KV_ON_GPU: {EventType.SCHEDULED, EventType.QUEUED, *_PREEMPTED},
    EventType.PREEMPTED_RECOMPUTE: {EventType.SCHEDULED, EventType.QUEUED},
    EventType.PREEMPTED_SWAP: {EventType.SCHEDULED, EventType.QUEUED},
}
_ENDS = {EventType.FINISHED, EventType.ABORTED}


class SchedulerChecks:
    """Checks one engine core against the prompts that were sent to it.

    Attributes:
        num_answered: requests whose whole output was checked.
        num_preemptions: KV taken away from streams of which the trail was checked.
        num_tokens_loaded: tokens that came back to them from host memory.
        num_plans: steps that were planned.
        num_in_run: requests that they served together, without asking each of them.
    """

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.driver = prompts.driver
        self.scheduler = self.driver.scheduler
        self.num_answered = 0
        self.num_preemptions = 0
        self.num_tokens_loaded = 0
        self.num_plans = 0
        self.num_in_run = 0
        self._num_free_blocks = self.driver.num_free_blocks()
        self._answered: set[str] = set()
        # A live view: the executor records whatever is sampled for a prompt that is open at that moment.
        self.driver.executor.held_requests = prompts.open
        self._watch_plans()

    def between_steps(self) -> None:
        """The invariants of every moment."""
        self.driver.check_invariants()
        self._check_places()
        self._check_worker()
        if self.scheduler.swap is not None:
            self.scheduler.swap.pool.check()
        for request_id in self.prompts.open:
            self._check_open(request_id)
        assert not self.driver.executor.sampled_while_held
        for request_id in self.driver.finish_reasons.keys() - self._answered:
            self._check_answer(request_id)

    def idle(self) -> None:
        """Nothing can be done before a message comes: complete requests have ended, open ones cost no steps."""
        assert not self.driver.has_work()
        assert set(self.scheduler.requests) == set(self.scheduler.parked) == set(self.prompts.open)

    def ended(self) -> None:
        """All requests have ended, with the right output, and nothing is left of any of them."""
        self.idle()
        scheduler = self.scheduler
        assert not self.prompts.open
        assert set(self.prompts.to_answer) == self._answered
        for name in ("requests", "prompts", "parked", "running", "waiting", "kv_holding_waiting", "deferred_waiting"):
            assert not getattr(scheduler, name), name
        for name in (
            "_resident",
            "_admission_order",
            "_scheduled_now",
            "_inflight_prefills",
            "deferred_frees",
            "_sequence",
            "_front",
        ):
            assert not getattr(scheduler, name), name
        assert (scheduler.num_open, scheduler.num_waiting_for_streaming_input, scheduler._num_hidden) == (0, 0, 0)
        assert not scheduler.finished_req_ids
        assert not scheduler.reset_preempted_req_ids
        assert self.driver.num_free_blocks() == self._num_free_blocks
        assert not self.driver.executor.runner.requests
        if scheduler.swap is not None:
            scheduler.swap.pool.end_step()
            assert scheduler.swap.pool.is_empty
        assert (len(scheduler.order), scheduler.shares.num_tenants) == (0, 0)
        assert (len(scheduler.outlook.streams), scheduler.invalidations.num_streams) == (0, 0)
        self._check_trails()

    def _watch_plans(self) -> None:
        """Compares what each step schedules with its plan."""
        scheduler, plans = self.scheduler, list[Plan]()
        make_plan, schedule = scheduler.planner.plan, scheduler.schedule

        def planning(candidates: Any, holders: Any, limits: Limits, plan: Plan) -> Plan:
            self._check_decoding_run(plan)
            keys = {request.request_id: (key, False) for key, request in scheduler.order}

            def seen(all_candidates: Any) -> Any:
                for candidate in all_candidates:
                    keys[candidate.request.request_id] = (candidate.key, candidate.is_idle)
                    yield candidate

            make_plan(seen(candidates), lambda: seen(holders()), limits, plan)
            assert sum(plan.num_tokens.values()) <= limits.num_tokens
            for victim in plan.victims:
                key, is_idle = keys[victim.request_id]
                first = min(keys[request_id][0] for request_id in plan.num_tokens)
                assert is_idle or key > first or limits.shares or plan.is_forced, (
                    "KV is taken for requests that come later"
                )
            plans.append(plan)
            return plan

        def scheduling(*args: Any) -> Any:
            plans.clear()
            output = schedule(*args)
            for plan in plans:
                self.num_plans += 1
                self._check_plan(plan, output)
            return output

        scheduler.planner.plan, scheduler.schedule = planning, scheduling

    def _check_decoding_run(self, plan: Plan) -> None:
        """What is served without being asked is what the plan would have found."""
        scheduler = self.scheduler
        run = list(scheduler.decoding_run)
        self.num_in_run += len(run)
        assert plan.num_tokens == {request.request_id: 1 for request in run}
        entries = list(itertools.islice(scheduler.order, len(run)))
        assert [request for _, request in entries] == run
        candidates = [scheduler._candidate(key, request) for key, request in entries]
        assert all(candidate.takes_one and not candidate.num_held_back for candidate in candidates)
        hit = scheduler.kv.no_hit
        num_needed = (scheduler.kv.num_needed(request, request.num_computed_tokens, 1, hit) for request in run)
        assert plan.num_blocks == sum(num_needed) <= scheduler.kv.num_free

    def _check_plan(self, plan: Plan, output: Any) -> None:
        victims = {request.request_id for request in plan.victims}
        assert victims.isdisjoint(plan.num_tokens), "a plan takes the KV of what it serves"
        scheduled = output.num_scheduled_tokens
        if self.scheduler.kv_cache_manager.enable_caching:
            # What a request finds in the prefix cache changes while others before it are admitted.
            assert set(scheduled) <= set(plan.num_tokens)
        else:
            assert scheduled == plan.num_tokens
            assert output.preempted_req_ids >= victims

    def _check_places(self) -> None:
        """Each request is in exactly one place, and the counts agree."""
        scheduler = self.scheduler
        waiting, holding = list(scheduler.waiting), list(scheduler.kv_holding_waiting)
        places = [*scheduler.running, *waiting, *holding, *scheduler.parked.values()]
        assert sorted(request.request_id for request in places) == sorted(scheduler.requests)
        assert all(request.num_computed_tokens for request in holding)
        assert not any(request.num_computed_tokens for request in waiting)
        assert scheduler.deferred_waiting <= {*waiting, *holding}
        assert scheduler.num_waiting_for_streaming_input == len(scheduler.parked)
        assert scheduler.num_open == len(self.prompts.open)
        entries = list(scheduler.order)
        assert {request.request_id for _, request in entries} == set(scheduler.requests) - set(scheduler.parked)
        assert entries == sorted(entries, key=lambda entry: entry[0])
        assert len({key for key, _ in entries}) == len(entries)
        # What is expected of a request may change, and its place stays until the next step begins.
        policy = scheduler.scheduling_policy
        known = [
            (key, request)
            for key, request in entries
            if not policy.uses_forecasts or (policy.name == "SRPF" and not scheduler._is_open(request))
        ]
        assert [key for key, _ in known] == [scheduler.sort_key(request) for _, request in known]
        assert set(scheduler.parked) <= set(self.prompts.open)
        for name in ("prompts", "_resident", "_admission_order", "_scheduled_now", "_sequence", "_front"):
            assert set(getattr(scheduler, name)) <= set(scheduler.requests), name
        holders = {request.request_id for request in (*scheduler.running, *holding)}
        assert holders <= set(scheduler._admission_order)
        if not self.driver.core.batch_queue and not scheduler.finished_req_ids:
            idle = not (scheduler.running or waiting or holding)
            assert self.driver.has_work() is not idle or scheduler.pause_state

    def _check_worker(self) -> None:
        """The V2 runner has a fixed number of places; the scheduler knows exactly who takes one."""
        if self.scheduler.use_v2_model_runner:
            leaving = self.scheduler.finished_req_ids | self.scheduler.reset_preempted_req_ids
            assert set(self.driver.executor.runner.requests) - leaving == self.scheduler._resident

    def _check_open(self, request_id: str) -> None:
        request = self.scheduler.requests[request_id]
        assert not self.driver.outputs.get(request_id), f"{request_id}: output while its prompt is open"
        assert request_id not in self.driver.finish_reasons
        assert request.num_computed_tokens <= max(0, request.num_tokens - 1)
        now = self.prompts.now[request_id]
        assert list(request.all_token_ids) == request.prompt_token_ids == now
        assert self.scheduler.prompts[request_id].token_ids.tolist() == now

    def _check_answer(self, request_id: str) -> None:
        assert request_id not in self.prompts.aborted, f"{request_id}: output after its abort"
        prompt = self.prompts.now[request_id]
        room = self.driver.core.vllm_config.model_config.max_model_len - len(prompt)
        expected = self.driver.expected_output(prompt, min(self.prompts.max_tokens[request_id], room))
        assert self.driver.outputs[request_id] == expected, request_id
        self._answered.add(request_id)
        self.num_answered += 1

    def _check_trails(self) -> None:
        trails = self.driver.call("trail", [list(self.prompts.now)])
        assert not len(self.scheduler.trail)
        for request_id, records in trails.items():
            end = EventType.ABORTED if request_id in self.prompts.aborted else EventType.FINISHED
            counters = check_trail(request_id, records, end)
            assert counters["num_tokens_computed"] == self.driver.executor.tokens_computed[request_id]
            self.num_preemptions += counters["num_preemptions"]
            self.num_tokens_loaded += counters["num_tokens_loaded"]


def check_trail(request_id: str, records: Sequence[Any], end: EventType) -> dict[str, int]:
    """Checks the trail of an ended request; returns the counters that its end carries."""
    trail = EventTrail.from_records(request_id, records)
    states = [event.type for event in trail if event.type.is_state]
    assert (states[0], states[-1]) == (EventType.QUEUED, end), trail
    assert trail[0].type is EventType.QUEUED, trail
    assert trail[-1].type is end, trail
    recorded = [EventType(record[0]) for record in records if EventType(record[0]).is_state]
    for state, following in itertools.pairwise(recorded):
        assert following in _NEXT_STATES[state] | _ENDS, trail
    times = [event.monotonic_s for event in trail]
    assert times == sorted(times)
    lasted_s = sum(interval.duration_s for interval in trail.intervals())
    assert abs(lasted_s - (times[-1] - times[0])) < 1e-6
    counters = dict(trail[-1].data)
    assert trail.count(EventType.CHUNK_ARRIVED) == trail.count(EventType.PROMPT_UPDATED) == counters["num_updates"]
    assert sum(map(trail.count, _PREEMPTED)) == counters["num_preemptions"] >= trail.count(EventType.RESUMED)
    loaded = sum(event.data["num_loaded"] for event in trail if event.type is EventType.RESUMED)
    assert loaded <= counters["num_tokens_loaded"]
    voided = sum(event.data["num_invalidated"] for event in trail if event.type is EventType.PROMPT_UPDATED)
    assert voided == counters["num_tokens_invalidated"]
    if end is EventType.FINISHED:
        assert trail.count(EventType.CONTEXT_COMPLETE) == trail.count(EventType.FIRST_TOKEN) == 1, trail
        first_token = trail.first(EventType.FIRST_TOKEN)
        complete = trail.first(EventType.CONTEXT_COMPLETE)
        assert first_token is not None
        assert complete is not None
        assert complete.monotonic_s <= first_token.monotonic_s
    return counters


def snapshot(prompts: Prompts) -> Any:
    """All that a refused operation must leave as it was."""
    scheduler = prompts.driver.scheduler
    requests = {
        request_id: (
            request.status,
            request.num_computed_tokens,
            tuple(request.all_token_ids),
            len(request.block_hashes),
        )
        for request_id, request in scheduler.requests.items()
    }
    queues = [
        [request.request_id for request in queue]
        for queue in (scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting, scheduler.parked.values())
    ]
    trails = prompts.driver.call("trail", [list(scheduler.requests)])
    progress = prompts.driver.call("progress", [list(scheduler.requests)])
    return requests, queues, trails, progress, scheduler.num_open, prompts.driver.num_free_blocks()
