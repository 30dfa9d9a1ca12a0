"""Accelerators by what they can do, and what costs and memory a model has on them.

`latency.py` turns a model's shape and a piece of hardware into seconds. Each figure below says where it comes from:
*data sheet* (the vendor's, dense rates without sparsity), *fitted* (to published runs), *measured*, or *assumed*.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_curve import CostCurve
from stream2llm_sdk.serving.cost_model import CostModel, DeviceEstimate, default_cost_model, load_cost_model
from stream2llm_sdk.serving.simulator.model_shape import LLAMA_3_1_8B, ModelShape

__all__ = [
    "A40",
    "A100",
    "H100",
    "H200",
    "LLAMA_3_1_8B",
    "PROFILES",
    "Hardware",
    "ModelShape",
    "cost_model",
    "num_kv_blocks",
    "this_machine",
]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator, and what a serving engine gets out of it.

    Attributes:
        name: as in a data sheet.
        peak_flops_per_s: dense, by number format.
        memory_bytes: what the driver reports.
        memory_bytes_per_s: peak bandwidth of its own memory.
        link_bytes_per_s: of large copies between host and device, each way.
        interconnect_bytes_per_s: each way between devices, for the all-reduces of tensor parallelism; infinite where
            `efficiency` was fitted with them in it.
        efficiency: share of the peak that prefill reaches: a constant, or `(tokens of a step, efficiency)` pairs with
            straight lines of seconds between them.
        attention_efficiency: share of the peak that attention reaches; None for the best of `efficiency`.
        memory_efficiency: share of the bandwidth that reading weights and KV reaches.
        overhead_s: what every step takes beside that: scheduling, launches, sampling.
        messaging_s: from the end of a step to the client's seeing its tokens.
        copy_overhead_s: what the copies of a step take before their first byte.
        seconds_per_small_copy: what one asynchronous copy of a few kilobytes takes, whatever its size. The default is
            the middle of the 5 to 7 µs that DualPath (arXiv 2602.21548, section 5.2) measured for copies of KV in small
            pieces; handing one over to the driver alone takes 2 µs.
        workspace_bytes: activations, graphs and libraries, which are not left for KV.
        measured: this machine's own costs, in place of all estimates but the last three.
    """

    name: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    interconnect_bytes_per_s: float = math.inf
    efficiency: float | tuple[tuple[int, float], ...] = 0.5
    attention_efficiency: float | None = None
    memory_efficiency: float = 0.8
    overhead_s: float = 0.003
    messaging_s: float = 0.002
    copy_overhead_s: float = 1e-4
    seconds_per_small_copy: float = 6e-6
    workspace_bytes: float = 4e9
    measured: CostModel | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float | int) and not value >= 0:
                raise ConfigurationError(f"{self.name}: {each.name} must be a number of 0 or more, got {value}")
        shares = self.efficiency if isinstance(self.efficiency, tuple) else ((1, self.efficiency),)
        for share in (*(share for _, share in shares), self.memory_efficiency, self.best_attention_efficiency):
            if not 0 < share <= 1:
                raise ConfigurationError(f"{self.name}: efficiencies must be more than 0 and at most 1, got {share}")
        if not shares or [tokens for tokens, _ in shares] != sorted({tokens for tokens, _ in shares}):
            raise ConfigurationError(f"{self.name}: efficiency needs increasing numbers of tokens, got {shares}")

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in a number format.

        Raises:
            ConfigurationError: unknown for this format.
        """
        if dtype not in self.peak_flops_per_s:
            raise ConfigurationError(
                f"{self.name}: no peak for {dtype!r}; known are {', '.join(sorted(self.peak_flops_per_s)) or 'none'}"
            )
        return self.peak_flops_per_s[dtype]

    @property
    def best_efficiency(self) -> float:
        """The largest of the efficiencies."""
        return max(share for _, share in self.efficiency) if isinstance(self.efficiency, tuple) else self.efficiency

    @property
    def best_attention_efficiency(self) -> float:
        """That of attention, which long prompts reach."""
        return self.best_efficiency if self.attention_efficiency is None else self.attention_efficiency


def _half(flops_per_s: float) -> dict[str, float]:
    return {"bfloat16": flops_per_s, "float16": flops_per_s}


# Rates and bandwidths: data sheets. Memory: what the driver reports of a device of this kind. Links: assumed, what
# large copies from and to pinned memory reach of PCIe 5 x16 (64 GB/s each way) and PCIe 4 x16 (32 GB/s).
# Efficiencies of H200 and H100: fitted to the published P50, P95 and P99 TTFT without streaming at the two lowest rates
# of the crawls and of the vector searches, Llama-3.1-8B on two devices with NVLink; nothing else is fitted. They go
# with the assumed overhead of 3 ms and messaging of 2 ms: overhead and efficiency lie on a ridge (2 ms with 0.51 and
# 6 ms with 0.59 fit as well). Attention of long prompts, a kernel of its own without all-reduces, is faster than the
# linear layers: with one efficiency for both the P99 of crawls would be 1.3 to 1.5 times the published one. Those of
# A100 and A40 are assumed: the older the device, the easier its matrix units are kept busy.
H200 = Hardware("NVIDIA H200", _half(989e12), 139.8 * _GIB, 4.8e12, 50e9, efficiency=0.54, attention_efficiency=0.7)
H100 = Hardware(
    "NVIDIA H100 SXM 80GB", _half(989e12), 79.1 * _GIB, 3.35e12, 50e9, efficiency=0.515, attention_efficiency=0.7
)
A100 = Hardware("NVIDIA A100 SXM 80GB", _half(312e12), 79.1 * _GIB, 2.039e12, 25e9, efficiency=0.6)
# Between two A40 without an NVLink bridge everything goes over PCIe 4.
A40 = Hardware("NVIDIA A40", _half(149.7e12), 44.4 * _GIB, 696e9, 25e9, interconnect_bytes_per_s=25e9, efficiency=0.6)

PROFILES: dict[str, Hardware] = {"h200": H200, "h100": H100, "a100": A100, "a40": A40}


def this_machine(calibration: str | os.PathLike[str], *, memory_bytes: float = 0.0) -> Hardware:
    """What `stream2llm calibrate` measured. It holds for the model and the number of devices that it was measured with.

    Steps are as measured through the whole engine core, overhead included. Messaging is not among the measurements:
    the assumed 2 ms stay.

    Args:
        calibration: the JSON file.
        memory_bytes: of one device, for `num_kv_blocks`.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    measured = load_cost_model(calibration)
    return Hardware(measured.hardware, {}, memory_bytes, 0.0, 0.0, overhead_s=0.0, measured=measured)


def num_kv_blocks(
    model: ModelShape,
    hardware: Hardware,
    tensor_parallel_size: int = 1,
    *,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
) -> int:
    """KV blocks that an engine would have: memory it may use, less weights and workspace. An estimate: the workspace,
    which is assumed, depends on the engine's version and settings.

    Raises:
        ConfigurationError: the weights do not fit, or the memory is not known.
    """
    usable = hardware.memory_bytes * gpu_memory_utilization - hardware.workspace_bytes
    left = usable - model.weight_bytes / tensor_parallel_size
    per_block = block_size * model.kv_bytes_per_token / tensor_parallel_size
    if left < per_block:
        raise ConfigurationError(
            f"{model.name} does not fit {tensor_parallel_size}x {hardware.name}: {usable / 1e9:.1f} GB are usable on a "
            f"device, and its weights take {model.weight_bytes / tensor_parallel_size / 1e9:.1f} GB"
        )
    return int(left / per_block)


def cost_model(
    model: ModelShape,
    hardware: Hardware,
    tensor_parallel_size: int = 1,
    *,
    num_tokens_per_step: int = 8192,
    bytes_per_copy: float | None = None,
) -> CostModel:
    """What a scheduler on this hardware would believe that recompute and copies cost: measured, or estimated.

    Args:
        model: whose KV it is.
        hardware: each of the devices.
        tensor_parallel_size: devices; each copies its share of the heads over a link of its own.
        num_tokens_per_step: the token budget; longer prefills take more steps.
        bytes_per_copy: how large single copies are, where they are small: each takes `seconds_per_small_copy` more.
            The published system copies keys and values of each block and layer by themselves: 16 KiB on each of two
            devices that serve Llama-3.1-8B.
    """
    if hardware.measured is not None:
        return hardware.measured
    estimate = DeviceEstimate(
        hardware=f"{tensor_parallel_size}x {hardware.name} (estimated)",
        peak_flops_per_s=tensor_parallel_size * hardware.peak(model.dtype),
        efficiency=hardware.best_efficiency,
        attention_efficiency=hardware.best_attention_efficiency,
        host_link_bytes_per_s=1 / copy_seconds_per_byte(hardware, tensor_parallel_size, bytes_per_copy),
        step_overhead_s=hardware.overhead_s,
        copy_overhead_s=hardware.copy_overhead_s,
        num_tokens_per_step=num_tokens_per_step,
    )
    return default_cost_model(
        model.kv_bytes_per_token,
        flops_per_token=model.flops_per_token,
        flops_per_pair=model.flops_per_pair,
        device=estimate,
        model=model.name,
    )


def copy_seconds_per_byte(hardware: Hardware, tensor_parallel_size: int, bytes_per_copy: float | None) -> float:
    """Seconds for each byte of KV over all devices, which copy side by side."""
    per_byte = 1 / hardware.link_bytes_per_s
    if bytes_per_copy:
        per_byte += hardware.seconds_per_small_copy / bytes_per_copy
    return per_byte / tensor_parallel_size


def linear_curve(model: ModelShape, hardware: Hardware, tensor_parallel_size: int) -> CostCurve | None:
    """Seconds of a step's tokens without attention, where they are not simply in proportion to the tokens."""
    if hardware.measured is not None:
        return hardware.measured.recompute
    if not isinstance(hardware.efficiency, tuple):
        return None
    flops_per_s = tensor_parallel_size * hardware.peak(model.dtype)
    seconds = (tokens * model.flops_per_token / (share * flops_per_s) for tokens, share in hardware.efficiency)
    return CostCurve(tuple(tokens for tokens, _ in hardware.efficiency), tuple(seconds))
