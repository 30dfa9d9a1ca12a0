"""Swapping as a KV connector of vLLM: the scheduler's half keeps the book, the workers' half copies.

The scheduler says whose blocks go (`swap_out`, before it frees them). The copies travel with the next step's message
and every worker makes them, by block id, in its own memory: those out when the step begins (`handle_preemptions`),
before it writes anything, and those in before the forward pass (`start_load_kv`). Steps reach a worker one after
another and all copies are queued on the stream that computes. So with two steps in flight the copy out still reads
what the earlier step wrote, and a freed block may be handed to another request in the very same step.

That order is also why the role is `kv_producer`. As a consumer (`kv_both` too), vLLM takes a connector for one that
writes blocks beside the stream, and with asynchronous scheduling keeps a victim's blocks back until the steps in
flight have ended (`defer_block_free`); the blocks that a preemption was to free would not be free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, UnsupportedFeatureError
from stream2llm_sdk.serving.swap.host_pool import HostPool
from stream2llm_sdk.serving.swap.kv_regions import block_bytes, check_supported, region_tensors
from stream2llm_sdk.serving.swap.messages import CopySample, Direction, SwapMetadata, SwapStatistics, SwapTimings

try:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
except ImportError as error:
    raise MissingExtraError("vLLM", "cpu", "gpu") from error

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.swap.block_copies import BlockCopier, CopyTimer

__all__ = ["Stream2LLMSwapConnector", "swap_config"]


def swap_config(*, num_host_blocks: int | None = None, host_bytes: int | None = None) -> KVTransferConfig:
    """vLLM's `kv_transfer_config` for an engine with swap space.

    Args:
        num_host_blocks: host blocks, each as large as a device block of all layers.
        host_bytes: instead of it, bytes of host memory for each worker.

    Raises:
        ConfigurationError: not exactly one of them, or less than one block.
    """
    options = {"num_host_blocks": num_host_blocks, "host_bytes": host_bytes}
    given = {name: value for name, value in options.items() if value is not None}
    _check_size(given)
    return KVTransferConfig(
        kv_connector=Stream2LLMSwapConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_producer",
        kv_connector_extra_config=given,
    )


class Stream2LLMSwapConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of the swap, by its role.

    Attributes of the scheduler's half:
        pool: the book of the host blocks.
        statistics: counters since the start.
        num_loaded: tokens that requests admitted of late load, by id; the scheduler clears it.
        num_held_back: how many last tokens of a request (by id) must not be computed yet; the scheduler sets it.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        if self._kv_transfer_config.is_kv_consumer:
            raise ConfigurationError(
                f"kv_role={self._kv_transfer_config.kv_role!r} would keep the blocks of victims back; the swap "
                f"connector needs 'kv_producer' (swap_config gives it)"
            )
        num_host_blocks = _num_host_blocks(self._kv_transfer_config.kv_connector_extra_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.pool = HostPool(num_host_blocks)
            self.statistics = SwapStatistics()
            self.num_held_back: Callable[[str], int] = _none_held_back
            self.num_loaded: dict[str, int] = {}
            self._metadata = SwapMetadata()
            self._samples: list[CopySample] = []
        else:
            self._num_host_blocks = num_host_blocks
            self._copier: BlockCopier | None = None
            self._running: list[tuple[Direction, int, int, CopyTimer]] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV that is not saved is computed again, and nobody waits for it."""
        return False

    # ---- scheduler: what our own scheduler calls ----------------------------------------------------------------

    def swap_out(self, request: Request) -> bool:
        """Plans to save the KV that the request holds on the device. Call it before the blocks are freed.

        Tokens that are still being sampled are left out: they may be sampled again after the preemption. Returns
        False when the host has no room, or nothing could be loaded back; an older copy, valid for fewer tokens, then
        stays and is loaded.
        """
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if num_tokens <= 0 or request.skip_reading_prefix_cache:
            return False
        groups = self._groups
        held = [group.req_to_blocks.get(request.request_id, ()) for group in groups]
        device_blocks = [[None if block.is_null else block.block_id for block in blocks] for blocks in held]
        sizes = [group.block_size for group in groups]
        pairs = self.pool.plan_out(request.request_id, device_blocks, num_tokens, sizes)
        if pairs is None:
            self.statistics.num_refused += 1
            return False
        num_saved = sum(
            block is not None
            for blocks, size in zip(device_blocks, sizes, strict=True)
            for block in blocks[: -(-num_tokens // size)]
        )
        self._metadata.outs += pairs
        self._metadata.num_tokens_out += num_tokens * len(pairs) // num_saved
        self.statistics.num_swapped_out += 1
        self.statistics.num_tokens_out += num_tokens
        self.statistics.num_blocks_out += len(pairs)
        self.statistics.num_blocks_reused += num_saved - len(pairs)
        return True

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """The prompt is another one from position `num_tokens` on (the LCP). Call it for requests on the device too:
        their copy may be kept for a later preemption."""
        self.pool.truncate(request_id, num_tokens)

    def drop(self, request_id: str) -> None:
        """Forgets the request's copy."""
        self.pool.drop(request_id)

    def num_swapped(self, request_id: str) -> int:
        """How many of the request's first tokens the host has a valid copy of, on the device or not."""
        return self.pool.num_valid(request_id)

    def num_loadable(self, request: Request, num_computed_tokens: int) -> int:
        """How many tokens behind `num_computed_tokens`, which the device has and which end with a block, admitting
        the request would load. At least one token is left to compute, besides those held back."""
        request_id = request.request_id
        stop = self._stop(request)
        if stop <= num_computed_tokens or request.skip_reading_prefix_cache:
            return 0
        starts = [
            max(num_computed_tokens, group.get_num_skipped_tokens(stop) // group.block_size * group.block_size)
            for group in self._groups
        ]
        return stop - num_computed_tokens if self.pool.covers(request_id, starts, stop) else 0

    def take_samples(self) -> list[CopySample]:
        """What copies really took, as far as it is known and was not taken before."""
        samples, self._samples = self._samples, []
        return samples

    def _stop(self, request: Request) -> int:
        """Where a load of the request would end, at most."""
        num_valid = self.pool.num_valid(request.request_id)
        if not num_valid:
            return 0
        return min(num_valid, int(request.num_tokens) - 1 - self.num_held_back(request.request_id))

    @property
    def _groups(self) -> Any:
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager.coordinator.single_type_managers

    # ---- scheduler: what vLLM calls -----------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False):
            # A hit inside a block makes the worker copy it, in the V2 model runner before a connector may save.
            raise UnsupportedFeatureError(
                "swapping does not work with prefix-cache hits inside a block; leave prefix_match_unit unset, or set "
                "enable_prefix_caching=False"
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.num_loadable(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        request_id = request.request_id
        if not self.pool.num_valid(request_id):
            return
        start = stop = 0
        if num_external_tokens > 0:
            stop = self._stop(request)
            start = stop - num_external_tokens
        device_blocks = [[None if block.is_null else block.block_id for block in group] for group in blocks.blocks]
        pairs = self.pool.plan_in(request_id, start, stop, device_blocks)
        if num_external_tokens > 0:
            self._metadata.ins += pairs
            self._metadata.num_tokens_in += num_external_tokens
            self.num_loaded[request_id] = num_external_tokens
            self.statistics.num_swapped_in += 1
            self.statistics.num_blocks_in += len(pairs)
            self.statistics.num_tokens_in += num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> SwapMetadata:
        metadata, self._metadata = self._metadata, SwapMetadata()
        self.pool.end_step()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        timings = connector_output.kv_connector_worker_meta
        if isinstance(timings, SwapTimings):
            self.add_samples(timings.samples)

    def add_samples(self, samples: Iterable[CopySample]) -> None:
        """What copies took, for `take_samples`."""
        self._samples += samples

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.pool.drop(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.pool.drop(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Forgets every copy, those of swapped-out requests too: they are computed again, as the caller wants."""
        self.pool.clear()
        return True

    # ---- worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        from stream2llm_sdk.serving.swap.block_copies import BlockCopier

        tensors = region_tensors(self._kv_cache_config, kv_caches)
        self._copier = BlockCopier(tensors, self._kv_cache_config.num_blocks, self._num_host_blocks, block_dims=0)

    def handle_preemptions(self, kv_connector_metadata: SwapMetadata) -> None:
        if kv_connector_metadata.outs:
            assert self._copier is not None
            timer = self._copier.copy_out(kv_connector_metadata.outs)
            self._running.append(("out", len(kv_connector_metadata.outs), kv_connector_metadata.num_tokens_out, timer))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if metadata.ins:
            assert self._copier is not None
            timer = self._copier.copy_in(metadata.ins)
            self._running.append(("in", len(metadata.ins), metadata.num_tokens_in, timer))

    def build_connector_worker_meta(self) -> SwapTimings | None:
        """The copies that ended since the last step, without waiting for any."""
        samples = []
        while self._running and (elapsed_s := self._running[0][3].elapsed_s()) is not None:
            direction, num_blocks, num_tokens, _ = self._running.pop(0)
            samples.append(CopySample(direction, num_blocks, num_tokens, elapsed_s))
        return SwapTimings(samples) if samples else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are ahead of the forward pass on its stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved while a layer computes."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: saves are ahead of whatever overwrites their source."""

    def shutdown(self) -> None:
        copier = getattr(self, "_copier", None)
        if copier is not None:
            copier.close()
            self._copier = None


def _none_held_back(request_id: str) -> int:
    return 0


def _check_size(options: Mapping[str, Any]) -> None:
    sizes = {name: options[name] for name in ("num_host_blocks", "host_bytes") if options.get(name) is not None}
    if len(sizes) != 1:
        raise ConfigurationError(f"give the swap space either num_host_blocks or host_bytes, got {sizes}")
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} must be a positive whole number, got {value!r}")


def _num_host_blocks(options: Mapping[str, Any], kv_cache_config: Any) -> int:
    _check_size(options)
    if options.get("num_host_blocks") is not None:
        return int(options["num_host_blocks"])
    size = block_bytes(kv_cache_config)
    num_host_blocks = int(options["host_bytes"]) // size
    if num_host_blocks < 1:
        raise ConfigurationError(f"{options['host_bytes']} bytes of host memory hold no block; one takes {size} bytes")
    return num_host_blocks
