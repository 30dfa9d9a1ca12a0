"""What streams promise each other and plain requests, one behaviour each, on vLLM's real engine core."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from prompt_scripts import FLAGS, SCHEDULER, Prompts, tokens
from scheduler_checks import SchedulerChecks
from vllm.v1.core.sched.interface import PauseState

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.planner import Plan
from stream2llm_sdk.serving.scheduler import AsyncStream2LLMScheduler, Stream2LLMScheduler
from stream2llm_sdk.testing.core_driver import CoreDriver
from stream2llm_sdk.trail import EventTrail, EventType

BLOCK_SIZE = 8
MAX_MODEL_LEN = 96
ONE_REQUEST = 1 + MAX_MODEL_LEN // BLOCK_SIZE  # the smallest pool that vLLM accepts; one block is the null block

SETTINGS: dict[str, Any] = {
    "scheduler_cls": SCHEDULER,
    "num_gpu_blocks": 40,
    "block_size": BLOCK_SIZE,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "prefix_caching": False,
    "scheduler_reserve_full_isl": False,
}

Core = Callable[..., AbstractContextManager["Requests"]]


def record_steps(driver: CoreDriver) -> list[dict[str, int]]:
    """A list that grows by each step's tokens by request."""
    steps: list[dict[str, int]] = []
    schedule = driver.scheduler.schedule

    def recording(*args: Any) -> Any:
        output = schedule(*args)
        steps.append(dict(output.num_scheduled_tokens))
        return output

    driver.scheduler.schedule = recording
    return steps


class Requests(Prompts):
    """Requests to one core, each step of it checked."""

    def __init__(self, driver: CoreDriver) -> None:
        super().__init__(driver)
        self.checks = SchedulerChecks(self)
        self.scheduler = driver.scheduler
        self.scheduled = record_steps(driver)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.driver.step()
            self.checks.between_steps()

    def run_until_idle(self) -> int:
        return self.driver.run_until_idle(1_000, after_step=self.checks.between_steps)

    def computed(self, request_id: str) -> int:
        """Tokens of the request that hold KV."""
        return int(self.scheduler.requests[request_id].num_computed_tokens)

    def has_ended(self, request_id: str) -> bool:
        return request_id in self.driver.finish_reasons

    def trail(self, request_id: str) -> EventTrail:
        return EventTrail.from_records(request_id, self.driver.call("trail", [[request_id]])[request_id])

    def was_preempted(self, request_id: str) -> bool:
        return self.trail(request_id).first(EventType.PREEMPTED_RECOMPUTE) is not None

    def end(self) -> None:
        for request_id in list(self.open):
            self.finish(request_id)
        self.run_until_idle()
        self.checks.ended()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def core(model: Path) -> Core:
    """Makes a core; when its block is left, whatever was sent is brought to its end and checked."""

    @contextmanager
    def make(*, policy: str = "FCFS", **arguments: Any) -> Iterator[Requests]:
        additional_config = {"stream2llm": {"policy": policy}}
        with CoreDriver(model, **{**SETTINGS, "additional_config": additional_config, **arguments}) as driver:
            requests = Requests(driver)
            yield requests
            requests.end()

    return make


@pytest.fixture
def text() -> Callable[[int], list[int]]:
    rng = random.Random(0)
    return lambda count: tokens(rng, count)


# ---- order --------------------------------------------------------------------------------------------------------


def test_open_streams_never_delay_a_complete_request(core: Core, text: Any) -> None:
    with core() as requests:
        for index in range(3):
            requests.open_stream(f"open-{index}", text(20))
        requests.step(2)
        requests.add_plain("plain", text(90), max_tokens=4)
        num_steps = 0
        while not requests.has_ended("plain"):
            for request_id in requests.open:
                requests.replace(request_id, text(60))  # more than a step's tokens of new work, in every step
            requests.step()
            num_steps += 1
        assert num_steps == 3 + 3, "as if it were alone: 90 tokens at 32 a step, then a token a step"


def test_complete_requests_get_their_first_token_in_order_of_arrival(core: Core, text: Any) -> None:
    with core(num_gpu_blocks=ONE_REQUEST, max_num_batched_tokens=16) as requests:
        requests.open_stream("open", text(60))
        requests.step(2)
        for index in range(4):
            requests.add_plain(f"plain-{index}", text(50), max_tokens=2)
        requests.run_until_idle()
        assert list(requests.driver.outputs) == [f"plain-{index}" for index in range(4)]


def test_few_open_streams_are_computed_in_short_steps_under_srpf(core: Core, text: Any) -> None:
    """Whoever becomes complete meanwhile waits for the end of the step."""
    with core(policy="SRPF", max_num_batched_tokens=64, num_gpu_blocks=120) as requests:
        requests.open_stream("alone", text(65))
        requests.step(2)
        assert requests.scheduled[-2:] == [{"alone": 16}, {"alone": 16}], "a quarter of the step"
        for index in range(31):
            requests.open_stream(f"open-{index}", text(65))
        requests.step()
        assert sum(requests.scheduled[-1].values()) == 64, "many of them have the whole step"


@pytest.mark.parametrize("num_left", [1, 50])
def test_under_srpf_nothing_of_open_streams_is_computed_where_a_prompt_ends(
    core: Core, text: Any, num_left: int
) -> None:
    """Its first token would wait for it."""
    with core(policy="SRPF", max_num_batched_tokens=64, num_gpu_blocks=120) as requests:
        requests.open_stream("complete", text(20))
        requests.run_until_idle()
        requests.open_stream("open", text(65))
        requests.append("complete", text(num_left - 1), final=True)
        requests.step(2)
        assert requests.scheduled[-2:] == [{"complete": num_left}, {"open": 32, "complete": 1}], (
            "then what it missed too"
        )


def test_under_srpf_open_streams_get_on_however_often_prompts_end(core: Core, text: Any) -> None:
    with core(policy="SRPF", max_num_batched_tokens=64, num_gpu_blocks=120) as requests:
        requests.open_stream("open", text(90))
        for index in range(6):
            requests.add_plain(f"plain-{index}", text(10), max_tokens=1)
            requests.step()
        assert [step.get("open", 0) for step in requests.scheduled[-6:]] == [0, 0, 48, 0, 0, 41]


@pytest.mark.parametrize("policy", ["FCFS", "DEFAULT_VLLM"])
def test_updates_cost_a_waiting_stream_no_place(core: Core, text: Any, policy: str) -> None:
    with core(policy=policy, max_num_batched_tokens=16, max_num_seqs=1) as requests:
        requests.add_plain("first", text(40), max_tokens=2)
        requests.step()
        requests.open_stream("open", text(40), max_tokens=2)
        requests.add_plain("last", text(40), max_tokens=2)
        requests.replace("open", text(50))
        requests.append("open", text(5), final=True)
        requests.run_until_idle()
        assert list(requests.driver.outputs) == ["first", "open", "last"]


def test_open_streams_are_served_in_order_of_arrival(core: Core, text: Any) -> None:
    with core(max_num_batched_tokens=16) as requests:
        for index in range(3):
            requests.open_stream(f"open-{index}", text(33))
        requests.run_until_idle()
        first_step = {
            name: next(i for i, step in enumerate(requests.scheduled) if name in step) for name in requests.open
        }
        assert list(first_step.values()) == [0, 2, 4]


def test_default_order_serves_what_runs_before_what_waits(core: Core, text: Any) -> None:
    with core(policy="DEFAULT_VLLM", max_num_batched_tokens=16) as requests:
        requests.open_stream("open", text(49))
        requests.step()
        requests.add_plain("plain", text(20), max_tokens=1)
        requests.step(2)
        assert requests.computed("open") == 48
        assert requests.computed("plain") == 0


@pytest.mark.parametrize("policy", ["FCFS", "DEFAULT_VLLM"])
def test_vllms_priorities_come_first_among_open_and_among_complete_requests(core: Core, text: Any, policy: str) -> None:
    with core(policy=policy, scheduling_policy="priority", max_num_batched_tokens=16, max_num_seqs=2) as requests:
        priorities = {"open-low": 5, "open-high": 1, "plain-low": 4, "plain-high": 2}
        for request_id, priority in priorities.items():
            extra_args = {"stream2llm": FLAGS} if "open" in request_id else None
            requests.now[request_id], requests.max_tokens[request_id] = text(33), 1
            requests.driver.add(
                request_id, requests.now[request_id], max_tokens=1, priority=priority, extra_args=extra_args
            )
            requests.open += [request_id] * ("open" in request_id)
        requests.run_until_idle()
        first = list(dict.fromkeys(request_id for step in requests.scheduled for request_id in step))
        expected = {
            "FCFS": ["plain-high", "plain-low", "open-high", "open-low"],
            "DEFAULT_VLLM": ["open-high", "plain-high", "plain-low", "open-low"],
        }
        assert first == expected[policy]


def test_long_prefills_are_cut_so_that_others_get_tokens_too(core: Core, text: Any) -> None:
    with core(long_prefill_token_threshold=10) as requests:
        requests.open_stream("open", text(41))
        requests.step()
        assert requests.scheduled[-1] == {"open": 32}, "alone, it may use all"
        requests.replace("open", text(41))
        requests.add_plain("plain", text(41), max_tokens=1)
        requests.step()
        assert requests.scheduled[-1] == {"plain": 10, "open": 10}


# ---- memory -------------------------------------------------------------------------------------------------------


def test_idle_streams_lose_their_blocks_before_streams_that_compute(core: Core, text: Any) -> None:
    with core(num_gpu_blocks=1 + 16, max_num_batched_tokens=32) as requests:
        requests.open_stream("idle", text(41))
        requests.run_until_idle()
        requests.open_stream("busy", text(80))
        requests.step()
        requests.add_plain("plain", text(48), max_tokens=1)
        requests.step(2)
        assert requests.was_preempted("idle"), "though it came first"
        assert not requests.was_preempted("busy")
        assert requests.has_ended("plain")


def test_without_idle_streams_the_last_in_order_loses_its_blocks(core: Core, text: Any) -> None:
    with core(num_gpu_blocks=1 + 14, max_num_batched_tokens=40) as requests:
        for index in range(2):
            requests.open_stream(f"open-{index}", text(40))
            requests.run_until_idle()
        for request_id in requests.open:
            requests.append(request_id, text(30))
        requests.add_plain("plain", text(64), max_tokens=1)
        requests.step(2)
        assert requests.has_ended("plain")
        assert [requests.was_preempted(f"open-{index}") for index in range(2)] == [False, True]


def test_the_first_in_order_can_take_everything(core: Core, text: Any) -> None:
    with core(num_gpu_blocks=ONE_REQUEST) as requests:
        for index in range(3):
            requests.open_stream(f"open-{index}", text(30))
            requests.run_until_idle()
        assert requests.driver.num_free_blocks() == 0
        requests.add_plain("plain", text(94), max_tokens=2)
        requests.step(4)
        assert requests.has_ended("plain"), "94 tokens at 32 a step, then one more"


@pytest.mark.parametrize("policy", ["FCFS", "DEFAULT_VLLM"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_requests_of_full_length_share_a_pool_that_holds_one(
    core: Core, text: Any, async_scheduling: bool, policy: str
) -> None:
    with core(policy=policy, async_scheduling=async_scheduling, num_gpu_blocks=ONE_REQUEST) as requests:
        for index in range(3):
            requests.open_stream(f"open-{index}", text(40), max_tokens=5)
            requests.add_plain(f"plain-{index}", text(90), max_tokens=6)
            requests.step(2)
        for request_id in requests.open:
            requests.append(request_id, text(50))
        requests.run_until_idle()
        assert set(requests.driver.finish_reasons) == {f"plain-{index}" for index in range(3)}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("num_tokens", [41, 7])
def test_finished_streams_that_hold_all_memory_or_all_places_are_answered(
    core: Core, text: Any, num_tokens: int, runner: str
) -> None:
    """No stream is open any more, nothing runs, and the first has no room for its next token."""
    with core(runner=runner, num_gpu_blocks=1 + 15, max_num_seqs=3) as requests:
        for index in range(3):
            requests.open_stream(f"open-{index}", text(num_tokens))
        requests.run_until_idle()
        for request_id in list(requests.open):
            requests.finish(request_id)
        requests.run_until_idle()
        assert len(requests.driver.finish_reasons) == 3


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_streams_without_blocks_take_no_place(core: Core, text: Any, runner: str) -> None:
    with core(runner=runner, max_num_seqs=2) as requests:
        for index in range(5):
            requests.open_stream(f"open-{index}", text(1))
        requests.run_until_idle()
        for index in range(2):
            requests.add_plain(f"plain-{index}", text(10), max_tokens=2)
        requests.step()
        assert requests.scheduled[-1] == {"plain-0": 10, "plain-1": 10}


@pytest.mark.parametrize(("runner", "keep"), [("v1", [True, True]), ("v2", [False, True])])
def test_an_idle_stream_gives_up_its_place_only_where_the_worker_has_one_for_it(
    core: Core, text: Any, runner: str, keep: list[bool]
) -> None:
    with core(runner=runner, max_num_seqs=2) as requests:
        for index in range(2):
            requests.open_stream(f"open-{index}", text(20))
        requests.run_until_idle()
        requests.add_plain("plain", text(10), max_tokens=1)
        requests.step()
        assert requests.has_ended("plain")
        assert sorted(requests.computed(request_id) == 19 for request_id in requests.open) == keep


def test_requests_that_resume_together_keep_the_order_in_which_they_were_admitted(core: Core, text: Any) -> None:
    """It decides who is evicted first, so it must not depend on the order of a set."""
    with core(max_num_batched_tokens=64) as requests:
        for index in range(8):
            requests.add_plain(f"plain-{index}", text(5), max_tokens=3)
        requests.step()
        requests.scheduler.reset_prefix_cache(reset_running_requests=True)
        requests.step()
        order = requests.scheduler._admission_order
        assert sorted(order, key=order.__getitem__) == [f"plain-{index}" for index in range(8)]


@pytest.mark.parametrize("policy", ["FCFS", "DEFAULT_VLLM", "MCPS", "SVF", "ADAPTIVE"])
def test_who_waits_for_a_place_and_who_waits_for_its_memory_both_end(core: Core, text: Any, policy: str) -> None:
    """A finished stream holds KV and waits for the only place; the request that has it needs that KV to get on."""
    with core(policy=policy, max_num_seqs=1, num_gpu_blocks=ONE_REQUEST) as requests:
        requests.open_stream("stream", text(50))
        requests.run_until_idle()
        requests.add_plain("running", text(30), max_tokens=40)
        requests.step(3)
        requests.finish("stream")
        requests.run_until_idle()
        requests.checks.ended()


# ---- the held token and updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_computed"), [(33, 0), (32, 7)])
def test_an_open_prompt_that_the_prefix_cache_holds_computes_no_more_than_it_must(
    core: Core, text: Any, num_tokens: int, num_computed: int
) -> None:
    """vLLM never takes the last token of a prompt from the cache, so of 32 tokens it finds three blocks of 8."""
    with core(prefix_caching=True) as requests:
        prompt = text(num_tokens)
        requests.add_plain("before", [*prompt, 5, 6], max_tokens=1)
        requests.run_until_idle()
        requests.open_stream("open", prompt, max_tokens=3)
        requests.run_until_idle()
        assert requests.driver.executor.tokens_computed["open"] == num_computed
        assert list(requests.scheduler.parked) == ["open"]
        requests.finish("open")
        requests.run_until_idle()
        assert requests.driver.executor.tokens_computed["open"] == num_computed + 1 + 2


def test_an_append_to_a_stream_in_flight_recomputes_nothing(core: Core, text: Any) -> None:
    with core(async_scheduling=True) as requests:
        requests.open_stream("open", text(50), max_tokens=1)
        requests.step()
        assert requests.scheduler.requests["open"].num_in_flight_tokens == 32
        requests.append("open", text(20))
        requests.step()
        assert requests.scheduler.requests["open"].num_in_flight_tokens > 0
        requests.append("open", text(10), final=True)
        requests.run_until_idle()
        assert requests.driver.executor.tokens_computed["open"] == 80


def test_a_replacement_voids_the_steps_in_flight(core: Core, text: Any) -> None:
    with core(async_scheduling=True) as requests:
        requests.open_stream("open", text(30), max_tokens=4)
        requests.step()
        answer = requests.replace("open", requests.now["open"][:12] + text(5), final=True)
        assert answer == {"num_tokens": 17, "lcp": 12, "num_invalidated": 29 - 12}
        requests.run_until_idle()
        assert len(requests.driver.outputs["open"]) == 4


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_prompt_may_become_empty_and_begin_anew(core: Core, text: Any, runner: str) -> None:
    with core(runner=runner) as requests:
        requests.open_stream("open", text(30))
        requests.run_until_idle()
        requests.replace("open", [])
        requests.run_until_idle()
        assert requests.driver.num_free_blocks() == 39, "an empty prompt holds no blocks"
        assert requests.driver.call("update", ["open", "append", [], True, 0.0]) == {"error": "empty"}
        requests.append("open", text(20), final=True)
        requests.run_until_idle()
        assert requests.has_ended("open")


# ---- beside vLLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["DEFAULT_VLLM", "FCFS"])
def test_without_open_streams_every_step_is_vllms_own(model: Path, text: Any, policy: str) -> None:
    prompts = [text(30 + 5 * index) for index in range(8)]
    changes = {"num_gpu_blocks": 20, "additional_config": {"stream2llm": {"policy": policy}}}

    def steps(scheduler_cls: str | None) -> list[dict[str, int]]:
        with CoreDriver(model, **{**SETTINGS, **changes, "scheduler_cls": scheduler_cls}) as driver:
            recorded = record_steps(driver)
            if scheduler_cls is not None:
                driver.scheduler.planner = None
            for index, prompt in enumerate(prompts):
                driver.add(f"plain-{index}", prompt, max_tokens=20)
                driver.step()
            driver.run_until_idle()
            return recorded

    assert steps(SCHEDULER) == steps(None)


def test_a_plan_that_does_not_come_true_is_not_made_again_at_once(core: Core, text: Any) -> None:
    class Planner:
        """Serves without giving anything."""

        def plan(self, candidates: Any, holders: Any, limits: Any, plan: Plan) -> None:
            plan.num_tokens["open"] = 0
            plan.trimmed.add("open")

    with core() as requests:
        requests.open_stream("open", text(20))
        planner = requests.scheduler.planner
        requests.scheduler.planner = Planner()
        requests.driver.step()
        assert requests.scheduled[-1] == {}
        requests.driver.step()
        assert requests.scheduled[-1] == {"open": 19}, "a step of vLLM's own; even there the last token is held back"
        requests.scheduler.planner = planner


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_paused_engines_come_to_rest_with_streams_open(
    core: Core, text: Any, state: PauseState, async_scheduling: bool
) -> None:
    with core(async_scheduling=async_scheduling) as requests:
        for name in ("parked", "other"):
            requests.open_stream(name, text(40), max_tokens=3)
            requests.run_until_idle()
        requests.open_stream("busy", text(90))
        requests.step()
        requests.scheduler.set_pause_state(state)
        requests.run_until_idle()
        requests.append("parked", text(20), final=True)
        requests.open_stream("new", text(20))
        requests.add_plain("plain", text(20))
        requests.run_until_idle()
        assert not requests.driver.has_work()
        assert requests.has_ended("parked") is (state is PauseState.PAUSED_NEW), "what holds KV goes on"
        assert requests.computed("new") == requests.computed("plain") == 0, "what is new waits"
        requests.scheduler.set_pause_state(PauseState.UNPAUSED)
        requests.run_until_idle()
        assert {"parked", "plain"} == set(requests.driver.finish_reasons)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_prefix_cache_can_be_reset_with_streams_open(
    core: Core, text: Any, runner: str, async_scheduling: bool
) -> None:
    with core(prefix_caching=True, runner=runner, async_scheduling=async_scheduling) as requests:
        requests.open_stream("idle", text(40))
        requests.open_stream("changed", text(40))
        requests.run_until_idle()
        requests.append("changed", text(20))
        requests.open_stream("busy", text(90))
        requests.add_plain("plain", text(50), max_tokens=8)
        requests.step(3)
        requests.append("idle", text(9))
        assert not requests.scheduler.reset_prefix_cache(), "blocks are in use"
        assert requests.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert requests.driver.num_free_blocks() == 39
        requests.checks.between_steps()
        for request_id in list(requests.open):
            requests.finish(request_id)
        requests.run_until_idle()
        assert len(requests.driver.finish_reasons) == 4


def test_a_pause_that_clears_the_caches_lets_streams_go_on_afterwards(core: Core, text: Any) -> None:
    with core(prefix_caching=True) as requests:
        requests.open_stream("open", text(40))
        requests.run_until_idle()
        requests.driver.core.pause_scheduler(mode="keep", clear_cache=True)
        requests.append("open", text(10), final=True)
        requests.driver.core.resume_scheduler()
        requests.run_until_idle()
        assert requests.driver.executor.tokens_computed["open"] == 39 + 50 + 7, "all of it was computed again"


def test_a_pause_that_aborts_leaves_nothing_of_any_stream(core: Core, text: Any) -> None:
    with core(async_scheduling=True) as requests:
        for name in ("idle", "waiting", "busy"):
            requests.open_stream(name, text(40))
            requests.run_until_idle()
        requests.append("waiting", text(20))
        requests.append("busy", text(50))
        requests.step()
        requests.driver.core.pause_scheduler(mode="abort", clear_cache=False)
        requests.aborted.update(requests.now)
        requests.open.clear()
        requests.driver.core.resume_scheduler()
        requests.run_until_idle()
        requests.checks.ended()


# ---- the channel and the configuration ----------------------------------------------------------------------------


def test_progress_tells_of_live_requests_of_the_sdk(core: Core, text: Any) -> None:
    with core() as requests:
        requests.open_stream("open", text(60))
        requests.add_plain("plain", text(10), max_tokens=4)
        requests.step()
        requests.replace("open", requests.now["open"][:16] + text(4))
        progress = requests.driver.call("progress", [["open", "plain", "nobody"]])
        assert set(progress) == {"open"}
        assert progress["open"] == {
            "num_tokens": 20,
            "num_computed": 16,
            "num_tokens_computed": 22,
            "num_tokens_recomputed": 0,
            "num_tokens_invalidated": 6,
            "num_tokens_cached": 0,
            "num_tokens_loaded": 0,
            "num_preemptions": 0,
            "num_updates": 1,
        }


def test_limits_are_those_of_the_pool(core: Core) -> None:
    with core(num_gpu_blocks=ONE_REQUEST, policy="DEFAULT_VLLM") as requests:
        assert requests.driver.call("limits", []) == {
            "max_model_len": 96,
            "max_prompt_tokens": 95,
            "num_blocks": 12,
            "block_size": 8,
            "policy": "DEFAULT_VLLM",
        }


@pytest.mark.parametrize(("async_scheduling", "kind"), [(False, Stream2LLMScheduler), (True, AsyncStream2LLMScheduler)])
def test_the_class_follows_async_scheduling(core: Core, async_scheduling: bool, kind: type) -> None:
    with core(async_scheduling=async_scheduling) as requests:
        assert type(requests.scheduler) is kind


def test_the_policy_comes_from_the_configuration_then_from_the_environment(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def policy(**arguments: Any) -> str:
        with core(**arguments) as requests:
            return str(requests.scheduler.scheduling_policy.name)

    monkeypatch.delenv("SCHEDULER_TYPE", raising=False)
    assert policy(additional_config={}) == "DEFAULT_VLLM"
    monkeypatch.setenv("SCHEDULER_TYPE", "fcfs")
    assert policy(additional_config={}) == "FCFS"
    assert policy(policy="default_vllm") == "DEFAULT_VLLM"
    monkeypatch.setenv("SCHEDULER_TYPE", "fastest")
    with pytest.raises(ConfigurationError, match=r"'fastest'.*SCHEDULER_TYPE.*DEFAULT_VLLM, FCFS"):
        policy(additional_config={})
