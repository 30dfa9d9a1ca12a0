"""The worker side of the swap connector, on checked KV memory and in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput

from stream2llm_sdk.serving.simulator.clock import VirtualClock
from stream2llm_sdk.serving.simulator.kv_memory import HashArray, KVMemory, RunnerStateError
from stream2llm_sdk.serving.swap.messages import CopySample, Direction, SwapMetadata, SwapTimings

__all__ = ["CheckedSwap"]


class CheckedSwap:
    """A `KVTransfer` that copies the content of blocks, so that a wrong copy shows where it is read.

    Attributes:
        num_blocks: blocks copied so far, by direction.
        num_host_blocks_written: how many different host blocks were ever written.
        seconds_per_block: what a copied block takes, by direction; `clock` advances by it.
        lost: directions in which copies do not arrive, as with a broken worker. The executor's checks must notice.
    """

    def __init__(self, clock: VirtualClock | None = None, *, out_s: float = 0.0, in_s: float = 0.0) -> None:
        self.clock = clock
        self.seconds_per_block: dict[Direction, float] = {"out": out_s, "in": in_s}
        self.num_blocks: dict[Direction, int] = {"out": 0, "in": 0}
        self.lost: set[Direction] = set()
        self._host: dict[int, HashArray] = {}
        self._samples: list[CopySample] = []

    @property
    def num_host_blocks_written(self) -> int:
        return len(self._host)

    def handle_preemptions(self, metadata: SwapMetadata, memory: KVMemory) -> None:
        """Copies out."""
        self._note("out", len(metadata.outs), metadata.num_tokens_out)
        if metadata.outs and "out" not in self.lost:
            content = memory.read_blocks([device for device, _ in metadata.outs])
            for (_, host), row in zip(metadata.outs, content, strict=True):
                self._host[host] = row.copy()

    def start_load(self, metadata: SwapMetadata, memory: KVMemory) -> None:
        """Copies in. Raises `RunnerStateError` for a host block that was never written."""
        self._note("in", len(metadata.ins), metadata.num_tokens_in)
        if metadata.ins and "in" not in self.lost:
            memory.store_blocks([device for _, device in metadata.ins], self._rows([host for host, _ in metadata.ins]))

    def finish(self, metadata: SwapMetadata, finished_request_ids: set[str]) -> Any:
        """The measured copies, as a worker reports them."""
        if not self._samples:
            return None
        samples, self._samples = self._samples, []
        return KVConnectorOutput(kv_connector_worker_meta=SwapTimings(samples))

    def _rows(self, hosts: list[int]) -> HashArray:
        missing = [host for host in hosts if host not in self._host]
        if missing:
            raise RunnerStateError(f"a load from host block {missing[0]}, which nothing was ever saved to")
        return np.stack([self._host[host] for host in hosts])

    def _note(self, direction: Direction, num_blocks: int, num_tokens: int) -> None:
        if not num_blocks:
            return
        elapsed_s = num_blocks * self.seconds_per_block[direction]
        self.num_blocks[direction] += num_blocks
        if self.clock is not None:
            self.clock.advance(elapsed_s)
        self._samples.append(CopySample(direction, num_blocks, num_tokens, elapsed_s))
