"""From a model's configuration to KV cache specs, and from vLLM's groups back to plain layouts."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.errors import UnsupportedFeatureError
from stream2llm_sdk.serving.simulator.kv_memory import GroupLayout

__all__ = ["group_layouts", "kv_cache_specs"]


def kv_cache_specs(vllm_config: Any) -> dict[str, Any]:
    """One spec per decoder layer, full attention or sliding window as the Hugging Face config says.

    `layer_types` decides where the model has it; without it, a `sliding_window` holds for every layer.
    Raises `UnsupportedFeatureError` for any other kind of layer (chunked or linear attention, Mamba).
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    shape = {
        "block_size": vllm_config.cache_config.block_size,
        "num_kv_heads": model_config.get_num_kv_heads(parallel_config),
        "head_size": model_config.get_head_size(),
        "dtype": model_config.dtype,
    }
    specs: dict[str, Any] = {}
    for index, (kind, window) in enumerate(_layer_kinds(model_config.hf_text_config)):
        name = f"model.layers.{index}.self_attn.attn"
        if kind == "full_attention":
            specs[name] = FullAttentionSpec(**shape)
        elif kind == "sliding_attention" and window:
            specs[name] = SlidingWindowSpec(**shape, sliding_window=window)
        else:
            raise UnsupportedFeatureError(
                f"layer {index} is of kind {kind!r}; the checked executor emulates full_attention and "
                f"sliding_attention layers"
            )
    return specs


def group_layouts(kv_cache_config: Any) -> list[GroupLayout]:
    """The block size and the attention window of each KV cache group that vLLM decided on."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    layouts = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        layouts.append(GroupLayout(spec.block_size, window))
    return layouts


def _layer_kinds(text_config: Any) -> list[tuple[str, int | None]]:
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        kind = "sliding_attention" if window else "full_attention"
        kinds = [kind] * text_config.num_hidden_layers
    return [(kind, window) for kind in kinds]
