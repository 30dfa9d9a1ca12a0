"""vLLM's scheduler and KV cache manager without an engine around them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.serving.simulator.kv_layout import kv_cache_specs

__all__ = ["build_scheduler"]

# The scheduler needs the shape of a model and its limits, never weights: this is Llama-3.1-8B's.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

BlockHasher = Callable[[Any], list[Any]]


def build_scheduler(
    scheduler_cls: str | None, num_gpu_blocks: int, engine_args: Mapping[str, Any]
) -> tuple[Any, BlockHasher | None]:
    """The scheduler of a Llama-3.1-8B as vLLM's engine core would build it, and what hashes its requests' blocks.

    Args:
        scheduler_cls: dotted path; None for vLLM's own.
        num_gpu_blocks: KV blocks in all; one of them is vLLM's null block.
        engine_args: for vLLM's `EngineArgs`; `max_model_len` is needed.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigurationError: vLLM refuses an argument.
    """
    with tempfile.TemporaryDirectory() as folder, _environment():
        try:
            from vllm.engine.arg_utils import EngineArgs
        except ModuleNotFoundError as error:
            raise MissingExtraError("vLLM", "cpu", "gpu") from error
        config = {**_MODEL, "max_position_embeddings": engine_args["max_model_len"]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        arguments = {
            "model": folder,
            "scheduler_cls": scheduler_cls,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enforce_eager": True,
            "disable_log_stats": True,
            "async_scheduling": False,
            "scheduler_reserve_full_isl": False,
            **engine_args,
        }
        try:
            vllm_config = EngineArgs(**arguments).create_engine_config()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"engine arguments: {error}") from error
        # As on a GPU, and it spares the scheduler copies of long prompts. Asked for only now: this machine's platform
        # may not know it.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        return _scheduler(vllm_config, num_gpu_blocks)


def _scheduler(vllm_config: Any, num_gpu_blocks: int) -> tuple[Any, BlockHasher | None]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, resolve_kv_cache_block_sizes
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    register_all_kvcache_specs(vllm_config)
    groups = get_kv_cache_groups(vllm_config, kv_cache_specs(vllm_config))
    kv_cache_config = KVCacheConfig(num_blocks=num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    vllm_config.cache_config.num_gpu_blocks = num_gpu_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    if not vllm_config.cache_config.enable_prefix_caching and len(groups) == 1:
        from stream2llm_sdk.serving.simulator.block_stack import use_block_stack

        use_block_stack(scheduler)
    return scheduler, _block_hasher(vllm_config, hash_block_size)


def _block_hasher(vllm_config: Any, hash_block_size: int) -> BlockHasher | None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    if not vllm_config.cache_config.enable_prefix_caching and vllm_config.kv_transfer_config is None:
        return None
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher: BlockHasher = get_request_block_hasher(hash_block_size, hash_function)
    return hasher


@contextmanager
def _environment() -> Iterator[None]:
    """vLLM's settings while a scheduler is built, put back as they were afterwards."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
