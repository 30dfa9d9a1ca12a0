"""What decodes is served together: the plan is the one that asking each request would have given."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from prompt_scripts import SCHEDULER, Prompts, tokens
from scheduler_checks import SchedulerChecks

from stream2llm_sdk.serving.decoding_run import DecodingRun
from stream2llm_sdk.testing.core_driver import CoreDriver

BLOCK_SIZE = 4


class Blocks:
    """Requests that compute a position a step, and take blocks of 4 as they need them."""

    def __init__(self) -> None:
        self.tables: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}

    def add(self, name: str, num_computed: int, max_tokens: int = 100, **fields: Any) -> Any:
        """One that has so many tokens computed, with no more blocks than that takes."""
        self.tables[name] = list(range(-(-num_computed // BLOCK_SIZE)))
        self.requests[name] = SimpleNamespace(
            request_id=name,
            num_computed_tokens=num_computed,
            num_tokens=num_computed + 1,
            num_output_placeholders=0,
            num_prompt_tokens=num_computed,
            max_tokens=max_tokens,
            resumable=False,
            **fields,
        )
        return self.requests[name]

    def step(self, names: Any) -> int:
        """Each computes one position; returns the blocks that they took."""
        taken = 0
        for name in names:
            request = self.requests[name]
            if request.num_computed_tokens == len(self.tables[name]) * BLOCK_SIZE:
                self.tables[name].append(0)
                taken += 1
            request.num_computed_tokens += 1
            request.num_tokens += 1
        return taken


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def run(blocks: Blocks) -> DecodingRun:
    """The run of five requests that stand at different places in their last blocks."""
    run = DecodingRun(blocks.tables, BLOCK_SIZE, longest=1_000)
    run.end([blocks.add(f"r{index}", num_computed) for index, num_computed in enumerate((8, 9, 10, 11, 12))])
    return run


def test_a_step_takes_a_block_for_each_whose_last_one_is_full(run: DecodingRun, blocks: Blocks) -> None:
    for _ in range(20):
        run.begin(len(run), 100, 5)
        assert run.num_tokens == dict.fromkeys(("r0", "r1", "r2", "r3", "r4"), 1)
        assert run.num_blocks == blocks.step(run.num_tokens)
        run.end([])


def test_what_changed_in_the_order_is_left_out_from_there_on(run: DecodingRun, blocks: Blocks) -> None:
    run.begin(2, 100, 5)
    assert list(run.num_tokens) == ["r0", "r1"]
    assert run.num_blocks == blocks.step(run.num_tokens) == 1
    run.end([blocks.requests["r3"]])
    run.begin(3, 100, 5)
    assert list(run.num_tokens) == ["r0", "r1", "r3"]
    assert run.num_blocks == blocks.step(run.num_tokens)


def test_one_that_may_want_no_more_is_left_out(blocks: Blocks) -> None:
    run = DecodingRun(blocks.tables, BLOCK_SIZE, longest=21)
    run.end([blocks.add("long", 10), blocks.add("short", 10, max_tokens=3), blocks.add("other", 10)])
    served = []
    for _ in range(14):
        run.begin(len(run), 100, 5)
        served.append(len(run))
        blocks.step(run.num_tokens)
        run.end([])
    # The second one computes the positions of its prompt and of two of its tokens; the model has room for 21.
    assert served == [3, 3, *[1] * 9, 0, 0, 0]


@pytest.mark.parametrize(("num_tokens", "num_free"), [(5, 5), (100, 1)], ids=["tokens", "blocks"])
def test_nobody_is_served_unasked_where_not_all_can_be(run: DecodingRun, num_tokens: int, num_free: int) -> None:
    run.begin(len(run), num_tokens, num_free)
    assert (len(run), run.num_blocks, run.num_tokens) == (0, 0, {})


def test_nobody_joins_whose_answer_may_be_followed_by_a_prompt(run: DecodingRun, blocks: Blocks) -> None:
    session = blocks.add("session", 8)
    session.resumable = True
    run.end([session, blocks.add("behind it", 8)])
    assert "session" not in run.num_tokens
    assert "behind it" not in run.num_tokens


def test_nobody_joins_who_has_more_blocks_than_it_needs_next(run: DecodingRun, blocks: Blocks) -> None:
    request = blocks.add("r5", 8)
    blocks.tables["r5"] += [0, 0]
    run.end([request])
    assert "r5" not in run.num_tokens


def test_there_is_no_run_where_layers_differ() -> None:
    run = DecodingRun({}, 0, longest=1_000)
    run.end([Blocks().add("r0", 8)])
    run.begin(0, 100, 5)
    assert (len(run), run.num_blocks) == (0, 0)


# ---- on the real scheduler ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["FCFS", "SRPF", "LCAS", "SVF"])
def test_long_answers_are_planned_as_if_each_was_asked(
    model: Path, policy: str, is_async: bool, prefix_caching: bool
) -> None:
    rng = random.Random(f"{policy} {is_async} {prefix_caching}")
    with CoreDriver(
        model,
        scheduler_cls=SCHEDULER,
        async_scheduling=is_async,
        prefix_caching=prefix_caching,
        num_gpu_blocks=90,
        block_size=8,
        max_model_len=128,
        max_num_batched_tokens=48,
        max_num_seqs=12,
        scheduler_reserve_full_isl=False,
        additional_config={"stream2llm": {"policy": policy}},
    ) as driver:
        prompts = Prompts(driver)
        checks = SchedulerChecks(prompts)
        num_open = 0
        for step in range(400):
            if step % 9 == 0:
                ids = tokens(rng, rng.randrange(3, 60))
                if rng.random() < 0.4:
                    prompts.open_stream(f"s{step}", ids, max_tokens=rng.randrange(1, 60))
                else:
                    prompts.add_plain(f"r{step}", ids, max_tokens=rng.randrange(1, 120 - len(ids)))
            if prompts.open and step % 5 == 0:
                prompts.append(rng.choice(prompts.open), tokens(rng, 2), final=len(prompts.open) > 1)
            live = [name for name in driver.scheduler.requests if name not in prompts.aborted]
            if live and rng.random() < 0.02:
                prompts.abort(rng.choice(live))
            num_open += bool(prompts.open)
            driver.step()
            checks.between_steps()
        for name in list(prompts.open):
            prompts.finish(name)
        driver.run_until_idle(2_000, after_step=checks.between_steps)
        checks.ended()
    assert checks.num_answered > 15
    assert num_open > 100
    if policy != "SVF":  # what is expected of outputs moves places all the time
        assert checks.num_in_run > checks.num_plans / 2
