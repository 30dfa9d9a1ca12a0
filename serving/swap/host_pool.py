"""Which host block holds what: the scheduler's book of the KV that was swapped out.

The pool plans copies and never makes them. All copies of a step happen on the worker at its start, first those out
of the device, then those into it; the plans are made in any order, so a host block that a copy of this step reads or
writes gets no other owner before `end_step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["DeviceBlocks", "HostPool"]

DeviceBlocks = Sequence[Sequence[int | None]]
"""Device block ids by KV cache group and logical block; None where a group has given its block up (left window)."""


@dataclass(slots=True)
class _Copy:
    """What the host holds of one request: the KV of its first `num_tokens` tokens, as far as there are blocks.

    `blocks` maps, for each KV cache group, the logical block to its host block. Every block in it is valid up to
    `num_tokens`.
    """

    block_sizes: tuple[int, ...]
    blocks: tuple[dict[int, int], ...]
    num_tokens: int = 0

    @property
    def host_blocks(self) -> list[int]:
        return [block for group in self.blocks for block in group.values()]


class HostPool:
    """A fixed number of host blocks, each as large as a device block of all layers.

    A copy stays when its request is back on the device. Such a clean copy saves the copying when the same request is
    preempted again; it is given up, oldest first, when the blocks are needed.

    Attributes:
        kept: requests whose clean copies are not given up for now.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigurationError(f"a host pool needs at least one block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.kept: Collection[str] = ()
        self._free = deque(range(num_blocks))
        self._copies: dict[str, _Copy] = {}
        # Requests that have their KV on the device as well, in the order in which they got it back.
        self._clean: dict[str, None] = {}
        # Host blocks that a copy of this step reads or writes, and those of them that have no owner any more.
        self._busy: set[int] = set()
        self._quarantine: list[int] = []
        self._loading: set[str] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now without giving up a clean copy."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now: free ones, and those of clean copies."""
        return len(self._free) + sum(self._num_evictable(request_id) for request_id in self._clean)

    @property
    def is_empty(self) -> bool:
        """Whether the pool holds nothing of any request."""
        return not self._copies

    def num_valid(self, request_id: str) -> int:
        """How many of the request's first tokens its copy is valid for; 0 without a copy."""
        copy = self._copies.get(request_id)
        return copy.num_tokens if copy is not None else 0

    def covers(self, request_id: str, start_tokens: Sequence[int], stop_token: int) -> bool:
        """Whether the copy has every block of the positions `start_tokens[group] .. stop_token - 1`."""
        copy = self._copies.get(request_id)
        if copy is None or stop_token > copy.num_tokens:
            return False
        return all(
            index in blocks
            for blocks, size, start in zip(copy.blocks, copy.block_sizes, start_tokens, strict=True)
            for index in range(start // size, _num_blocks(stop_token, size))
        )

    def plan_out(
        self, request_id: str, device_blocks: DeviceBlocks, num_tokens: int, block_sizes: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Makes room for the KV of the request's first `num_tokens` tokens.

        Args:
            request_id: the request that is about to lose its device blocks.
            device_blocks: its blocks; what lies past `num_tokens` is ignored.
            num_tokens: tokens with computed KV.
            block_sizes: tokens per block, by group.

        Returns:
            `(device block, host block)` for each block of which the host has no valid copy; None when they do not
            fit, or when the device blocks are yet to be loaded in this step. What the host had before stays then.
        """
        if request_id in self._loading:
            self._clean.pop(request_id, None)
            return None
        wanted = [
            {index: block for index, block in enumerate(blocks[: _num_blocks(num_tokens, size)]) if block is not None}
            for blocks, size in zip(device_blocks, block_sizes, strict=True)
        ]
        # From here on it is the only copy, whether or not it grows.
        self._clean.pop(request_id, None)
        copy = self._copies.get(request_id)
        held: Sequence[dict[int, int]] = copy.blocks if copy is not None else [{} for _ in wanted]
        num_new = sum(len(group.keys() - kept.keys()) for group, kept in zip(wanted, held, strict=True))
        if not self._make_room(num_new):
            return None
        if copy is None:
            copy = self._copies[request_id] = _Copy(tuple(block_sizes), tuple({} for _ in wanted))
        pairs = self._grow(copy, wanted, num_tokens)
        copy.num_tokens = num_tokens
        self._busy.update(host for _, host in pairs)
        return pairs

    def plan_in(
        self, request_id: str, start_token: int, stop_token: int, device_blocks: DeviceBlocks
    ) -> list[tuple[int, int]]:
        """Plans to load the positions `start_token .. stop_token - 1` into the request's device blocks.

        `start_token` is where a block begins in every group, and the copy must cover what is loaded (`covers`). The
        copy stays as a clean one. An empty range says that the request is back without it.

        Returns:
            `(host block, device block)` for each block that the device has given the request in the range.
        """
        copy = self._copies[request_id]
        pairs: list[tuple[int, int]] = []
        if start_token < stop_token:
            assert stop_token <= copy.num_tokens, f"{request_id}: no copy up to position {stop_token}"
            for blocks, size, device in zip(copy.blocks, copy.block_sizes, device_blocks, strict=True):
                assert start_token % size == 0, f"{request_id}: position {start_token} is inside a block of {size}"
                for index in range(start_token // size, _num_blocks(stop_token, size)):
                    block = device[index]
                    if block is not None:
                        pairs.append((blocks[index], block))
            self._loading.add(request_id)
        self._busy.update(host for host, _ in pairs)
        self._clean.pop(request_id, None)
        self._clean[request_id] = None
        return pairs

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """The request's tokens from `num_tokens` on are others now: what the host holds of them is void."""
        copy = self._copies.get(request_id)
        if copy is None or copy.num_tokens <= num_tokens:
            return
        if num_tokens <= 0:
            self.drop(request_id)
            return
        copy.num_tokens = num_tokens
        for blocks, size in zip(copy.blocks, copy.block_sizes, strict=True):
            self._release(blocks, [index for index in blocks if index >= _num_blocks(num_tokens, size)])

    def drop(self, request_id: str) -> None:
        """Forgets all that is held of the request; nothing happens where there is nothing."""
        copy = self._copies.pop(request_id, None)
        self._clean.pop(request_id, None)
        self._loading.discard(request_id)
        if copy is not None:
            for blocks in copy.blocks:
                self._release(blocks, list(blocks))

    def clear(self) -> None:
        """Forgets everything."""
        for request_id in list(self._copies):
            self.drop(request_id)

    def end_step(self) -> None:
        """The step's copies go to the worker now; whatever is planned next comes behind them."""
        self._busy.clear()
        self._loading.clear()
        self._free.extend(self._quarantine)
        self._quarantine.clear()

    def check(self) -> None:
        """Raises `AssertionError` unless each host block is free, quarantined or owned, exactly once."""
        owned = [block for copy in self._copies.values() for block in copy.host_blocks]
        places = [*self._free, *self._quarantine, *owned]
        assert sorted(places) == list(range(self.num_blocks)), "a host block is lost, or in two places"
        assert self._clean.keys() <= self._copies.keys(), "a clean copy is not there"
        assert self._busy.isdisjoint(self._free), "a host block of a planned copy is free"
        for request_id, copy in self._copies.items():
            assert copy.num_tokens > 0, f"{request_id}: an empty copy is kept"
            for blocks, size in zip(copy.blocks, copy.block_sizes, strict=True):
                last = _num_blocks(copy.num_tokens, size)
                assert all(index < last for index in blocks), f"{request_id}: a block past {copy.num_tokens} tokens"

    def _grow(self, copy: _Copy, wanted: list[dict[int, int]], num_tokens: int) -> list[tuple[int, int]]:
        """Gives `copy` exactly the `wanted` blocks, and returns the copies that this takes."""
        pairs: list[tuple[int, int]] = []
        for blocks, size, group in zip(copy.blocks, copy.block_sizes, wanted, strict=True):
            self._release(blocks, blocks.keys() - group.keys())
            for index, device in group.items():
                is_valid = index in blocks and copy.num_tokens >= min(num_tokens, (index + 1) * size)
                if index not in blocks:
                    blocks[index] = self._free.popleft()
                if not is_valid:
                    pairs.append((device, blocks[index]))
        return pairs

    def _make_room(self, num_blocks: int) -> bool:
        """Gives up clean copies until `num_blocks` are free; none if that would not be enough."""
        if num_blocks > len(self._free) and num_blocks > self.num_available:
            return False
        while num_blocks > len(self._free):
            self.drop(next(request_id for request_id in self._clean if self._num_evictable(request_id)))
        return True

    def _num_evictable(self, request_id: str) -> int:
        if request_id in self.kept:
            return 0
        return sum(block not in self._busy for block in self._copies[request_id].host_blocks)

    def _release(self, blocks: dict[int, int], indices: Sequence[int] | set[int]) -> None:
        for index in sorted(indices):
            block = blocks.pop(index)
            (self._quarantine if block in self._busy else self._free).append(block)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
