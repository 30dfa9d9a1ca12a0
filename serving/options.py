"""Options of the scheduler, beside its policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_model import load_cost_model
from stream2llm_sdk.serving.fair_share import FairShare
from stream2llm_sdk.serving.preemption import PreemptionMode
from stream2llm_sdk.serving.victims import make_victim_order

__all__ = ["SchedulingOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How the scheduler shares memory and time.

    Attributes:
        victims: whose KV goes first, by name (`serving.victims`): IDLE_FIRST, LATEST_COMPLETION or ADMISSION.
        host_kv_bytes: host memory for KV that is swapped out, for each worker; None for no swapping.
        preemption_mode: 'cost' (the cheaper of both for each victim), 'recompute' or 'swap'.
        cost_model: file of `stream2llm calibrate`; None for an estimate that is corrected while serving.
        frozen_costs: whether the cost model is left as it is.
        length_predictor: 'quantile' of recent outputs, 'max_tokens', or the file of a trained predictor.
        look_ahead: whether policies that look ahead do, so that answers do not run out of memory half way; off for
            comparison.
        tenant_weights: each tenant's share relative to the others', 1 for those that are not named.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    victims: str = "IDLE_FIRST"
    host_kv_bytes: int | None = None
    preemption_mode: str = "cost"
    cost_model: str | os.PathLike[str] | None = None
    frozen_costs: bool = False
    length_predictor: str = "quantile"
    look_ahead: bool = True
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("victims", "preemption_mode", "length_predictor"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigurationError(f"{name}={value!r:.80}: give a name")
        for name in ("frozen_costs", "look_ahead"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigurationError(f"{name}={value!r:.80}: give True or False")
        make_victim_order(self.victims)
        mode = PreemptionMode.parse(self.preemption_mode)
        if self.tenant_weights is None:
            raise ConfigurationError("tenant_weights=None: give a mapping of tenants to numbers")
        FairShare(self.tenant_weights)
        size = self.host_kv_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigurationError(f"host_kv_bytes={size!r:.80}: give a number of bytes, or None for no swapping")
        if size is not None and size > _memory_bytes():
            raise ConfigurationError(f"host_kv_bytes={size!r:.80}: this machine has {_memory_bytes()} bytes of memory")
        if mode is PreemptionMode.SWAP and size is None:
            raise ConfigurationError("preemption_mode='swap' needs room in host memory: give host_kv_bytes")
        if self.length_predictor.endswith(".json"):
            from stream2llm_sdk.serving.length_training import TrainedPredictor

            _require_file("length_predictor", self.length_predictor)
            TrainedPredictor.load(self.length_predictor)
        elif self.length_predictor not in ("quantile", "max_tokens"):
            raise ConfigurationError(
                f"length_predictor={self.length_predictor!r}: choose 'max_tokens', 'quantile' or a .json file"
            )
        if self.cost_model is not None:
            _require_file("cost_model", self.cost_model)
            load_cost_model(self.cost_model)

    def for_scheduler(self) -> dict[str, Any]:
        """The options as the scheduler's process gets them."""
        return {
            "victims": self.victims.strip().upper(),
            "preemption_mode": self.preemption_mode,
            "cost_model": None if self.cost_model is None else os.path.abspath(self.cost_model),
            "frozen_costs": self.frozen_costs,
            "length_predictor": self.length_predictor,
            "look_ahead": self.look_ahead,
            "tenant_weights": dict(self.tenant_weights),
        }


def _require_file(name: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        raise ConfigurationError(f"{name}={path!r:.200} is not a file")


def _memory_bytes() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
