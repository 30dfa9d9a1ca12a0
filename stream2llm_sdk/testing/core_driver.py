"""vLLM's engine core in this process, driven one step at a time.

`CoreDriver` builds the real `EngineCore` around a `CheckedExecutor` (or around vLLM's own
executor and a real model) and does what the core's process does in its loop, but only when told to: a test
decides after which step a message arrives.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["CoreDriver"]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class CoreDriver:
    """One engine core. Use as a context manager, or call `close`.

    `scheduler_cls` is a class or its dotted path; None takes vLLM's own. `executor` is "checked" for the
    executor without a model or "model" for vLLM's own on this machine. `runner` chooses the model runner
    whose state the checked executor emulates. `engine_args` go to vLLM's `EngineArgs` as they are.

    Attributes: `outputs` and `finish_reasons` by request id, `num_idle_steps` (steps without any work),
    `core` (the `EngineCore`), `scheduler` and `executor`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        scheduler_cls: str | type | None = None,
        async_scheduling: bool = False,
        runner: Literal["v1", "v2"] = "v1",
        prefix_caching: bool = True,
        num_gpu_blocks: int = 64,
        block_size: int = 16,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int = 16,
        max_model_len: int = 512,
        additional_config: Mapping[str, Any] | None = None,
        executor: Literal["checked", "model"] = "checked",
        **engine_args: Any,
    ) -> None:
        if runner not in ("v1", "v2"):
            raise ConfigurationError(f"runner must be 'v1' or 'v2', got {runner!r}")
        if executor not in ("checked", "model"):
            raise ConfigurationError(f"executor must be 'checked' or 'model', got {executor!r}")
        arguments: dict[str, Any] = {
            "model": str(model),
            "scheduler_cls": scheduler_cls,
            "async_scheduling": async_scheduling,
            "enable_prefix_caching": prefix_caching,
            "num_gpu_blocks_override": num_gpu_blocks,
            "block_size": block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "additional_config": dict(additional_config or {}),
            "dtype": "float32",
            "generation_config": "vllm",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 256 << 20,  # instead of most of the machine; num_gpu_blocks decides
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            **engine_args,
        }
        self.outputs: defaultdict[str, list[int]] = defaultdict(list)
        self.finish_reasons: dict[str, str] = {}
        self.num_idle_steps = 0
        self._closed = False
        self._has_workers = executor == "model"
        with _environment():
            self.core = _build_core(arguments, executor, runner)
        self.scheduler: Any = self.core.scheduler
        self.executor: Any = self.core.model_executor
        from stream2llm_sdk.serving.simulator.invariants import InvariantChecker

        self._invariants = InvariantChecker(self.scheduler, getattr(self.executor, "memory", None))

    def __enter__(self) -> CoreDriver:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        extra_args: Mapping[str, Any] | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        **sampling: Any,
    ) -> None:
        """Send a request, greedy and without regard to EOS unless `sampling` says otherwise.

        `extra_args` and `sampling` become the fields of vLLM's `SamplingParams`. Sending an id again is
        left to the scheduler, as in the real core.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        params = SamplingParams(
            max_tokens=max_tokens, extra_args=dict(extra_args) if extra_args is not None else None, **options
        )
        if not options["ignore_eos"] and (eos := self._eos_token_id()) is not None:
            params.update_from_generation_config({}, eos)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        self.core.add_request(*self.core.preprocess_add_request(request))

    def call(self, operation: str, *arguments: Any) -> Any:
        """Send `operation` down the scheduler's utility channel (a scheduler that can be called)."""
        return self.scheduler(operation, *arguments)

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Abort one request or several, between two steps."""
        self.core.abort_requests([request_ids] if isinstance(request_ids, str) else list(request_ids))

    def has_work(self) -> bool:
        """Whether the core's loop would take another step instead of waiting for a message."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self, count: int = 1) -> int:
        """Take up to `count` steps, fewer when there is no work; returns how many ran the model."""
        num_executed = 0
        for _ in range(count):
            if not self.has_work():
                break
            outputs, executed = self.core.step_fn()
            self._collect(outputs)
            self.core.post_step(executed)
            num_executed += executed
            self.num_idle_steps += not executed
        return num_executed

    def run_until_idle(self, limit: int = 10_000, *, after_step: Callable[[], None] | None = None) -> int:
        """Step until there is no work; returns the steps taken.

        Raises `TimeoutError` when `limit` steps were not enough: some request makes no progress.
        """
        for taken in range(limit):
            if not self.has_work():
                return taken
            self.step()
            if after_step is not None:
                after_step()
        waiting = sorted(self.scheduler.requests)
        raise TimeoutError(f"still busy after {limit} steps; unfinished requests: {waiting}")

    def expected_output(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What a correct engine answers; only with the checked executor."""
        expected: list[int] = self.executor.expected_output(list(prompt_ids), num_tokens)
        return expected

    def check_invariants(self) -> None:
        """Check the KV cache manager and the progress of every request; see `InvariantChecker`."""
        self._invariants.check()

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        """Shut the core down and reset what vLLM keeps per process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._has_workers:
            self.core.shutdown()
            return
        from vllm import envs

        # The same, but for process groups and device memory that a core without workers does not have; looking
        # for them takes longer than a small test.
        self.core.structured_output_manager.clear_backend()
        self.scheduler.shutdown()
        gc.unfreeze()
        envs.disable_envs_cache()

    def _collect(self, outputs: Mapping[int, Any] | None) -> None:
        for core_outputs in (outputs or {}).values():
            for output in core_outputs.outputs:
                self.outputs[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish_reasons[output.request_id] = str(output.finish_reason)

    def _eos_token_id(self) -> int | None:
        eos = getattr(self.core.vllm_config.model_config.hf_text_config, "eos_token_id", None)
        return eos[0] if isinstance(eos, list) else eos


def _build_core(arguments: dict[str, Any], executor: str, runner: str) -> Any:
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    # A core that was never shut down leaves its view of the environment behind.
    envs.disable_envs_cache()
    if executor == "checked":
        from stream2llm_sdk.serving.simulator.executor import CheckedExecutor

        arguments = {"distributed_executor_backend": CheckedExecutor, **arguments}
    config = EngineArgs(**arguments).create_engine_config()
    if executor == "checked":
        # Asked for only now: the platform that vLLM finds here may know neither, the checked executor does both.
        config.scheduler_config.async_scheduling = arguments["async_scheduling"]
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    # The core collects the whole heap when it starts; what is there already need not be searched. close() undoes it.
    gc.freeze()
    try:
        return EngineCore(config, Executor.get_class(config), log_stats=False)
    except BaseException:
        gc.unfreeze()
        envs.disable_envs_cache()
        raise


@contextmanager
def _environment() -> Iterator[None]:
    """vLLM's settings for one core, put back as they were afterwards."""
    names = {*_ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(_ENVIRONMENT, VLLM_USE_V2_MODEL_RUNNER="0")
    logger = logging.getLogger("vllm")
    level = logger.level
    try:
        try:
            import vllm.logger  # noqa: F401  -- sets the level when it is first imported
        except ImportError as error:
            raise MissingExtraError("vLLM", "cpu") from error
        level = logger.level
        logger.setLevel(logging.ERROR)
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
