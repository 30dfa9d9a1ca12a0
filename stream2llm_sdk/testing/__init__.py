"""Parts to test applications and retrievers with: an engine without a model, and retrievers that follow a script.

Modules are imported when a name is asked for. `stream2llm_sdk.testing.core_driver` drives vLLM's own engine core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stream2llm_sdk.testing.fake_engine import FakeEngine
    from stream2llm_sdk.testing.fake_request import FakeRequest, Operation
    from stream2llm_sdk.testing.scripted_retriever import ScriptedRetriever

__all__ = ["FakeEngine", "FakeRequest", "Operation", "ScriptedRetriever"]

_MODULES = {
    "FakeEngine": "fake_engine",
    "FakeRequest": "fake_request",
    "Operation": "fake_request",
    "ScriptedRetriever": "scripted_retriever",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
