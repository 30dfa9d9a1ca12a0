"""The simulator's stack of blocks gives what vLLM's pool gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from stream2llm_sdk.serving.simulator.block_stack import use_block_stack

NUM_BLOCKS = 24


def pools() -> tuple[BlockPool, BlockPool]:
    own, stack = (BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=16) for _ in range(2))
    manager = SimpleNamespace(enable_caching=False, block_pool=stack)
    config = SimpleNamespace(kv_cache_groups=["the only one"])
    use_block_stack(SimpleNamespace(kv_cache_manager=manager, kv_cache_config=config))
    return own, stack


@settings(max_examples=60)
@given(st.data())
def test_the_same_blocks_are_taken_in_the_same_order(data: st.DataObject) -> None:
    both = pools()
    held: list[tuple[list[int], ...]] = []
    for _ in range(30):
        free = both[0].get_num_free_blocks()
        assert both[1].get_num_free_blocks() == free
        assert both[1].get_usage() == both[0].get_usage()
        if held and data.draw(st.booleans()):
            owned = held.pop(data.draw(st.integers(0, len(held) - 1)))
            num_kept = data.draw(st.integers(0, len(owned[0])))
            for pool, blocks in zip(both, owned, strict=True):
                pool.free_blocks(reversed(blocks[num_kept:]))
            if num_kept:
                held.append(tuple(blocks[:num_kept] for blocks in owned))
        else:
            count = data.draw(st.integers(0, free))
            owned = tuple(pool.get_new_blocks(count) for pool in both)
            assert [block.block_id for block in owned[1]] == [block.block_id for block in owned[0]]
            assert all(both[1].is_block_writable(block) for block in owned[1])
            if count:
                held.append(owned)


def test_more_than_there_are_is_refused_and_nothing_is_taken() -> None:
    _, stack = pools()
    with pytest.raises(ValueError, match="24 free blocks"):
        stack.get_new_blocks(NUM_BLOCKS)
    assert stack.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_block_that_is_freed_twice_is_noticed() -> None:
    _, stack = pools()
    blocks = stack.get_new_blocks(1)
    stack.free_blocks(blocks)
    with pytest.raises(AssertionError, match="twice"):
        stack.free_blocks(blocks)
