"""Preemption by swapping: KV blocks that wait in host memory.

`HostPool` keeps the book in the scheduler, `BlockCopier` moves the bytes in the workers, and the connector joins both
to vLLM. Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.serving.swap.host_pool import HostPool

if TYPE_CHECKING:
    from stream2llm_sdk.serving.swap.block_copies import BlockCopier
    from stream2llm_sdk.serving.swap.connector import Stream2LLMSwapConnector, swap_config

__all__ = ["BlockCopier", "HostPool", "Stream2LLMSwapConnector", "swap_config"]

_MODULES = {"BlockCopier": "block_copies", "Stream2LLMSwapConnector": "connector", "swap_config": "connector"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
