"""What the two halves of the swap connector tell each other, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stream2llm_sdk.errors import MissingExtraError

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
except ImportError as error:
    raise MissingExtraError("vLLM", "cpu", "gpu") from error

__all__ = ["CopySample", "Direction", "SwapMetadata", "SwapStatistics", "SwapTimings"]

Direction = Literal["out", "in"]


@dataclass
class SwapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one step, from the scheduler to every worker.

    Attributes:
        outs: `(device block, host block)`, before the step writes anything.
        ins: `(host block, device block)`, after them and before the forward pass.
        num_tokens_out: tokens whose KV the outs carry.
        num_tokens_in: tokens whose KV the ins carry.
    """

    outs: list[tuple[int, int]] = field(default_factory=list)
    ins: list[tuple[int, int]] = field(default_factory=list)
    num_tokens_out: int = 0
    num_tokens_in: int = 0


@dataclass(frozen=True, slots=True)
class CopySample:
    """What the copies of one step in one direction took on one worker."""

    direction: Direction
    num_blocks: int
    num_tokens: int
    elapsed_s: float


@dataclass
class SwapTimings(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Samples from the workers to the scheduler. Each worker copies its own shard, so each sample stands by itself."""

    samples: list[CopySample] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SwapTimings:
        """Both workers' samples."""
        return SwapTimings([*self.samples, *other.samples])


@dataclass(slots=True)
class SwapStatistics:
    """Counters since the start.

    Attributes:
        num_swapped_out: preemptions whose KV went to the host, wholly or in part from an earlier copy.
        num_refused: preemptions whose KV found no room.
        num_blocks_out: blocks copied to the host.
        num_tokens_out: tokens that these preemptions saved.
        num_blocks_reused: blocks of which the host still had a valid copy.
        num_swapped_in: requests that got KV back.
        num_blocks_in: blocks copied to the device.
        num_tokens_in: tokens that were loaded instead of computed.
    """

    num_swapped_out: int = 0
    num_refused: int = 0
    num_blocks_out: int = 0
    num_tokens_out: int = 0
    num_blocks_reused: int = 0
    num_swapped_in: int = 0
    num_blocks_in: int = 0
    num_tokens_in: int = 0
