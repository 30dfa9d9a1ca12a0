"""How the embedded engine's processes start and end: arguments, defaults for the device, errors that say why."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, EngineStartError, MissingExtraError, UnsupportedFeatureError
from stream2llm_sdk.serving.options import SchedulingOptions
from stream2llm_sdk.serving.start_errors import noted_errors
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["build", "end", "end_start", "quieten", "require_vllm", "supported", "vllm_arguments"]

_SCHEDULER = "stream2llm_sdk.serving.scheduler.Stream2LLMScheduler"

# vLLM options that streaming prompts do not work with, or that the engine decides itself: the value besides None that
# asks for nothing, and why others are refused.
_UNSUPPORTED_ENGINE_ARGS: dict[str, tuple[object, str]] = {
    "speculative_config": (None, "speculative decoding is not supported with streaming prompts"),
    "pipeline_parallel_size": (
        1,
        "pipeline parallelism is not supported with streaming prompts; use tensor_parallel_size",
    ),
    "data_parallel_size": (1, "run one engine for each replica instead"),
    "kv_transfer_config": (None, "the engine brings its own connector; give it room with host_kv_bytes"),
    "scheduler_cls": (None, "the engine brings its own scheduler; choose a policy with policy="),
    "scheduler_reserve_full_isl": (False, "an open prompt has no full length to reserve"),
    "skip_tokenizer_init": (False, "the engine needs the tokenizer for the end-of-sequence token"),
}

_END_S = 30.0

# For each start under way, the processes that were there before.
_starts: list[frozenset[int | None]] = []

_QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def supported(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that are decided here.

    Raises:
        UnsupportedFeatureError: one of them asks for what streaming prompts do not work with.
        ConfigurationError: one of them cannot work.
    """
    for name, (off, why) in _UNSUPPORTED_ENGINE_ARGS.items():
        value = engine_args.get(name)
        if value is not None and (type(value) is not type(off) or value != off):
            raise UnsupportedFeatureError(f"{name}={value!r}: {why}")
    blocks = engine_args.get("num_gpu_blocks_override")
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 2):
        raise ConfigurationError(f"num_gpu_blocks_override={blocks!r}: give a number of KV blocks, 2 or more")
    return {name: value for name, value in engine_args.items() if name not in _UNSUPPORTED_ENGINE_ARGS}


def quieten() -> None:
    """Keeps vLLM from saying more than errors, in this process and in those that it starts."""
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\..*")
    if os.environ["VLLM_LOGGING_LEVEL"] == _QUIET_ENVIRONMENT["VLLM_LOGGING_LEVEL"]:
        # What a machine without a GPU is told while vLLM is imported, before its own logging is set up.
        for name in ("vllm.triton_utils.importing", "torch.utils.cpp_extension"):
            logging.getLogger(name).setLevel(logging.ERROR)


def require_vllm() -> None:
    """Says that vLLM is not installed, without importing it, which takes seconds."""
    if find_spec("vllm") is None:
        raise MissingExtraError("vLLM", "cpu", "gpu")


def build(
    model: str, policy: str, scheduling: SchedulingOptions, engine_args: Mapping[str, Any], abandoned: threading.Event
) -> AsyncLLM | None:
    """Starts the engine's processes and blocks until they are up. If `abandoned` is set by then, ends them again.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigurationError: vLLM refuses an argument.
        EngineStartError: the processes did not come up.
    """
    quieten()
    require_vllm()
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = vllm_arguments(model, policy, engine_args, scheduling)
    known = frozenset(child.pid for child in multiprocessing.active_children())
    _starts.append(known)
    with noted_errors() as reason:
        try:
            llm = AsyncLLM.from_engine_args(arguments)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigurationError(f"vLLM cannot serve {model!r}: {error}") from error
        except Exception as error:
            raise EngineStartError(
                f"the engine's processes did not start{_given(engine_args)}: {(reason() or str(error)).rstrip('.')}. "
                "Set VLLM_LOGGING_LEVEL=INFO to see their logs"
            ) from error
        finally:
            _starts.remove(known)
    if abandoned.is_set():
        end(llm)
        return None
    return llm


def _given(engine_args: Mapping[str, Any]) -> str:
    """What was asked for instead of what vLLM would have found out."""
    blocks = engine_args.get("num_gpu_blocks_override")
    return "" if blocks is None else f" with num_gpu_blocks_override={blocks}"


async def end_start(building: asyncio.Future[Any]) -> None:
    """Returns when a start that nobody waits for any more has ended. Its processes are killed as they appear, unless
    another engine is being started in this process: which of them belong to which cannot be told then."""
    while not building.done():
        await asyncio.wait({building}, timeout=0.2)
        if len(_starts) == 1:
            (known,) = _starts
            for child in multiprocessing.active_children():
                if child.pid not in known and child.name.startswith("EngineCore"):
                    child.kill()


def end(llm: AsyncLLM) -> None:
    """Ends the engine's processes, and returns when they have ended."""
    manager = llm.engine_core.resources.engine_manager
    processes = list(getattr(manager, "processes", ()))
    # Left to itself vLLM kills them after 5 s, in which a busy machine does not get through their own clean-up.
    llm.shutdown(timeout=_END_S)
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
            process.join()


def vllm_arguments(
    model: str, policy: str, engine_args: Mapping[str, Any], scheduling: SchedulingOptions | None = None
) -> AsyncEngineArgs:
    """vLLM's arguments, with the defaults for this machine's device.

    Raises:
        ConfigurationError: vLLM does not know one of them.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduler_cls": _SCHEDULER,
        "scheduler_reserve_full_isl": False,
        **(_cpu_defaults() if current_platform.is_cpu() else {}),
        **engine_args,
    }
    options = scheduling or SchedulingOptions()
    arguments["additional_config"] = {
        **(arguments.get("additional_config") or {}),
        EXTRA_ARGS_KEY: {"policy": policy, **options.for_scheduler()},
    }
    if options.host_kv_bytes is not None:
        from stream2llm_sdk.serving.swap import swap_config

        arguments["kv_transfer_config"] = swap_config(host_bytes=options.host_kv_bytes)
    try:
        return AsyncEngineArgs(model=model, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"engine arguments: {error}") from error


def _cpu_defaults() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    # Retrieval shares the cores. Threads that spin while they wait for each other keep it, and then themselves,
    # from running: with one busy core, prefill was 5 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return {
        **({} if _cpu_has_bfloat16() else {"dtype": "float32"}),
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": 32,
        # A step is not interrupted by a chunk that arrives, so steps are kept short where compute is slow.
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 30,
    }


def _cpu_has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16 itself; where it does not, float32 is about 3 times faster."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = set(file.read().split())
    except OSError:
        return False
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
