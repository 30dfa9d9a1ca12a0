"""What the scheduler asks of vLLM's KV cache manager: who holds which blocks, what a step needs, and cutting a
request's KV at a position. All use of the manager's internals is here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.swap import Stream2LLMSwapConnector

__all__ = ["CacheHit", "KVBlocks"]


@dataclass(frozen=True, slots=True)
class CacheHit:
    """What the prefix cache holds of a request that has no KV of its own, and how many tokens behind that would be
    loaded from host memory. Valid until any block is allocated."""

    blocks: tuple[Any, ...]
    num_tokens: int
    num_loaded: int = 0


class KVBlocks:
    """A view of the KV cache over all groups (full attention, sliding window, …)."""

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.kv_cache_interface import MambaSpec

        self._manager = manager
        self._block_size = block_size
        self._groups = manager.coordinator.single_type_managers
        self.swap: Stream2LLMSwapConnector | None = None
        self._no_hit = CacheHit(manager.empty_kv_cache_blocks.blocks, 0)
        # A recurrent state holds its whole prefix in one block: it cannot be cut at a position.
        # All layers attend to everything: what a request needs is then a division.
        self._plain = self._groups[0] if [type(group) for group in self._groups] == [FullAttentionManager] else None
        self._has_recurrent_state = any(isinstance(group.kv_cache_spec, MambaSpec) for group in self._groups)

    @property
    def num_free(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    @property
    def num_total(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return int(self._manager.block_pool.num_gpu_blocks) - 1

    @property
    def no_hit(self) -> CacheHit:
        return self._no_hit

    def holds(self, request_id: str) -> bool:
        return any(group.req_to_blocks.get(request_id) for group in self._groups)

    def num_held(self, request_id: str) -> int:
        """Blocks in the request's table, shared ones included."""
        return sum(len(group.req_to_blocks.get(request_id, ())) for group in self._groups)

    def num_reclaimable(self, request_id: str) -> int:
        """Blocks that freeing the request would return: those that nobody else uses."""
        return sum(
            block.ref_cnt == 1 and not block.is_null
            for group in self._groups
            for block in group.req_to_blocks.get(request_id, ())
        )

    def cache_hit(self, request: Request) -> CacheHit:
        """Looks the request up in the prefix cache; changes nothing."""
        blocks, num_tokens = self._no_hit.blocks, 0
        if self._manager.enable_caching:
            found, num_tokens, *_ = self._manager.get_computed_blocks(request)
            blocks = found.blocks
        num_loaded = 0
        if self.swap is not None:
            num_loaded = self.swap.num_loadable(request, num_tokens - num_tokens % self._block_size)
        return CacheHit(blocks, int(num_tokens), num_loaded) if num_tokens or num_loaded else self._no_hit

    def num_loadable(self, request: Request) -> int:
        """Tokens that host memory would give back to a request that has none."""
        return 0 if self.swap is None else self.swap.num_loadable(request, 0)

    def num_on_host(self, request: Request) -> int:
        """Leading tokens of which host memory has a copy; unlike what would be loaded now, nothing but a copy changes
        it."""
        return 0 if self.swap is None else self.swap.num_swapped(request.request_id)

    def num_findable(self, request_id: str) -> int:
        """Leading tokens of the request that the prefix cache knows."""
        if not self._manager.enable_caching:
            return 0
        return int(min(group.num_cached_block.get(request_id, 0) * group.block_size for group in self._groups))

    @property
    def plain_tables(self) -> tuple[Mapping[str, Sequence[KVCacheBlock]], int]:
        """Each request's blocks by its id, and the tokens of a block, where all layers attend to everything: a request
        has room for a position that is below both together. None elsewhere."""
        return ({}, 0) if self._plain is None else (self._plain.req_to_blocks, self._plain.block_size)

    def num_needed(self, request: Request, num_computed: int, num_new: int, hit: CacheHit, lookahead: int = 0) -> int:
        """Blocks that `allocate_slots` will take for `num_new` tokens behind `num_computed`, less those that it
        returns first because they left the attention window."""
        main_tokens = num_computed + num_new
        if self._plain is not None and hit is self._no_hit:
            num_slots = min(main_tokens + lookahead, self._manager.max_model_len)
            num_held = len(self._plain.req_to_blocks.get(request.request_id, ()))
            return max(0, int(-(-num_slots // self._plain.block_size) - num_held))
        coordinator = self._manager.coordinator
        needed = coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=min(main_tokens + lookahead, self._manager.max_model_len),
            new_computed_blocks=hit.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_computed,
            num_local_computed_tokens=num_computed - hit.num_loaded,
            num_tokens_main_model=main_tokens,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        # Blocks that it returns beyond its own need come free when vLLM gets to it, too late for who comes before.
        return max(0, int(needed) - self._num_leaving_window(request, num_computed))

    def _num_leaving_window(self, request: Request, num_computed: int) -> int:
        if len(self._groups) == 1 and not self._groups[0].get_num_skipped_tokens(num_computed):
            return 0
        processed = max(0, num_computed - request.num_in_flight_tokens)
        leaving = 0
        for group in self._groups:
            num_blocks = max(0, group.get_num_skipped_tokens(processed)) // group.block_size
            for block in reversed(group.req_to_blocks.get(request.request_id, [])[:num_blocks]):
                if block.is_null:
                    break
                leaving += block.ref_cnt == 1
        return leaving

    def max_tokens(self, limit: int) -> int:
        """The longest sequence up to `limit` tokens that the empty pool could hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._num_blocks_of(middle) <= self.num_total:
                low = middle
            else:
                high = middle - 1
        return low

    def _num_blocks_of(self, num_tokens: int) -> int:
        return int(
            self._manager.coordinator.get_num_blocks_to_allocate(
                request_id="",
                num_tokens=num_tokens,
                new_computed_blocks=self._no_hit.blocks,
                num_encoder_tokens=0,
                total_computed_tokens=0,
                num_local_computed_tokens=0,
                num_tokens_main_model=num_tokens,
                apply_admission_cap=True,
            )
        )

    def resumable_at(self, request_id: str, keep: int) -> int:
        """The largest position <= `keep` where the request's KV may be cut so that computing can go on there.

        A partly filled last block may only be kept if this request alone may write it; every block that attention
        still needs at the cut must be there in every group.
        """
        if keep <= 0 or self._has_recurrent_state:
            return 0
        if len(self._groups) > 1:
            keep -= keep % self._block_size
        pool = self._manager.block_pool
        for group in self._groups:
            blocks = group.req_to_blocks.get(request_id, ())
            index, rest = divmod(keep, group.block_size)
            if index >= len(blocks) and not (rest == 0 and index == len(blocks)):
                return 0
            if rest and not pool.is_block_writable(blocks[index]):
                keep -= rest
        for group in self._groups:
            blocks = group.req_to_blocks.get(request_id, ())
            first = max(0, group.get_num_skipped_tokens(keep)) // group.block_size
            if any(block.is_null for block in blocks[first : -(-keep // group.block_size)]):
                return 0
        return keep

    def cut(self, request_id: str, keep: int) -> list[KVCacheBlock]:
        """Takes the blocks past `keep` (as `resumable_at` gave it, > 0) from the request. They belong to nobody until
        the caller returns them with `release`."""
        dropped: list[KVCacheBlock] = []
        for group in self._groups:
            blocks = group.req_to_blocks[request_id]
            num_kept = -(-keep // group.block_size)
            dropped += (block for block in blocks[num_kept:] if not block.is_null)
            del blocks[num_kept:]
            num_cached = group.num_cached_block.get(request_id, 0)
            group.num_cached_block[request_id] = min(num_cached, keep // group.block_size)
        return dropped

    def release(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Returns blocks to the pool, the last ones to be evicted first."""
        self._manager.block_pool.free_blocks(reversed(list(blocks)))
