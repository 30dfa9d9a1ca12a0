"""What must hold of vLLM's KV cache manager between any two steps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream2llm_sdk.serving.simulator.content import prefix_hashes
from stream2llm_sdk.serving.simulator.kv_memory import KVMemory

__all__ = ["InvariantChecker", "InvariantError"]


class InvariantError(AssertionError):
    """The bookkeeping of blocks, hashes or progress contradicts itself."""


class InvariantChecker:
    """Checks one scheduler and its KV cache manager; remembers what each block hash stood for."""

    def __init__(self, scheduler: Any, memory: KVMemory | None = None) -> None:
        from vllm.v1.core.kv_cache_utils import get_group_id, make_block_hash_with_group_id, resolve_block_hashes

        self._group_of_hash = get_group_id
        self._block_hashes = resolve_block_hashes
        self._hash_of_group = make_block_hash_with_group_id
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._groups = self._manager.coordinator.single_type_managers
        self._memory = memory
        self._hashed_content: dict[bytes, NDArray[np.uint64]] = {}  # by block hash, which names the group too

    def check(self) -> None:
        """Raise `InvariantError` for the first contradiction."""
        free = self._free_block_ids()
        self._check_references(free)
        for request in self._scheduler.requests.values():
            self._check_progress(request)
            self._check_request_hashes(request)
        if self._memory is not None:
            self._check_hashed_content(self._memory)

    def _free_block_ids(self) -> set[int]:
        queue = self._pool.free_block_queue
        block, previous, free = queue.fake_free_list_head.next_free_block, queue.fake_free_list_head, set()
        while block is not queue.fake_free_list_tail:
            _require(block is not None, "the free queue ends before its tail")
            _require(block.prev_free_block is previous, f"block {block.block_id} points back to the wrong block")
            _require(block.block_id not in free, f"block {block.block_id} is in the free queue twice")
            _require(block.ref_cnt == 0, f"block {block.block_id} is free and referenced {block.ref_cnt} times")
            free.add(block.block_id)
            block, previous = block.next_free_block, block
        _require(queue.fake_free_list_tail.prev_free_block is previous, "the free queue's tail is out of line")
        _require(
            len(free) == queue.num_free_blocks,
            f"{len(free)} blocks are in the free queue, which counts {queue.num_free_blocks}",
        )
        return free

    def _check_references(self, free: set[int]) -> None:
        holders = Counter(block.block_id for block in self._held_blocks())
        for block in self._pool.blocks:
            if block.is_null:
                continue
            _require(
                block.ref_cnt == holders[block.block_id],
                f"block {block.block_id} counts {block.ref_cnt} references, {holders[block.block_id]} tables hold it",
            )
            _require(
                (block.ref_cnt == 0) == (block.block_id in free),
                f"block {block.block_id} with {block.ref_cnt} references is on the wrong side of the free queue",
            )
        used = sum(not block.is_null and block.ref_cnt > 0 for block in self._pool.blocks)
        total = self._pool.num_gpu_blocks - 1  # one is the null block
        _require(len(free) + used == total, f"{len(free)} free + {used} used blocks are not {total}")

    def _held_blocks(self) -> Iterator[Any]:
        for manager in self._groups:
            for request_id, blocks in manager.req_to_blocks.items():
                _require(
                    not blocks or request_id in self._scheduler.requests,
                    f"request {request_id!r} is gone but still holds {len(blocks)} blocks",
                )
                yield from (block for block in blocks if not block.is_null)
        for _, blocks in self._scheduler.deferred_frees:
            yield from (block for block in blocks if not block.is_null)

    def _check_progress(self, request: Any) -> None:
        name, computed = f"request {request.request_id!r}", request.num_computed_tokens
        known = request.num_tokens + request.num_output_placeholders
        _require(0 <= computed <= known, f"{name} has {computed} computed tokens of {known}")
        for group, manager in enumerate(self._groups):
            blocks = manager.req_to_blocks.get(request.request_id, [])
            size, cached = manager.block_size, manager.num_cached_block.get(request.request_id, 0)
            _require(
                len(blocks) * size >= computed,
                f"{name}, group {group}: {len(blocks)} blocks of {size} for {computed} computed tokens",
            )
            attended = blocks[manager.get_num_skipped_tokens(computed) // size : -(-computed // size)]
            _require(
                not any(block.is_null for block in attended),
                f"{name}, group {group}: an attended block is missing",
            )
            _require(
                cached * size <= computed,
                f"{name}, group {group}: {cached} blocks cached, {computed} tokens computed",
            )

    def _check_request_hashes(self, request: Any) -> None:
        if request._block_hasher is None:
            return
        fresh = copy.copy(request)
        fresh.block_hashes = []
        hashes = request._block_hasher(fresh)
        name = f"request {request.request_id!r}"
        _require(request.block_hashes == hashes, f"{name}: its block hashes are not those of its tokens")
        content: NDArray[np.uint64] | None = None
        for group, manager in enumerate(self._groups):
            per_block = self._block_hashes(hashes, self._pool.hash_block_size, manager.block_size)
            for index, block in enumerate(manager.req_to_blocks.get(request.request_id, [])):
                if block.is_null or block.block_hash is None:
                    continue
                own = self._hash_of_group(per_block[index], group) if index < len(per_block) else None
                _require(
                    block.block_hash == own,
                    f"{name}, group {group}: block {block.block_id}, number {index} of its table, has another "
                    f"prefix's hash",
                )
                if block.block_hash not in self._hashed_content:
                    content = prefix_hashes(request.all_token_ids) if content is None else content
                    first = index * manager.block_size
                    self._hashed_content[block.block_hash] = content[first : first + manager.block_size]

    def _check_hashed_content(self, memory: KVMemory) -> None:
        for block in self._pool.blocks:
            if block.block_hash is None:
                continue
            content = self._hashed_content.get(block.block_hash)
            group = self._group_of_hash(block.block_hash)
            _require(
                content is None or memory.holds(block.block_id, group, content),
                f"block {block.block_id} can be found by its hash but does not hold that prefix",
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
