"""Copies of KV blocks between device memory and a pool of host memory. Needs torch only.

A KV cache is taken apart into regions, byte matrices of one row for each block, and the host has a row of the same
length for each of its blocks. On a GPU every copy is queued on the stream that is current when it is asked for, the
one that computes: a copy out reads what the kernels before it wrote, a kernel queued behind it may overwrite the
source at once, and kernels behind a copy in read what it brought. The host waits for none of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stream2llm_sdk.errors import ConfigurationError, UnsupportedFeatureError

__all__ = ["BlockCopier", "CopyTimer", "block_dim"]

_ALIGNMENT = 4096


def block_dim(shape: Sequence[int], num_blocks: int) -> int:
    """Which dimension of a KV cache counts blocks: 0 of (blocks, heads, tokens, size), 1 of (2, blocks, …).

    Raises:
        ConfigurationError: none has the length `num_blocks`, or more than one; then it has to be said.
    """
    found = [index for index, length in enumerate(shape) if length == num_blocks]
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} dimensions of the KV cache shape {tuple(shape)} have the length of {num_blocks} blocks; "
            f"say which one counts blocks (block_dims)"
        )
    return found[0]


class CopyTimer:
    """How long one batch of copies took, once it is done."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        self._elapsed_s: float | None = None
        self._start_s = time.perf_counter()
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record(torch.cuda.current_stream(device))

    def stop(self, device: torch.device) -> None:
        """Everything to be timed has been queued."""
        if self._events is None:
            self._elapsed_s = time.perf_counter() - self._start_s
        else:
            self._events[1].record(torch.cuda.current_stream(device))

    def elapsed_s(self) -> float | None:
        """Seconds from the first copy's start to the last one's end on the device; None while they run."""
        if self._elapsed_s is None and self._events is not None and self._events[1].query():
            self._elapsed_s = self._events[0].elapsed_time(self._events[1]) / 1000
        return self._elapsed_s


class BlockCopier:
    """Copies whole blocks of all KV caches at once.

    Args:
        caches: the KV caches by name, all on one device. Memory that several of them share is copied once.
        num_blocks: blocks of the device.
        num_host_blocks: blocks of the host pool. On a GPU its memory is pinned.
        block_dims: which dimension counts blocks, for all caches or by name; by default it is found from `num_blocks`
            (`block_dim`).

    Raises:
        ConfigurationError: a block dimension that cannot be told, or no memory for the pool.
        UnsupportedFeatureError: a cache whose blocks are not contiguous in memory.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        num_host_blocks: int,
        block_dims: Mapping[str, int] | int | None = None,
    ) -> None:
        devices = {cache.device for cache in caches.values()}
        if len(devices) != 1:
            raise ConfigurationError(f"the KV caches must be on one device, got {sorted(map(str, devices))}")
        self.device = devices.pop()
        self._regions = _regions(caches, num_blocks, block_dims)
        self._host_memory = _host_memory(
            sum(_padded(region.shape[1] * num_host_blocks) for region in self._regions), self.device
        )
        self._host = _host_rows(self._host_memory, self._regions, num_host_blocks)
        self._batch_copy = _batch_copy_op(self.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all caches."""
        return sum(region.shape[1] for region in self._regions)

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> CopyTimer:
        """Copies `(device block, host block)` pairs to the host."""
        return self._copy([device for device, _ in pairs], [host for _, host in pairs], to_host=True)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> CopyTimer:
        """Copies `(host block, device block)` pairs to the device."""
        return self._copy([device for _, device in pairs], [host for host, _ in pairs], to_host=False)

    def synchronize(self) -> None:
        """Returns when every copy asked for so far on the current stream is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Gives the host memory back. The copier cannot be used any more."""
        self.synchronize()
        if self.device.type == "cuda" and self._host_memory.numel():
            torch.cuda.cudart().cudaHostUnregister(self._host_memory.data_ptr())
        self._host = []
        self._host_memory = torch.empty(0, dtype=torch.uint8)

    def _copy(self, device_blocks: list[int], host_blocks: list[int], *, to_host: bool) -> CopyTimer:
        timer = CopyTimer(self.device)
        if device_blocks:
            if self._batch_copy is not None:
                self._copy_batch(device_blocks, host_blocks, to_host)
            elif self.device.type == "cpu":
                self._copy_runs(device_blocks, host_blocks, to_host)
            else:
                self._copy_staged(device_blocks, host_blocks, to_host)
        timer.stop(self.device)
        return timer

    def _copy_runs(self, device_blocks: list[int], host_blocks: list[int], to_host: bool) -> None:
        """Between two places in host memory: neighbours that stay neighbours are one copy."""
        runs = list(_runs(device_blocks, host_blocks))
        for region, host in zip(self._regions, self._host, strict=True):
            for device_start, host_start, length in runs:
                there = region[device_start : device_start + length]
                here = host[host_start : host_start + length]
                source, target = (there, here) if to_host else (here, there)
                target.copy_(source)

    def _copy_staged(self, device_blocks: list[int], host_blocks: list[int], to_host: bool) -> None:
        """Gathers on the device what becomes one run on the host. The staging memory belongs to the current stream,
        so torch gives it to nobody else before the copy has run."""
        order = sorted(range(len(host_blocks)), key=host_blocks.__getitem__)
        hosts = [host_blocks[index] for index in order]
        # From pageable memory the transfer of the indices would wait for the kernels before it.
        pinned = self.device.type == "cuda"
        indices = torch.tensor([device_blocks[index] for index in order], pin_memory=pinned)
        rows = indices.to(self.device, non_blocking=True)
        runs = list(_runs(range(len(hosts)), hosts))
        for region, host in zip(self._regions, self._host, strict=True):
            if to_host:
                staging = region.index_select(0, rows)
            else:
                staging = torch.empty((len(hosts), region.shape[1]), dtype=region.dtype, device=self.device)
            for start, host_start, length in runs:
                there, here = staging[start : start + length], host[host_start : host_start + length]
                source, target = (there, here) if to_host else (here, there)
                target.copy_(source, non_blocking=True)
            if not to_host:
                region.index_copy_(0, rows, staging)

    def _copy_batch(self, device_blocks: list[int], host_blocks: list[int], to_host: bool) -> None:
        """One call to the driver for all of it, through vLLM's own operation."""
        assert self._batch_copy is not None
        device, host, sizes = [], [], []
        merged = torch.tensor(list(_runs(device_blocks, host_blocks)))
        single = torch.tensor([[d, h, 1] for d, h in zip(device_blocks, host_blocks, strict=True)])
        for region, rows in zip(self._regions, self._host, strict=True):
            row_bytes = region.shape[1]
            # Rows with something between them cannot be copied as one.
            starts = merged if region.stride(0) == row_bytes else single
            device.append(region.data_ptr() + starts[:, 0] * region.stride(0))
            host.append(rows.data_ptr() + starts[:, 1] * row_bytes)
            sizes.append(starts[:, 2] * row_bytes)
        there, here = torch.cat(device), torch.cat(host)
        source, target = (there, here) if to_host else (here, there)
        # The sources' order of access stays the stream's (False): the kernels before may still be writing them.
        self._batch_copy(source, target, torch.cat(sizes), False)


def _regions(
    caches: Mapping[str, torch.Tensor], num_blocks: int, block_dims: Mapping[str, int] | int | None
) -> list[torch.Tensor]:
    """The caches as `(num_blocks, bytes)` matrices, each piece of memory once."""
    regions: dict[tuple[int, int], torch.Tensor] = {}
    for name, cache in caches.items():
        if isinstance(block_dims, Mapping):
            dim = block_dims[name]
        else:
            dim = block_dim(cache.shape, num_blocks) if block_dims is None else block_dims
        if cache.shape[dim] != num_blocks:
            raise ConfigurationError(
                f"dimension {dim} of the KV cache {name!r} of shape {tuple(cache.shape)} does not count {num_blocks} "
                f"blocks"
            )
        for region in _pieces(name, cache.movedim(dim, 0)):
            regions.setdefault((region.data_ptr(), region.shape[1]), region)
    return list(regions.values())


def _pieces(name: str, cache: torch.Tensor) -> list[torch.Tensor]:
    """A cache with blocks in front as byte matrices with contiguous rows: one, or one each for keys and values."""
    row = 1
    outer: list[int] = []
    for dim in sorted(range(1, cache.ndim), key=lambda dim: (cache.stride(dim), cache.shape[dim])):
        length = cache.shape[dim]
        if length != 1 and (outer or cache.stride(dim) != row):
            outer.append(dim)
        else:
            row *= length
    if len(outer) > 1:
        raise UnsupportedFeatureError(
            f"the blocks of the KV cache {name!r} (shape {tuple(cache.shape)}, strides {cache.stride()}) lie scattered "
            f"in memory and cannot be swapped"
        )
    parts = cache.unbind(outer[0]) if outer else (cache,)
    return [part.as_strided((part.shape[0], row), (part.stride(0), 1)).view(torch.uint8) for part in parts]


def _host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Pinned for a GPU. Registered as it is: torch's own pinned allocations take the next power of two."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ConfigurationError(f"no host memory for a pool of {num_bytes} bytes; give the pool fewer") from error
    if device.type == "cuda" and num_bytes:
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if status != torch.cuda.cudart().cudaError.success:
            raise ConfigurationError(
                f"{num_bytes} bytes of host memory cannot be pinned ({status}); give the host pool fewer, or raise the "
                f"limit of locked memory (ulimit -l)"
            )
    return memory


def _host_rows(memory: torch.Tensor, regions: Sequence[torch.Tensor], num_host_blocks: int) -> list[torch.Tensor]:
    rows, offset = [], 0
    for region in regions:
        size = region.shape[1] * num_host_blocks
        rows.append(memory[offset : offset + size].view(num_host_blocks, region.shape[1]))
        offset += _padded(size)
    return rows


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _runs(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int, int]]:
    """`(first, second, length)` of the stretches in which both count up by one."""
    runs: list[tuple[int, int, int]] = []
    for a, b in zip(first, second, strict=True):
        if runs:
            start_a, start_b, length = runs[-1]
            if a == start_a + length and b == start_b + length:
                runs[-1] = (start_a, start_b, length + 1)
                continue
        runs.append((a, b, 1))
    return runs


def _batch_copy_op(device: torch.device) -> Any:
    """vLLM's batched copy, where there is a GPU and this process has loaded vLLM's kernels, else None."""
    return getattr(torch.ops._C_cache_ops, "swap_blocks_batch", None) if device.type == "cuda" else None
