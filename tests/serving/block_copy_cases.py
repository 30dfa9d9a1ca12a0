"""What copies of blocks must do on any device; needs torch only. `test_block_copies.py` runs the cases on the CPU,
`tests/gpu` on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stream2llm_sdk.serving.swap.block_copies import BlockCopier

__all__ = ["CASES", "LAYOUTS", "make_cache", "rewrite"]

NUM_BLOCKS = 40
NUM_HOST_BLOCKS = 24

# Shapes of KV caches with NUM_BLOCKS blocks: blocks first, keys and values first, heads outside the blocks in memory.
LAYOUTS: dict[str, Callable[[torch.device, torch.dtype], torch.Tensor]] = {
    "blocks-first": lambda device, dtype: torch.zeros((NUM_BLOCKS, 2, 16, 64), device=device, dtype=dtype),
    "keys-and-values-first": lambda device, dtype: torch.zeros((2, NUM_BLOCKS, 16, 3, 8), device=device, dtype=dtype),
    "tokens-inside-heads": lambda device, dtype: torch.zeros(
        (2, NUM_BLOCKS, 3, 16, 8), device=device, dtype=dtype
    ).transpose(2, 3),
    "between-other-layers": lambda device, dtype: torch.zeros((NUM_BLOCKS, 3, 16, 64), device=device, dtype=dtype)[
        :, 1
    ],
}


def make_cache(layout: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A cache with random content."""
    cache = LAYOUTS[layout](device, dtype)
    rewrite(cache, seed)
    return cache


def rewrite(cache: torch.Tensor, seed: int) -> None:
    """Gives every element another value; on a GPU this is only queued."""
    generator = torch.Generator(device=cache.device).manual_seed(seed)
    cache.copy_(torch.randint(-100, 100, cache.shape, generator=generator, device=cache.device))


def block_of(cache: torch.Tensor, block: int) -> torch.Tensor:
    return cache.movedim(cache.shape.index(NUM_BLOCKS), 0)[block]


def copier_of(caches: dict[str, torch.Tensor]) -> BlockCopier:
    return BlockCopier(caches, NUM_BLOCKS, NUM_HOST_BLOCKS)


def scattered_blocks_come_back_elsewhere(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    caches = {f"layer{index}": make_cache(layout, device, dtype, index) for index in range(3)}
    before = {name: cache.clone() for name, cache in caches.items()}
    copier = copier_of(caches)
    sources = [5, 6, 7, 30, 31, 2, 39, 0]
    hosts = [10, 11, 12, 13, 3, 4, 23, 0]
    targets = [20, 21, 9, 8, 33, 34, 1, 15]
    copier.copy_out(list(zip(sources, hosts, strict=True)))
    copier.copy_in(list(zip(hosts, targets, strict=True)))
    copier.synchronize()
    for name, cache in caches.items():
        for block in range(NUM_BLOCKS):
            source = sources[targets.index(block)] if block in targets else block
            assert torch.equal(block_of(cache, block), block_of(before[name], source)), (name, block)
    copier.close()


def a_source_may_be_overwritten_at_once(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    cache = make_cache(layout, device, dtype)
    copier = copier_of({"layer": cache})
    versions = []
    for step in range(8):
        rewrite(cache, 100 + step)
        versions.append(block_of(cache, 7).clone())
        copier.copy_out([(7, step), (8, 8 + step)])
        rewrite(cache, 200 + step)
    copier.copy_in([(step, 10 + step) for step in range(8)])
    found = [block_of(cache, 10 + step).clone() for step in range(8)]  # queued behind the load, with no wait
    rewrite(cache, 300)
    copier.synchronize()
    for step, version in enumerate(versions):
        assert torch.equal(found[step], version), step
    copier.close()


def a_block_is_saved_before_another_is_loaded_into_it(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    cache = make_cache(layout, device, dtype)
    copier = copier_of({"layer": cache})
    first, second = block_of(cache, 1).clone(), block_of(cache, 2).clone()
    copier.copy_out([(1, 0)])
    copier.copy_out([(2, 1)])
    copier.copy_in([(0, 2), (1, 1)])
    copier.synchronize()
    assert torch.equal(block_of(cache, 2), first)
    assert torch.equal(block_of(cache, 1), second)
    copier.close()


def memory_that_layers_share_is_copied_once(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    cache = make_cache(layout, device, dtype)
    alone = copier_of({"layer": cache})
    shared = copier_of({"layer": cache, "same": cache})
    assert (
        shared.block_bytes
        == alone.block_bytes
        == cache[0].numel() * cache.element_size() * cache.shape[0] // (NUM_BLOCKS)
    )
    alone.close()
    shared.close()


def every_copy_is_timed(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    copier = copier_of({"layer": make_cache(layout, device, dtype)})
    timers = [copier.copy_out([(3, 3)]), copier.copy_in([(3, 4)]), copier.copy_in([])]
    copier.synchronize()
    for timer in timers:
        elapsed_s = timer.elapsed_s()
        assert elapsed_s is not None
        assert 0 <= elapsed_s < 10
    copier.close()


CASES = (
    scattered_blocks_come_back_elsewhere,
    a_source_may_be_overwritten_at_once,
    a_block_is_saved_before_another_is_loaded_into_it,
    memory_that_layers_share_is_copied_once,
    every_copy_is_timed,
)
