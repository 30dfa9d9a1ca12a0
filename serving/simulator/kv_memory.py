"""KV memory that knows what it holds.

Every slot `(block, offset)` stores the hash of the token prefix whose KV was written there, marked with the
KV cache group that wrote it: the groups of a hybrid model share one pool of physical blocks, so a block that
changes hands between groups changes its content. Reading is comparing: a request that attends to a position
whose slot holds anything else than the hash of its own tokens has met stale, foreign or missing KV.

Checks are incremental. What a request has verified, or written itself, stays verified until somebody else
writes into one of its blocks; so a decode step costs the same however long the context is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stream2llm_sdk.serving.simulator.content import TokenRow

__all__ = [
    "BlockTable",
    "GroupLayout",
    "KVCheckError",
    "KVContentError",
    "KVMemory",
    "KVWriteError",
    "RunnerStateError",
]

NULL_BLOCK_ID = 0
"""vLLM's placeholder for "no block here"; a correct engine neither reads nor writes it."""

_GROUP_MARK = 0xA24BAED4963EE407

HashArray = NDArray[np.uint64]


class KVCheckError(AssertionError):
    """The scheduler made the engine do something that a correct one never does."""


class KVContentError(KVCheckError):
    """A request attends to a position whose KV is not that of its own tokens."""


class KVWriteError(KVCheckError):
    """KV was written where another request was reading, or into no block at all."""


class RunnerStateError(KVCheckError):
    """The scheduler's message does not fit what the model runner keeps; the real one would crash or drift."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: tokens per block, and how far back its layers attend.

    `window` counts the attended tokens including the current one; None attends to everything.
    """

    block_size: int
    window: int | None = None

    def first_attended(self, position: int) -> int:
        """The oldest position that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class BlockTable:
    """The blocks that one request of the runner uses, per group, and what of them is verified.

    Made and changed through `KVMemory` only, which keeps count of who uses which block.
    """

    __slots__ = ("blocks", "owner", "touched", "verified")

    def __init__(self, owner: str, num_groups: int) -> None:
        self.owner = owner
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        # Per group the half-open interval of positions known to hold the owner's content.
        self.verified: list[tuple[int, int]] = [(0, 0)] * num_groups
        # Somebody else wrote into one of the blocks since the last check.
        self.touched = False


class KVMemory:
    """The KV cache of one device.

    Args:
        num_blocks: physical blocks, shared by all groups.
        groups: the layout of each group of layers.
    """

    def __init__(self, num_blocks: int, groups: Sequence[GroupLayout]) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.slots_per_block = max(group.block_size for group in self.groups)
        # 0 means "nothing was ever written here".
        self._slots: HashArray = np.zeros((num_blocks, self.slots_per_block), dtype=np.uint64)
        self._marks = tuple(np.uint64((index + 1) * _GROUP_MARK & 0xFFFFFFFFFFFFFFFF) for index in range(len(groups)))
        self._users: dict[int, list[BlockTable]] = {}
        self._last_writer: dict[int, str] = {}

    def new_table(self, owner: str) -> BlockTable:
        """An empty block table for the request `owner`."""
        return BlockTable(owner, len(self.groups))

    def append_blocks(self, table: BlockTable, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks, by `block_ids` per group, at the end of `table`."""
        if len(block_ids) != len(self.groups):
            raise RunnerStateError(
                f"request {table.owner!r} was sent blocks for {len(block_ids)} KV cache groups, not {len(self.groups)}"
            )
        for blocks, new_blocks in zip(table.blocks, block_ids, strict=True):
            blocks.extend(new_blocks)
            for block in new_blocks:
                if not 0 <= block < self.num_blocks:
                    raise RunnerStateError(
                        f"request {table.owner!r} was sent block {block} of {self.num_blocks} blocks"
                    )
                if block != NULL_BLOCK_ID:
                    self._users.setdefault(block, []).append(table)

    def replace_blocks(self, table: BlockTable, block_ids: Sequence[Sequence[int]]) -> None:
        """Make `block_ids` the whole of `table`; nothing of it counts as verified any more."""
        self.release(table)
        self.append_blocks(table, block_ids)

    def release(self, table: BlockTable) -> None:
        """Empty `table`. The contents stay where they are until somebody writes over them."""
        for group, blocks in enumerate(table.blocks):
            for block in blocks:
                if block != NULL_BLOCK_ID:
                    users = self._users[block]
                    users.remove(table)
                    if not users:
                        del self._users[block]
            table.blocks[group] = []
            table.verified[group] = (0, 0)
        table.touched = False

    def write(self, table: BlockTable, row: TokenRow, start: int, stop: int) -> None:
        """Store the KV of the positions from `start` to before `stop` of `row` in `table`, in every group.

        Every other table that uses one of the blocks must be checked again. Raises `KVWriteError` for
        a position that has no block.
        """
        for group, layout in enumerate(self.groups):
            first, last = start // layout.block_size, (stop - 1) // layout.block_size
            blocks = table.blocks[group][first : last + 1]
            if len(blocks) <= last - first or NULL_BLOCK_ID in blocks:
                raise KVWriteError(
                    f"request {table.owner!r}, group {group}: no block to write position "
                    f"{self._first_without_block(table, group, start, stop)} to"
                )
            if stop - start == 1:
                self._slots[blocks[0], start % layout.block_size] = row.hashes[start] ^ self._marks[group]
            else:
                positions = np.arange(start, stop)
                block_of = np.array(blocks)[positions // layout.block_size - first]
                self._slots[block_of, positions % layout.block_size] = row.hashes[start:stop] ^ self._marks[group]
            self._note_written(blocks, table)

    def check(self, table: BlockTable, row: TokenRow, start: int, stop: int) -> None:
        """Check all that the positions of `row` from `start` to before `stop`, just written to `table`, attend to.

        Raises `KVContentError` for content that was never this request's, `KVWriteError` for
        content that was and has been overwritten.
        """
        for group, layout in enumerate(self.groups):
            low = layout.first_attended(start)
            known_low, known_high = table.verified[group]
            if table.touched:
                self._compare(table, row, group, low, stop, start)
            else:
                self._compare(table, row, group, low, min(known_low, start), start)
                self._compare(table, row, group, max(known_high, low), start, start)
            table.verified[group] = (low, stop)
        table.touched = False

    def distrust(self, table: BlockTable, position: int) -> None:
        """Verify `table` again from `position` on: the owner's own tokens there are not what they were."""
        table.verified = [(low, max(low, min(high, position))) for low, high in table.verified]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, destination)` each, all sources being read first."""
        pairs = np.array(list(copies), dtype=np.int64).reshape(-1, 2)
        self._slots[pairs[:, 1]] = self._slots[pairs[:, 0]]
        self._note_written(pairs[:, 1].tolist(), None)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Forget the content of `blocks`."""
        self._slots[np.array(blocks, dtype=np.int64)] = 0
        self._note_written(blocks, None)

    def read_blocks(self, blocks: Sequence[int]) -> HashArray:
        """The raw content of `blocks`, one row each; meaningful only to `store_blocks`."""
        content: HashArray = self._slots[np.array(blocks, dtype=np.int64)]
        return content

    def store_blocks(self, blocks: Sequence[int], content: HashArray) -> None:
        """Put back the `content` that `read_blocks` returned, into `blocks` (the same ones or others)."""
        self._slots[np.array(blocks, dtype=np.int64)] = content
        self._note_written(blocks, None)

    def holds(self, block: int, group: int, hashes: HashArray) -> bool:
        """Whether `block` holds, from its first slot on, the content `hashes` of `group`."""
        return bool(np.array_equal(self._slots[block, : len(hashes)], hashes ^ self._marks[group]))

    def _note_written(self, blocks: Sequence[int], writer: BlockTable | None) -> None:
        for block in blocks:
            users = self._users.get(block)
            if users is None or (len(users) == 1 and users[0] is writer):
                continue
            self._last_writer[block] = repr(writer.owner) if writer else "a block copy"
            for user in users:
                user.touched = True

    def _compare(self, table: BlockTable, row: TokenRow, group: int, low: int, high: int, start: int) -> None:
        """Compare the positions `low .. high - 1`; those from `start` on were written in this step."""
        if low >= high:
            return
        size = self.groups[group].block_size
        first, last = low // size, (high - 1) // size
        blocks = table.blocks[group][first : last + 1]
        if len(blocks) <= last - first:
            raise KVContentError(
                f"request {table.owner!r}, group {group}: position {(first + len(blocks)) * size} is taken as "
                f"computed but has no block"
            )
        positions = np.arange(low, high)
        block_of = np.array(blocks)[positions // size - first]
        held = self._slots[block_of, positions % size]
        wrong = np.flatnonzero(held != row.hashes[low:high] ^ self._marks[group])
        if len(wrong):
            position, block = int(positions[wrong[0]]), int(block_of[wrong[0]])
            self._raise_mismatch(table, group, position, block, start, bool(held[wrong[0]]))

    def _raise_mismatch(
        self, table: BlockTable, group: int, position: int, block: int, start: int, written: bool
    ) -> None:
        where = f"request {table.owner!r}, group {group}: position {position}, in block {block},"
        low, high = table.verified[group]
        if position >= start or (low <= position < high and table.touched):
            writer = self._last_writer.get(block, "another write")
            raise KVWriteError(f"{where} was overwritten by {writer} while the request was reading it")
        if block == NULL_BLOCK_ID:
            raise KVContentError(f"{where} has been given up, but the request still attends to it")
        held = "KV of other tokens" if written else "nothing"
        raise KVContentError(f"{where} holds {held}")

    def _first_without_block(self, table: BlockTable, group: int, start: int, stop: int) -> int:
        size, blocks = self.groups[group].block_size, table.blocks[group]
        return next(
            position
            for position in range(start, stop)
            if position // size >= len(blocks) or blocks[position // size] == NULL_BLOCK_ID
        )
