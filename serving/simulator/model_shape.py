"""A model's shape: what its arithmetic, its weights and its KV follow from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import read_json_object

__all__ = ["LLAMA_3_1_8B", "ModelShape"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a dense decoder's arithmetic and memory follow from.

    Attributes:
        name: as its publisher calls it.
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: as in its
            configuration.
        dtype: number format of weights and KV.
        ties_embeddings: whether input and output embeddings are one matrix.
        num_published_parameters: its size as published; None to count them.
        max_model_len: the longest sequence that it was made for; None where its configuration does not say.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype: str = "bfloat16"
    ties_embeddings: bool = False
    num_published_parameters: float | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{self.name}: {name} must be a whole number of 1 or more, got {value!r}")
        if self.dtype not in _DTYPE_BYTES:
            raise ConfigurationError(f"{self.name}: dtype must be one of {', '.join(_DTYPE_BYTES)}, got {self.dtype!r}")

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> ModelShape:
        """The shape of a Hugging Face configuration: a mapping, its JSON file, a folder with a `config.json`, or a
        model's name on the hub.

        Raises:
            ConfigurationError: the file cannot be read, or a number is missing.
        """
        name, values = ("", config) if isinstance(config, Mapping) else _read(config)
        values = {**values, **(values.get("text_config") or {})}

        def number(key: str, default: int | None = None) -> int:
            value = values.get(key)
            if value is None:
                value = default
            if value is None:
                raise ConfigurationError(f"{name or 'the model configuration'} has no {key!r}, which its shape needs")
            return int(value)

        hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
        return cls(
            name=str(values.get("_name_or_path") or name or values.get("model_type") or "unknown"),
            num_layers=number("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads", num_heads),
            head_dim=number("head_dim", hidden_size // max(1, num_heads)),
            intermediate_size=number("intermediate_size"),
            vocab_size=number("vocab_size"),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "bfloat16"),
            ties_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_model_len=number("max_position_embeddings", 0) or None,
        )

    @property
    def num_parameters(self) -> float:
        """As published, or counted: attention, a gated feed-forward block of three matrices, norms, embeddings."""
        if self.num_published_parameters is not None:
            return self.num_published_parameters
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if self.ties_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Of all weights, over all devices."""
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, over all devices."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def flops_per_token(self) -> float:
        """Two for every parameter."""
        return 2 * self.num_parameters

    @property
    def flops_per_pair(self) -> float:
        """Of one (query, key) pair over all layers: scores and values, each a multiplication and an addition."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


def _read(config: str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    path = Path(config)
    if not path.exists() and _HUB_NAME.fullmatch(name := os.fspath(config)):
        return name, _of_hub(name)
    file = path / "config.json" if path.is_dir() else path
    return str(path), read_json_object(file, "a model's configuration")


def _of_hub(name: str) -> Mapping[str, Any]:
    from transformers import PretrainedConfig

    try:
        values: Mapping[str, Any] = PretrainedConfig.get_config_dict(name)[0]
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"{name!r} is no folder here, and as a name on the hub its configuration cannot be read: {reason} Give a "
            "folder with a config.json, or check name and network"
        ) from error
    if not values:
        raise ConfigurationError(f"{name!r} is no folder here, and no model of that name is on the hub")
    return values


LLAMA_3_1_8B = ModelShape(
    name="meta-llama/Llama-3.1-8B-Instruct",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=128_256,
    num_published_parameters=8.03e9,  # the model's card
)
