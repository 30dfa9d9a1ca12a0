"""vLLM's block pool for simulations without a prefix cache: the same blocks in the same order, in less time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

__all__ = ["BlockStack", "use_block_stack"]


class BlockStack(BlockPool):  # type: ignore[misc]
    """Where nothing is cached vLLM's queue of free blocks is a stack: a block that was freed is the next to be taken,
    and each has one owner from when it is taken to when it is freed. So they need no links and no counting; what they
    say of themselves is that they are taken, free ones too."""

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        free = self._free
        if num_blocks > len(free):
            raise ValueError(f"cannot get {num_blocks} free blocks from the pool, which has {len(free)}")
        if num_blocks <= 0:
            return []
        taken = free[: -num_blocks - 1 : -1]
        del free[-num_blocks:]
        return taken

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        blocks.reverse()
        self._free += blocks
        assert len(self._free) < self.num_gpu_blocks, "a block was freed twice"

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    _free: list[KVCacheBlock]


def use_block_stack(scheduler: Any) -> None:
    """Has a scheduler that was just built take its blocks from a `BlockStack`.

    It must have no prefix cache and one group of layers, so that no block is shared and none is the null block.
    """
    manager = scheduler.kv_cache_manager
    assert not manager.enable_caching
    assert len(scheduler.kv_cache_config.kv_cache_groups) == 1
    pool = manager.block_pool
    pool.__class__ = BlockStack
    pool._free = [block for block in reversed(pool.blocks) if not block.is_null]
    for block in pool._free:
        block.ref_cnt = 1
