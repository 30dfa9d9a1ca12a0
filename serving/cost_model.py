"""What it costs to take a request's KV away: computing it again, or copying it to the host and back.

A `CostModel` belongs to one kind of hardware and one model. `load_cost_model` reads it from the JSON of `save`, or from
the two JSON files that the published artifact measures. Without a file, `default_cost_model` estimates one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import read_json_object
from stream2llm_sdk.serving.cost_curve import CostCurve, FitQuality, Sample, fit_curve, fit_recompute, num_pairs

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = [
    "H200_LLAMA_8B",
    "H200_TP2",
    "UNMEASURED_CPU",
    "UNMEASURED_GPU",
    "CostModel",
    "DeviceEstimate",
    "default_cost_model",
    "load_cost_model",
    "model_flops",
]

FORMAT, VERSION = "stream2llm-cost-model", 1
_LONGEST = 131_072

_PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds to recompute and to copy a request's KV.

    Attributes:
        hardware: name of the machine's accelerator, or of its processor.
        model: the model's name.
        recompute: prefill of so many tokens, without their attention to the context.
        swap_out, swap_in: copies of so many tokens' KV to the host and back.
        seconds_per_pair: attention's cost for each (query, key) pair; what makes recompute grow faster than the
            tokens.
    """

    hardware: str
    model: str
    recompute: CostCurve
    swap_out: CostCurve
    swap_in: CostCurve
    seconds_per_pair: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.seconds_per_pair) or self.seconds_per_pair < 0:
            raise ConfigurationError(f"seconds_per_pair must be 0 or more, got {self.seconds_per_pair}")

    def recompute_s(self, num_tokens: int, start: int = 0) -> float:
        """Seconds to compute positions [start, start + num_tokens) of one request."""
        return self.step_s([(num_tokens, start)])

    def step_s(self, parts: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step that computes, for each `(num_tokens, start)`, positions from `start` of some request."""
        total = pairs = 0
        for num_tokens, start in parts:
            total += num_tokens
            pairs += num_pairs(num_tokens, start)
        return self.recompute(total) + self.seconds_per_pair * pairs

    def swap_out_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of `num_tokens` tokens to the host."""
        return self.swap_out(num_tokens)

    def swap_in_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of `num_tokens` tokens back."""
        return self.swap_in(num_tokens)

    def swap_pays(self, most: int = _LONGEST) -> tuple[tuple[int, int], ...]:
        """The lengths, up to `most` tokens, at which copying KV out and back costs less than computing it again: the
        first and the last of each range, ascending. They are those of a victim that loses nothing to updates and finds
        nothing in the prefix cache. Ranges shorter than a hundredth of their length may be missed.

        Raises:
            ConfigurationError: `most` is not at least 1.
        """
        if most < 1:
            raise ConfigurationError(f"most must be at least 1 token, got {most}")
        ranges: list[tuple[int, int]] = []
        begun, length = (1 if self._swap_is_cheaper(1) else None), 1
        while length < most:
            following = min(most, max(length + 1, length + length // 100))
            if self._swap_is_cheaper(following) == (begun is None):
                change = next(
                    n for n in range(length + 1, following + 1) if self._swap_is_cheaper(n) == (begun is None)
                )
                if begun is not None:
                    ranges.append((begun, change - 1))
                begun = change if begun is None else None
            length = following
        return tuple(ranges) if begun is None else (*ranges, (begun, most))

    def _swap_is_cheaper(self, num_tokens: int) -> bool:
        return self.swap_out_s(num_tokens) + self.swap_in_s(num_tokens) < self.recompute_s(num_tokens)

    def plot(self, most: int = _LONGEST) -> Plot:
        """Recompute against swap, over tokens up to `most`.

        Raises:
            ConfigurationError: `most` is not at least 2.
            MissingExtraError: matplotlib is not installed.
        """
        if most < 2:
            raise ConfigurationError(f"most must be at least 2 tokens, got {most}")
        from stream2llm_sdk.display.cost_plots import cost_plot

        return cost_plot(self, most)

    def plot_decisions(self, most: int = _LONGEST, *, cached_shares: Sequence[float] = (0.0, 0.5, 0.9)) -> Plot:
        """What `decide` makes of victims of any length, by what updates will make void, as a map for each of the shares
        that the prefix cache will give back.

        Raises:
            ConfigurationError: `most` is not at least 32, or there is no share, or one is not between 0 and 1.
            MissingExtraError: matplotlib is not installed.
        """
        if most < 32:
            raise ConfigurationError(f"most must be at least 32 tokens, got {most}")
        if not cached_shares or not all(0 <= share <= 1 for share in cached_shares):
            raise ConfigurationError(f"cached_shares={cached_shares!r}: give one or more from 0 to 1")
        from stream2llm_sdk.display.cost_plots import decision_plot

        return decision_plot(self, most, cached_shares)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.cost_view import cost_model_html

        return cost_model_html(self)

    def mismatch(self, hardware: str, model: str) -> str | None:
        """A sentence saying that this was measured on something else, or None where it fits."""
        if (self.hardware, self.model) == (hardware, model):
            return None
        return (
            f"the cost model was measured for {self.model!r} on {self.hardware!r}, but {model!r} runs on {hardware!r}: "
            f"measure it here with `stream2llm calibrate`"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "hardware": self.hardware,
            "model": self.model,
            "recompute": {**_knots(self.recompute), "seconds_per_pair": self.seconds_per_pair},
            "swap_out": _knots(self.swap_out),
            "swap_in": _knots(self.swap_in),
        }

    def save(self, path: _PathLike, *, fit: Mapping[str, FitQuality] | None = None) -> None:
        """Writes the JSON form, with the quality of each curve's fit for whoever reads the file.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        document = self.to_dict()
        if fit:
            document["fit"] = {name: asdict(quality) for name, quality in fit.items()}
        try:
            Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"the cost model cannot be written to {os.fspath(path)}: {error}") from error


def _knots(curve: CostCurve) -> dict[str, Any]:
    return {"num_tokens": list(curve.num_tokens), "seconds": list(curve.seconds)}


# ---- files --------------------------------------------------------------------------------------------------------


def load_cost_model(paths: _PathLike | Sequence[_PathLike], *, hardware: str | None = None) -> CostModel:
    """Reads a cost model from its own JSON, or from the published artifact's recompute and swap files together.

    The artifact's files hold milliseconds, five repeats for each number of tokens (seven where the two warm-up runs
    were kept: then the first two are dropped), and no name of the hardware; `hardware` gives it.

    Raises:
        ConfigurationError: a file is missing, broken, holds an impossible value, or the files do not belong together.
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    documents = [_Document.read(path) for path in files]
    own = [document for document in documents if document.values.get("format") == FORMAT]
    if own and len(documents) == 1:
        return own[0].cost_model()
    recompute = [document for document in documents if "recomputation_latencies" in document.values]
    swap = [document for document in documents if {"swap_in_latency", "swap_out_latency"} & document.values.keys()]
    if len(documents) != 2 or len(recompute) != 1 or len(swap) != 1 or recompute == swap:
        raise ConfigurationError(
            f'a cost model is one file of `stream2llm calibrate` (with "format": "{FORMAT}"), or the artifact\'s '
            f'two: one with "recomputation_latencies", one with "swap_in_latency" and "swap_out_latency"; got '
            f"{', '.join(map(str, files)) or 'no file'}"
        )
    return _from_artifact(recompute[0], swap[0], hardware)


@dataclass(frozen=True, slots=True)
class _Document:
    """A JSON object from a file; reads its fields, and names file, field and value where one is wrong."""

    path: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: _PathLike) -> _Document:
        name = os.fspath(path)
        return cls(name, read_json_object(name, "a cost model"))

    def cost_model(self) -> CostModel:
        if self.values.get("version") != VERSION:
            self._fail("version", f"must be {VERSION}, got {self.values.get('version')!r}")
        recompute = self.section("recompute")
        return CostModel(
            hardware=self._text("hardware"),
            model=self._text("model"),
            recompute=self._curve("recompute"),
            swap_out=self._curve("swap_out"),
            swap_in=self._curve("swap_in"),
            seconds_per_pair=self._number("recompute.seconds_per_pair", recompute.get("seconds_per_pair")),
        )

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key)
        if not isinstance(value, dict):
            self._fail(key, "is missing" if key not in self.values else f"must be an object, got {value!r}")
        return value

    def latencies(self, key: str) -> list[Sample]:
        """The artifact's `{"16": [ms, …], …}` as samples in seconds."""
        samples = []
        for num_tokens, values in self.section(key).items():
            field = f"{key}.{num_tokens}"
            if not num_tokens.isascii() or not num_tokens.isdecimal() or int(num_tokens) < 1:
                self._fail(key, f"has {num_tokens!r} for a number of tokens")
            if not isinstance(values, list) or not values:
                self._fail(field, f"must be a list of milliseconds, got {values!r}")
            measured = values[2:] if len(values) == 7 else values
            samples += [Sample(int(num_tokens), self._number(field, value) / 1000) for value in measured]
        if not samples:
            self._fail(key, "holds no measurement")
        return samples

    def _curve(self, key: str) -> CostCurve:
        section = self.section(key)
        for name in ("num_tokens", "seconds"):
            if not isinstance(section.get(name), list):
                self._fail(f"{key}.{name}", f"must be a list, got {section.get(name)!r}")
        if wrong := [n for n in section["num_tokens"] if not isinstance(n, int) or isinstance(n, bool)]:
            self._fail(f"{key}.num_tokens", f"must hold whole numbers, got {wrong[0]!r}")
        seconds = tuple(self._number(f"{key}.seconds", value) for value in section["seconds"])
        try:
            return CostCurve(tuple(section["num_tokens"]), seconds)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.path}: {key}: {error}") from error

    def _text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            self._fail(key, f"must be a name, got {value!r}")
        return value

    def _number(self, field: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            self._fail(field, f"must be a number of 0 or more, got {value!r}")
        return float(value)

    def _fail(self, field: str, what: str) -> NoReturn:
        raise ConfigurationError(f"{self.path}: {field} {what}")


def _from_artifact(recompute: _Document, swap: _Document, hardware: str | None) -> CostModel:
    metadata = recompute.section("metadata")
    for key in ("model_name", "tensor_parallel_size"):
        other = swap.section("metadata").get(key)
        if metadata.get(key) != other:
            raise ConfigurationError(
                f"{recompute.path} and {swap.path} do not belong together: their {key} is {metadata.get(key)!r} and "
                f"{other!r}"
            )
    prefills = recompute.latencies("recomputation_latencies")
    curve, seconds_per_pair = fit_recompute(prefills, prefills)
    return CostModel(
        hardware=hardware or "unknown",
        model=str(metadata.get("model_name") or "unknown"),
        recompute=curve,
        swap_out=fit_curve(swap.latencies("swap_out_latency")),
        swap_in=fit_curve(swap.latencies("swap_in_latency")),
        seconds_per_pair=seconds_per_pair,
    )


# ---- estimates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceEstimate:
    """What the hardware can do, all devices of a replica together, from data sheets and experience.

    Attributes:
        hardware: its name.
        peak_flops_per_s: of the matrix units, dense, in the model's number format.
        efficiency: share of it that prefill reaches.
        host_link_bytes_per_s: sustained copies between KV cache and host memory, each way.
        step_overhead_s: what a step takes beside its computation.
        copy_overhead_s: what a copy takes before its first byte.
        num_tokens_per_step: the step's token budget: longer prefills take more steps.
        attention_efficiency: share of the peak that attention reaches; None for `efficiency`.
    """

    hardware: str
    peak_flops_per_s: float
    efficiency: float
    host_link_bytes_per_s: float
    step_overhead_s: float = 3e-3
    copy_overhead_s: float = 1e-4
    num_tokens_per_step: int = 8192
    attention_efficiency: float | None = None


# One data-centre GPU with half of its peak reached, behind PCIe 4 x16.
UNMEASURED_GPU = DeviceEstimate("unmeasured GPU", 989e12, 0.5, 25e9)
# Two cores with 16-wide fused multiply-add at 2.5 GHz; "swapping" is a copy within the same memory.
UNMEASURED_CPU = DeviceEstimate("unmeasured CPU", 3.2e11, 0.5, 5e9, num_tokens_per_step=512)
# Efficiencies and step overhead as fitted to the published runs. The links are assumed: PCIe 5 x16 for each GPU, 50
# GB/s each way for large pinned copies; each GPU copies its half of the heads. Many small copies reach less.
H200_TP2 = DeviceEstimate("2x NVIDIA H200 (estimated)", 2 * 989e12, 0.54, 2 * 50e9, attention_efficiency=0.7)


def default_cost_model(
    kv_bytes_per_token: float,
    *,
    flops_per_token: float,
    flops_per_pair: float,
    device: DeviceEstimate = UNMEASURED_GPU,
    model: str = "unknown",
) -> CostModel:
    """An estimate for hardware that was not measured: operations over reachable speed, bytes over the host link.

    Nothing here was measured: expect it to be off by a factor of two or more, and let it be corrected online.

    Args:
        kv_bytes_per_token: KV cache of one token over all layers and devices.
        flops_per_token: of one token's prefill without attention: 2 for each weight that it passes.
        flops_per_pair: of one (query, key) pair over all layers: 4 for each layer and hidden dimension of attention.
        device: the hardware.
        model: the model's name.
    """
    flops_per_s = device.peak_flops_per_s * device.efficiency
    per_step, overhead = device.num_tokens_per_step, device.step_overhead_s
    # From one step's budget on, every further budget's worth of tokens is another step.
    recompute = tuple(steps * overhead + n * flops_per_token / flops_per_s for n, steps in ((1, 1), (per_step, 1)))
    beyond = 2 * (overhead + per_step * flops_per_token / flops_per_s)
    copies = tuple(device.copy_overhead_s + n * kv_bytes_per_token / device.host_link_bytes_per_s for n in (1, 131072))
    return CostModel(
        hardware=device.hardware,
        model=model,
        recompute=CostCurve((1, per_step, 2 * per_step), (*recompute, beyond)),
        swap_out=CostCurve((1, 131072), copies),
        swap_in=CostCurve((1, 131072), copies),
        seconds_per_pair=flops_per_pair
        / (device.peak_flops_per_s * (device.attention_efficiency or device.efficiency)),
    )


# What families of models call the same thing.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_WIDTH = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")


def model_flops(config: Any) -> tuple[float, float]:
    """(FLOP per token, FLOP per (query, key) pair) of a dense decoder, from its Hugging Face text config.

    Counts the attention projections and a gated feed-forward block of three matrices in every layer; the output layer
    runs for one token of a prompt only. For a mixture of experts, counts the experts that one token passes. What a
    config does not say is taken as the most common: it is an estimate, and a model that is described in another way is
    served all the same.
    """
    layers, hidden = _first(config, _LAYERS) or 1, _first(config, _HIDDEN) or 1024
    heads = _first(config, _HEADS) or 1
    kv_heads = _first(config, ("num_key_value_heads",)) or heads
    head_dim = _first(config, ("head_dim",)) or max(1, hidden // heads)
    experts = _first(config, ("num_experts_per_tok",)) or 1
    width = _first(config, _WIDTH) or 4 * hidden
    weights = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * width * experts
    return 2.0 * layers * weights, 4.0 * layers * heads * head_dim


def _first(config: Any, names: Sequence[str]) -> int | None:
    """The first of these fields that is a positive number; of a field that differs by layer, the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and all(isinstance(part, int) for part in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


# The published set-up: Llama-3.1-8B on two H200 with tensor parallelism; 16-bit KV of 32 layers, 8 KV heads of 128.
H200_LLAMA_8B = default_cost_model(
    128 * 1024,
    flops_per_token=2 * 8.03e9,
    flops_per_pair=4 * 32 * 4096,
    device=H200_TP2,
    model="meta-llama/Llama-3.1-8B-Instruct",
)
