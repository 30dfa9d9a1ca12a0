"""What users of vLLM and SGLang reported of their schedulers, as tests of ours; and the guard against thrashing.

Each docstring says in one line what was sent there and what went wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from prompt_scripts import FLAGS, tokens
from scheduler_checks import snapshot
from test_planner import Blocks, candidate, idle, names, plan
from test_scheduler import MAX_MODEL_LEN, ONE_REQUEST, SETTINGS, Requests
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from stream2llm_sdk.errors import EngineBusyError
from stream2llm_sdk.serving.admission import StreamLimits
from stream2llm_sdk.serving.policies import POLICIES, SRPF
from stream2llm_sdk.serving.simulator.host_memory import CheckedSwap
from stream2llm_sdk.serving.simulator.latency import StepLatency
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest
from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt
from stream2llm_sdk.serving.swap import swap_config
from stream2llm_sdk.testing import FakeEngine
from stream2llm_sdk.testing.core_driver import CoreDriver

EOS = 1
MODES = ["recompute", "swap"]
LONG_POLICIES = ["FCFS", "SRPF", "SVF", "ADAPTIVE"]


class Crowd(Requests):
    """Requests of which every loss of KV is noted.

    Attributes:
        num_preemptions: by request id.
        num_guarded: those of requests that had not got past where they lost their KV before.
        num_in_flight: those of requests with output still in flight.
        ignore_eos: whether answers go on to their full length.
    """

    def __init__(self, driver: CoreDriver) -> None:
        super().__init__(driver)
        self.num_preemptions: Counter[str] = Counter()
        self.num_guarded = self.num_in_flight = 0
        self.ignore_eos = True
        preempt = self.scheduler._preempt_request

        def noting(request: Any, *args: Any, **options: Any) -> None:
            prompt = self.scheduler.prompts.get(request.request_id)
            self.num_preemptions[request.request_id] += 1
            self.num_guarded += prompt is not None and prompt.is_guarded(request.num_computed_tokens)
            self.num_in_flight += request.num_output_placeholders > 0
            preempt(request, *args, **options)

        self.scheduler._preempt_request = noting

    def _add(self, request_id: str, ids: Sequence[int], max_tokens: int, extra_args: dict[str, Any] | None) -> None:
        self.now[request_id], self.max_tokens[request_id] = list(ids), max_tokens
        self.driver.add(request_id, ids, max_tokens=max_tokens, extra_args=extra_args, ignore_eos=self.ignore_eos)

    def add_complete(self, request_id: str, ids: list[int], *, max_tokens: int = 8) -> None:
        """A request of the SDK whose prompt is whole from the start."""
        self._add(request_id, ids, max_tokens, {"stream2llm": {}})

    def counters(self, request_id: str) -> dict[str, int]:
        """What the trail of an ended request ends with."""
        return dict(self.trail(request_id)[-1].data)

    def at_rest(self) -> None:
        """Steps until only messages can change anything; a loop runs into the limit."""
        self.driver.run_until_idle(3_000, after_step=self.checks.between_steps)


Core = Callable[..., AbstractContextManager[Crowd]]
Stock = Callable[..., AbstractContextManager[CoreDriver]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def core(model: Path) -> Core:
    """Makes a core; when its block is left, whatever was sent is brought to its end and checked."""

    @contextmanager
    def make(
        *, policy: str = "FCFS", mode: str = "recompute", look_ahead: bool = True, **arguments: Any
    ) -> Iterator[Crowd]:
        options: dict[str, Any] = {"policy": policy, "preemption_mode": mode, "look_ahead": look_ahead}
        if mode == "swap":
            arguments["kv_transfer_config"] = swap_config(num_host_blocks=400)
        settings = {**SETTINGS, "additional_config": {"stream2llm": options}, **arguments}
        with CoreDriver(model, **settings) as driver:
            driver.executor.kv_transfer = CheckedSwap()
            crowd = Crowd(driver)
            yield crowd
            for request_id in list(crowd.open):
                crowd.finish(request_id)
            crowd.at_rest()
            crowd.checks.ended()

    return make


@pytest.fixture
def stock(model: Path) -> Stock:
    """vLLM's own scheduler with its own defaults, in the same pool."""

    @contextmanager
    def make(**arguments: Any) -> Iterator[CoreDriver]:
        settings = {**SETTINGS, "scheduler_cls": None, "scheduler_reserve_full_isl": True, **arguments}
        with CoreDriver(model, **settings) as driver:
            yield driver

    return make


@pytest.fixture
def text() -> Callable[[int], list[int]]:
    rng = random.Random(0)
    return lambda count: tokens(rng, count)


def send_session(driver: CoreDriver, request_id: str, ids: list[int]) -> None:
    """A turn of one of vLLM's own streaming-input sessions, answered with one token."""
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(ids),  # vLLM extends the list that it is given
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
    )
    driver.core.add_request(*driver.core.preprocess_add_request(request))


def try_update(requests: Requests, request_id: str, ids: list[int]) -> Any:
    packed = np.array(ids, dtype=np.int32).tobytes()
    return requests.driver.call("update", [request_id, "append", packed, False, requests.scheduler.now_s()])


# ---- sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_stream_whose_first_token_ends_it_harms_nobody(core: Core, text: Any, runner: str) -> None:
    """vLLM #52693: a turn whose first token was a stop token left the session RUNNING in the queue; the core died."""
    with core(async_scheduling=True, runner=runner) as requests:
        driver = requests.driver
        driver.executor.sampling_rule = replace(driver.executor.sampling_rule, eos_period=4)
        prompt = next(ids for ids in iter(lambda: text(41), None) if driver.expected_output(ids, 8) == [EOS])
        requests.ignore_eos = False
        requests.add_plain("other", text(30), max_tokens=8)
        requests.open_stream("silent", prompt[:20])
        requests.step()
        requests.append("silent", prompt[20:40])
        requests.step()
        requests.append("silent", prompt[40:], final=True)
        requests.at_rest()
        assert driver.outputs["silent"] == [EOS]
        assert set(driver.finish_reasons) == {"other", "silent"}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_two_updates_with_steps_in_flight_leave_no_placeholders_in_the_prompt(
    core: Core, text: Any, runner: str
) -> None:
    """vLLM #42490: two updates of a live session, steps in flight and its prefix shared, fed token id -1 to the GPU."""
    with core(async_scheduling=True, runner=runner, prefix_caching=True) as requests:
        shared = text(32)
        for index in range(2):
            requests.add_plain(f"running-{index}", shared + text(9), max_tokens=12)
        requests.step(2)
        requests.open_stream("late", shared + text(3), max_tokens=8)
        requests.step(2)
        requests.append("late", text(11))
        requests.step()
        assert requests.driver.core.batch_queue, "a step is in flight"
        requests.append("late", text(7))
        requests.step()
        requests.replace("late", shared + text(5), final=True)
        requests.at_rest()
        assert requests.counters("late")["num_tokens_cached"] >= 32


def test_streams_that_wait_with_half_their_blocks_do_not_block_each_other(core: Core, stock: Stock, text: Any) -> None:
    """vLLM #49439: two sessions with a new turn each held half of the memory and waited for each other for ever."""
    prompts = [text(40), text(40)]
    with stock(num_gpu_blocks=ONE_REQUEST) as driver:
        for _ in range(2):
            for index in range(2):
                send_session(driver, f"session-{index}", prompts[index])
            for _ in range(10):
                driver.step()
        with pytest.raises(TimeoutError, match=r"session-0.*session-1"):
            driver.run_until_idle(50)
    with core(num_gpu_blocks=ONE_REQUEST) as requests:
        for index in range(2):
            requests.open_stream(f"stream-{index}", prompts[index])
        requests.at_rest()
        for request_id in list(requests.open):
            requests.append(request_id, text(40))
        requests.at_rest()
        for request_id in list(requests.open):
            requests.finish(request_id)
        requests.at_rest()
        assert set(requests.driver.finish_reasons) == {"stream-0", "stream-1"}


OURS = {"scheduler_cls": SETTINGS["scheduler_cls"]}


def policy_options(policy: str) -> dict[str, Any]:
    return {"additional_config": {"stream2llm": {"policy": policy}}}


@pytest.mark.parametrize("policy", ["FCFS", "SRPF"])
def test_an_idle_session_takes_one_place_of_the_runner(stock: Stock, text: Any, policy: str) -> None:
    """It is vLLM that counts it among those that wait for input, and the worker that keeps its state: one place."""
    with stock(**OURS, **policy_options(policy), runner="v2", max_num_seqs=2) as driver:
        send_session(driver, "session", text(20))
        driver.step(4)
        driver.add("stream", text(9), extra_args={"stream2llm": {"is_streaming_prompt": True}})
        driver.add("plain", text(20), max_tokens=4)
        driver.step(10)
        assert "plain" in driver.finish_reasons


@pytest.mark.parametrize("policy", ["FCFS", "LCAS", "SVF"])
def test_what_fits_beside_an_idle_session_is_served_before_what_does_not(stock: Stock, text: Any, policy: str) -> None:
    """Nobody can tell when a session will give its memory back; what waits for it must not hold up all the others."""
    with stock(**OURS, **policy_options(policy), num_gpu_blocks=ONE_REQUEST) as driver:
        send_session(driver, "session", text(20))
        driver.step(4)
        driver.add("stream", text(5), extra_args={"stream2llm": {"is_streaming_prompt": True}})
        driver.add("large", text(80), max_tokens=2)
        for index in range(3):
            driver.add(f"small-{index}", text(22), max_tokens=40)
        driver.step(200)
        assert driver.finish_reasons.keys() - {"session"} == {"small-0", "small-1", "small-2"}
        driver.abort("session")
        driver.step(20)
        assert "large" in driver.finish_reasons


@pytest.mark.parametrize("policy", ["FCFS", "SRPF"])
def test_a_session_that_runs_is_nobodys_victim(stock: Stock, text: Any, policy: str) -> None:
    """vLLM lost a session that was preempted while the last token of its turn was in flight."""
    with stock(**OURS, **policy_options(policy), num_gpu_blocks=ONE_REQUEST, async_scheduling=True) as driver:
        preempted: list[str] = []
        preempt = driver.scheduler._preempt_request
        driver.scheduler._preempt_request = lambda request, *args, **options: (
            preempted.append(request.request_id),
            preempt(request, *args, **options),
        )
        driver.add("plain", text(30), max_tokens=40)
        driver.add("stream", text(9), extra_args={"stream2llm": {"is_streaming_prompt": True}})
        for _ in range(4):
            send_session(driver, "session", text(10))
        driver.step(150)
        assert "session" not in preempted
        driver.abort("session")
        driver.step(50)
        assert "plain" in driver.finish_reasons


def test_a_session_counts_with_all_that_it_may_come_to(core: Core, text: Any) -> None:
    """Its prompt grows by turns that the look-ahead's shortcut does not see."""
    with core() as requests:
        requests.add_plain("plain", text(20), max_tokens=8)
        send_session(requests.driver, "session", text(20))
        assert requests.scheduler.outlook.most_tokens == 28 + MAX_MODEL_LEN
        requests.driver.abort("session")
        assert requests.scheduler.outlook.most_tokens == 28


def test_a_chunk_that_makes_a_prompt_too_long_leaves_the_stream_and_its_blocks_alone(core: Core, text: Any) -> None:
    """SGLang #22273: a turn past the model's length was aborted, and the session's slot lost count of its KV."""
    with core(prefix_caching=True) as requests:
        free = requests.driver.num_free_blocks()
        for name in ("kept", "left"):
            requests.open_stream(name, text(60))
        requests.at_rest()
        before = snapshot(requests)
        for name in ("kept", "left"):
            assert "error" in try_update(requests, name, text(60))
        assert snapshot(requests) == before
        requests.abort("left")
        requests.append("kept", text(30), final=True)
        requests.at_rest()
        assert requests.driver.num_free_blocks() == free
        assert requests.has_ended("kept")


@pytest.mark.parametrize("mode", MODES)
def test_open_streams_pin_no_memory_however_many_there_are_and_however_they_grow(
    core: Core, text: Any, mode: str
) -> None:
    """SGLang #27024: open sessions pinned more KV than there was, or one grew to all of it, and nothing ran again."""
    with core(num_gpu_blocks=ONE_REQUEST, mode=mode) as requests:
        for index in range(8):
            requests.open_stream(f"open-{index}", text(30))
        requests.at_rest()
        for _ in range(6):
            requests.append("open-0", text(10))
            requests.at_rest()
        assert requests.computed("open-0") == 89
        requests.add_complete("complete", text(90), max_tokens=4)
        requests.step(3)
        assert requests.driver.outputs["complete"], "as if there were no streams: 90 tokens at 32 a step"
        for request_id in list(requests.open):
            requests.append(request_id, text(2), final=True)
        requests.at_rest()
        assert len(requests.driver.finish_reasons) == 9


async def test_what_open_streams_may_hold_can_be_bounded_at_the_door() -> None:
    """SGLang #27024: sessions were opened without any bound, and each could grow without one."""
    limits = StreamLimits(max_open_streams=2, max_open_tokens=30)
    async with FakeEngine("Yes.", stream_limits=limits) as engine:
        first, second = await engine.open([1] * 10), await engine.open([2] * 10)
        with pytest.raises(EngineBusyError, match="max_open_streams=2"):
            await engine.open([3])
        with pytest.raises(EngineBusyError, match="max_open_tokens=30"):
            await second.append([2] * 11)
        await first.abort()
        await second.append([2] * 11)
        await second.abort()


# ---- preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_output_in_flight_of_a_victim_is_counted_once(core: Core, text: Any, runner: str) -> None:
    """vLLM #48245: a victim's output still in flight was counted off again, below zero, which killed the core."""
    with core(look_ahead=False, async_scheduling=True, runner=runner, num_gpu_blocks=25) as requests:
        requests.open_stream("open", text(9))
        for index in range(8):
            requests.add_complete(f"request-{index}", text(40), max_tokens=30)
        requests.at_rest()
        assert requests.num_in_flight >= 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_victim_gives_its_whole_answer(core: Core, text: Any, mode: str, async_scheduling: bool) -> None:
    """vLLM #16832: the answers of requests that had been preempted in the middle of their output were incomplete."""
    with core(look_ahead=False, async_scheduling=async_scheduling, mode=mode, num_gpu_blocks=25) as requests:
        requests.open_stream("open", text(9))
        for index in range(6):
            requests.add_complete(f"request-{index}", text(30), max_tokens=40)
        requests.at_rest()
        assert requests.num_preemptions.keys() & requests.driver.finish_reasons.keys()
        assert {len(requests.driver.outputs[request_id]) for request_id in requests.driver.finish_reasons} == {40}


@pytest.mark.parametrize("mode", MODES)
def test_victims_that_find_their_blocks_in_the_prefix_cache_answer_as_if_alone(
    core: Core, text: Any, mode: str
) -> None:
    """vLLM #18055: with prefix caching, answers were worse where memory was short enough for recomputation."""
    with core(look_ahead=False, prefix_caching=True, mode=mode, num_gpu_blocks=25) as requests:
        shared = text(20)
        requests.open_stream("open", shared + text(9))
        for index in range(8):
            requests.add_complete(f"request-{index}", shared + text(20), max_tokens=30)
        requests.at_rest()
        assert requests.num_preemptions.total() >= 4
        assert len(requests.driver.finish_reasons) == 8, "every answer was compared with that of a correct engine"


@pytest.mark.parametrize("policy", LONG_POLICIES)
def test_victims_whose_copies_fit_together_but_not_their_prompts_do_not_block_each_other(
    core: Core, text: Any, policy: str
) -> None:
    """vLLM #45388: two prompts got memory for what the host held of them; the rest of neither fitted beside."""
    with core(policy=policy, mode="swap", num_gpu_blocks=ONE_REQUEST) as requests:
        for name in ("first", "second"):
            requests.open_stream(name, text(45))
        requests.at_rest()
        requests.add_complete("between", text(90), max_tokens=4)
        requests.at_rest()
        assert requests.num_preemptions.keys() >= {"first", "second"}
        for name in ("first", "second"):
            requests.append(name, text(45), final=True)
        requests.at_rest()
        assert requests.driver.finish_reasons.keys() == {"first", "second", "between"}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_victim_that_is_let_in_at_once_reads_what_is_still_on_its_way_to_the_host(
    core: Core, text: Any, runner: str
) -> None:
    """vLLM #46014: a victim was let in again before the end of its copy was reported; its load killed the core."""
    with core(mode="swap", async_scheduling=True, runner=runner) as requests:
        driver, scheduler = requests.driver, requests.scheduler
        swap = driver.executor.kv_transfer
        swap.clock = driver.executor.clock
        swap.seconds_per_block.update({"out": 0.5, "in": 0.25})
        requests.add_complete("victim", text(60), max_tokens=12)
        for _ in range(3):
            requests.step(3)
            request = scheduler.requests["victim"]
            assert request.num_in_flight_tokens, "a step is in flight"
            scheduler._preempt_victim(request)
        requests.at_rest()
        assert requests.num_preemptions["victim"] == 3
        assert scheduler.connector.statistics.num_swapped_in == 3
        assert len(driver.outputs["victim"]) == 12


def test_what_a_victim_finds_of_its_own_is_no_hit_of_the_prefix_cache(core: Core, text: Any) -> None:
    """vLLM #25780: random prompts showed a hit rate of 30 %: what victims found again of their own KV was counted."""
    with core(look_ahead=False, prefix_caching=True, num_gpu_blocks=25) as requests:
        requests.open_stream("open", text(9))
        for index in range(8):
            requests.add_complete(f"request-{index}", text(60), max_tokens=30)
        requests.at_rest()
        assert requests.num_preemptions.total() >= 4
        cached = [requests.counters(f"request-{index}")["num_tokens_cached"] for index in range(8)]
        assert cached == [0] * 8


def test_a_victim_comes_back_before_those_that_never_ran(core: Core, stock: Stock, text: Any) -> None:
    """vLLM #41951: with priorities, a victim was overtaken by one that had never run but had an earlier arrival."""
    prompts = {"victim": text(60), "new": text(60)}
    options = {"scheduling_policy": "priority", "max_num_seqs": 1}

    def order(driver: CoreDriver) -> list[str]:
        driver.add("victim", prompts["victim"], max_tokens=4, arrival_time=2.0)
        driver.step()
        driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        driver.add("new", prompts["new"], max_tokens=4, arrival_time=1.0)
        driver.run_until_idle()
        return list(driver.finish_reasons)

    with stock(**options) as driver:
        assert order(driver) == ["new", "victim"]
    with core(policy="DEFAULT_VLLM", **options) as requests:
        requests.open_stream("open", text(9))
        requests.at_rest()
        requests.now.update(prompts)
        requests.max_tokens.update(dict.fromkeys(prompts, 4))
        assert order(requests.driver) == ["victim", "new"]


LACKING = {"running": 40, "heavy": 90, "light": 10}


def test_vllm_holds_up_what_would_fit_behind_a_prompt_that_lacks_memory(stock: Stock, text: Any) -> None:
    """vLLM #31731: a long prompt that lacked KV stood at the head, and short ones that would have fit waited too."""
    with stock(num_gpu_blocks=ONE_REQUEST) as driver:
        driver.add("running", text(LACKING["running"]), max_tokens=9)
        driver.step(2)
        for name in ("heavy", "light"):
            driver.add(name, text(LACKING[name]), max_tokens=1)
        driver.step(5)
        assert (list(driver.outputs), driver.num_free_blocks()) == (["running"], 6)


def beside_a_stream_or_alone(policies: list[str]) -> list[tuple[str, str]]:
    """Without an open stream DEFAULT_VLLM is vLLM's own step, with what is reported of it."""
    return [
        (policy, beside)
        for policy in policies
        for beside in ("beside a stream", "alone")
        if (policy, beside) != ("DEFAULT_VLLM", "alone")
    ]


@pytest.mark.parametrize(("policy", "beside"), beside_a_stream_or_alone(["FCFS", "DEFAULT_VLLM", "SRPF", "SVF"]))
def test_memory_is_used_though_the_first_that_waits_lacks_some(core: Core, text: Any, policy: str, beside: str) -> None:
    """vLLM #31731: the same. Here the short one is served, or the long one, if it is first, gets on meanwhile."""
    with core(policy=policy, num_gpu_blocks=ONE_REQUEST) as requests:
        if beside != "alone":
            requests.open_stream("open", text(1))
        requests.add_complete("running", text(LACKING["running"]), max_tokens=9)
        requests.step(2)
        for name in ("heavy", "light"):
            requests.add_complete(name, text(LACKING[name]), max_tokens=1)
        for _ in range(5):
            requests.step()
            assert requests.has_ended("light") or requests.computed("heavy")
        assert not requests.has_ended("running")
        assert requests.num_preemptions["heavy"] == 0
        assert requests.has_ended("light") or requests.driver.num_free_blocks() == 0


# ---- thrashing ----------------------------------------------------------------------------------------------------


def test_the_guard_ends_where_a_victim_has_what_it_had_or_where_an_update_voided_that() -> None:
    prompt = StreamingPrompt.from_flags(FLAGS, np.zeros(0, dtype=np.int32), 0.0)
    assert not prompt.is_guarded(0)
    prompt.preempted(30)
    prompt.preempted(20)
    assert [prompt.is_guarded(num_computed) for num_computed in (0, 29, 30)] == [True, True, False]
    prompt.invalidated_from(12, 20)
    assert [prompt.is_guarded(num_computed) for num_computed in (11, 12)] == [True, False]


def test_others_pay_before_one_that_was_preempted_and_has_not_got_further() -> None:
    blocks = Blocks(0, held={"b": 2, "guarded": 2, "c": 2})
    holders = [
        candidate("b", 2, 4, num_computed=8, is_running=True),
        candidate("c", 3, 4, num_computed=8, is_running=True),
        candidate("guarded", 4, 4, num_computed=8, is_running=True, is_guarded=True),
    ]
    assert names(plan([*holders, candidate("a", 1, 8)], blocks, num_tokens=8).victims) == ["c"]
    assert names(plan([*holders, candidate("a", 1, 16)], blocks, num_tokens=16).victims) == ["c", "b"]
    assert names(plan([*holders, candidate("a", 1, 24)], blocks, num_tokens=24).victims) == ["c", "b", "guarded"]


def test_a_guarded_holder_pays_only_where_nobody_would_be_served_otherwise() -> None:
    guarded = candidate("guarded", 4, 4, num_computed=8, is_guarded=True, is_ready=False)
    second = candidate("second", 2, 8)
    alone = plan([guarded, second], Blocks(0, held={"guarded": 2}))
    assert (names(alone.victims), dict(alone.num_tokens)) == (["guarded"], {"second": 8})
    behind = plan([candidate("first", 1, 4), guarded, second], Blocks(1, held={"guarded": 2}))
    assert (names(behind.victims), dict(behind.num_tokens)) == ([], {"first": 4})
    beside_idle = plan(
        [candidate("first", 1, 8), guarded, idle("idle", 9, 8)], Blocks(0, held={"guarded": 2, "idle": 2})
    )
    assert names(beside_idle.victims) == ["idle"]


@pytest.mark.parametrize(
    ("policy", "beside"), beside_a_stream_or_alone(["FCFS", "DEFAULT_VLLM", "LCAS", "MCPS", "SRPF", "SVF", "ADAPTIVE"])
)
def test_no_victim_is_taken_again_before_it_got_further(core: Core, text: Any, policy: str, beside: str) -> None:
    """vLLM #21793: chunks of many long prompts in a small pool preempted each other again and again."""
    with core(policy=policy, num_gpu_blocks=25, max_num_seqs=16) as requests:
        if beside != "alone":
            requests.open_stream("open", text(5))
        for index in range(16):
            requests.add_complete(f"request-{index}", text(60), max_tokens=30)
        requests.at_rest()
        # Only for the first in the order, where all others are guarded too.
        assert requests.num_guarded <= 0.05 * requests.num_preemptions.total()
        assert len(requests.driver.finish_reasons) == 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", LONG_POLICIES)
def test_preemptions_of_one_request_do_not_grow_with_the_crowd(core: Core, text: Any, policy: str, mode: str) -> None:
    """vLLM #21793: the same; a request of 12 blocks loses its KV at most 12 times, whoever else is there."""
    with core(policy=policy, mode=mode, num_gpu_blocks=25, max_num_seqs=16) as requests:
        requests.open_stream("open", text(5))
        for index in range(40):
            if index % 2:
                requests.open_stream(f"request-{index}", text(50), max_tokens=30)
                requests.step()
                requests.append(f"request-{index}", text(10), final=True)
            else:
                requests.add_complete(f"request-{index}", text(60), max_tokens=30)
        requests.at_rest()
        assert len(requests.driver.finish_reasons) == 40
        assert max(requests.num_preemptions.values(), default=0) <= 90 // 8 + 1


# ---- waiting ------------------------------------------------------------------------------------------------------

NUM_TOKENS_PER_S = 1_000.0
EASY = StepLatency(
    overhead_s=0.0, flops_per_token=1.0, flops_per_pair=0.0, effective_flops_per_s=NUM_TOKENS_PER_S, messaging_s=0.0
)


def prompt_at(arrival_s: float, num_tokens: int, first_id: int, max_tokens: int = 1) -> SimulatedRequest:
    chunks = (SimulatedChunk(0.0, "append", ((first_id, num_tokens),)),)
    return SimulatedRequest(arrival_s=arrival_s, chunks=chunks, max_tokens=max_tokens)


def first_token_of_the_long_one(policy: str, num_gpu_blocks: int) -> float:
    """A long prompt at 1 s, and for half a minute short ones that take a little more than the engine has."""
    shorts = [prompt_at(0.25 * index, 256, 10_000 + 300 * index) for index in range(120)]
    result = simulate(
        [prompt_at(1.0, 4_000, 0), *shorts],
        policy=policy,
        latency=EASY,
        num_gpu_blocks=num_gpu_blocks,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        max_model_len=4_096,
    )
    return result.requests[0].first_token_s


@pytest.mark.parametrize("num_gpu_blocks", [2_000, 270], ids=["much memory", "little memory"])
def test_a_long_prompt_is_served_in_its_time_though_short_ones_keep_coming(
    monkeypatch: pytest.MonkeyPatch, num_gpu_blocks: int
) -> None:
    """SRPF's bound: only what was complete (4,000 - 256) / 2,000 seconds after it, at most, is served before it."""
    overtaking_s = (4_000 - 256) / SRPF().ageing
    num_overtaking = sum(0.25 * index <= 1.0 + overtaking_s for index in range(120))
    bound_s = (num_overtaking * 256 + 4_000) / NUM_TOKENS_PER_S + 2 * 0.256
    assert first_token_of_the_long_one("SRPF", num_gpu_blocks) <= bound_s < 9.0
    monkeypatch.setitem(POLICIES, "SRPF", lambda: SRPF(ageing=0.0))
    assert first_token_of_the_long_one("SRPF", num_gpu_blocks) > 30.0, "the load is one that starves it without ageing"


@pytest.mark.parametrize("policy", ["FCFS", "LCAS", "SRPF", "ADAPTIVE"])
def test_a_long_prompt_that_lacks_memory_is_not_passed_for_ever(policy: str) -> None:
    """Others in prefill are as far from their ends as their prefill takes: newcomers do not end before them."""
    backlog = [prompt_at(0.0, 900, 10_000 + 1_000 * index, 5) for index in range(4)]
    others = [prompt_at(0.95 + 0.85 * index, 900, 50_000 + 1_000 * index, 5) for index in range(100)]
    result = simulate(
        [prompt_at(1.0, 3_600, 0, 5), *backlog, *others],
        policy=policy,
        latency=EASY,
        num_gpu_blocks=270,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        max_model_len=4_096,
    )
    assert result.requests[0].first_token_s < 15.0, "after the backlog and itself, 7.2 s of work, and a few others"
