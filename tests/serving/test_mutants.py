"""The checks can fail: four schedulers, each with one of the mistakes that a prompt update invites, are caught."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from prompt_scripts import Prompts, run_script
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.kv_blocks import KVBlocks
from stream2llm_sdk.serving.scheduler import Stream2LLMScheduler
from stream2llm_sdk.testing.core_driver import CoreDriver


class NoTruncation(Stream2LLMScheduler):
    """Keeps the KV of the prompt before."""

    def _truncate(self, request: Request, keep: int) -> None:
        pass


class NoResend(Stream2LLMScheduler):
    """Leaves a running request running, so that the worker goes on with the prompt that it knows."""

    def _withdraw(self, request: Request) -> None:
        self._was_running = request.status == RequestStatus.RUNNING
        super()._withdraw(request)

    def _resubmit(self, request: Request) -> None:
        if not self._was_running:
            super()._resubmit(request)
            return
        request.status = RequestStatus.RUNNING
        self.running.append(request)


class WritesHashedBlocks(Stream2LLMScheduler):
    """Cuts inside a block that the prefix cache knows under its old content, and goes on writing there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv = _CutsAnywhere(self.kv_cache_manager, self.block_size)


class _CutsAnywhere(KVBlocks):
    def resumable_at(self, request_id: str, keep: int) -> int:
        return keep


class NoHeldToken(Stream2LLMScheduler):
    """Computes the last token of an open prompt too, and so samples from it."""

    def _is_open(self, request: Request) -> bool:
        return False


def run_scripts(model: Path, scheduler_cls: type, scripts: int = 12) -> None:
    with CoreDriver(
        model,
        scheduler_cls=scheduler_cls,
        num_gpu_blocks=64,
        max_num_batched_tokens=96,
        scheduler_reserve_full_isl=False,
        additional_config={"stream2llm": {"policy": "FCFS"}},
    ) as driver:
        for script in range(scripts):
            prompts = Prompts(driver)
            run_script(prompts, random.Random(script), f"s{script}", after_step=driver.check_invariants)
            for request_id in prompts.to_answer:
                expected = driver.expected_output(prompts.now[request_id], prompts.max_tokens[request_id])
                assert driver.outputs[request_id] == expected, request_id


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


def test_the_scheduler_itself_passes(model: Path) -> None:
    run_scripts(model, Stream2LLMScheduler)


@pytest.mark.parametrize("mutant", [NoTruncation, NoResend, WritesHashedBlocks, NoHeldToken])
def test_a_mutant_is_caught(model: Path, mutant: type) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_scripts(model, mutant)
