"""What a replay in virtual time runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.engine import EngineLimits
from stream2llm_sdk.tokenizer import Tokenizer

__all__ = ["Simulation"]

_DEFAULTS = {"num_gpu_blocks": 100_000, "max_model_len": 131_072, "block_size": 16}


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a replay in virtual time runs on.

    Attributes:
        policy: scheduling policy by name; None for vLLM's own scheduler, which cannot stream.
        arguments: more of the arguments of `simulate`: `num_gpu_blocks`, `latency`, `cost_model`, …
        tokenizer: counts the tokens of traces with texts; not needed where the traces say how many there are.

    Raises:
        ConfigurationError: `arguments` has one that the replay decides itself.
    """

    policy: str | None = "FCFS"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "policy", "streaming", "observer"):
            if name in self.arguments:
                raise ConfigurationError(f"arguments[{name!r}] is decided elsewhere: leave it out")

    @property
    def limits(self) -> EngineLimits:
        """What one request may use."""
        num_blocks, longest, block_size = (self.arguments.get(name, default) for name, default in _DEFAULTS.items())
        capacity = min(longest, (num_blocks - 1) * block_size)
        return EngineLimits(longest, capacity - 1, num_blocks, block_size)
