"""Where vLLM keeps the blocks of its KV cache, as plain regions of memory; and which caches can be swapped at all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from stream2llm_sdk.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch

__all__ = ["Region", "block_bytes", "check_supported", "region_tensors", "regions"]


class Region(NamedTuple):
    """`num_blocks` rows of `row_bytes` bytes from `offset` on, one after another, in the memory of `layer`'s cache."""

    layer: str
    offset: int
    row_bytes: int


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises `UnsupportedFeatureError` for a KV cache whose blocks cannot go to the host and come back."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    movable = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        for kind in sorted({type(one).__name__ for one in specs if type(one) not in movable}):
            raise UnsupportedFeatureError(
                f"swapping copies the blocks of attention layers, not {kind} (layer {group.layer_names[0]!r}); run "
                f"this model without a swap space"
            )
        if group.host_resident or not group.enable_kv_transfer:
            raise UnsupportedFeatureError(
                f"the KV of layer {group.layer_names[0]!r} may not be transferred; run this model without a swap space"
            )
    if kv_cache_config.needs_kv_cache_zeroing:
        # The V2 model runner zeroes new blocks before it lets a connector save what they held.
        raise UnsupportedFeatureError(
            "swapping does not work with KV caches of several precisions in one engine; use one kv_cache_dtype"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedFeatureError(f"swapping does not work with {name}={getattr(parallel, name)}; use 1")


def regions(kv_cache_config: Any) -> list[Region]:
    """Every piece of memory that holds KV blocks, once. Block `b` is row `b` of each.

    Raises:
        UnsupportedFeatureError: pieces that overlap without being the same.
    """
    found: dict[int, Region] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = kv_cache_config.num_blocks * tensor.block_stride
        if tensor.layer_stride >= span:
            starts = range(tensor.offset, tensor.offset + len(tensor.layers) * tensor.layer_stride, span)
        else:
            starts = range(0, span, span)  # A row holds the block of all layers.
        for start in starts:
            found.setdefault(start, Region(tensor.layers[0], start, tensor.block_stride))
    ordered = sorted(found.values(), key=lambda region: region.offset)
    for before, after in pairwise(ordered):
        if before.offset + kv_cache_config.num_blocks * before.row_bytes > after.offset:
            raise UnsupportedFeatureError(
                f"the KV caches of layers {before.layer!r} and {after.layer!r} overlap in memory in a way that cannot "
                f"be swapped"
            )
    return ordered


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block on one worker, over all layers."""
    return sum(region.row_bytes for region in regions(kv_cache_config))


def region_tensors(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The regions as byte matrices of `num_blocks` rows, by a name for each."""
    import torch

    tensors = {}
    for region in regions(kv_cache_config):
        cache = kv_caches[region.layer]
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        span = kv_cache_config.num_blocks * region.row_bytes
        if memory.numel() < region.offset + span:
            raise UnsupportedFeatureError(
                f"the KV cache of layer {region.layer!r} has {memory.numel()} bytes, less than the "
                f"{region.offset + span} that vLLM planned for it; it cannot be swapped"
            )
        rows = memory[region.offset : region.offset + span].view(-1, region.row_bytes)
        tensors[f"{region.layer}+{region.offset}"] = rows
    return tensors
