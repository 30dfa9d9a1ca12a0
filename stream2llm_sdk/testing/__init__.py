"""Parts to test applications and retrievers with: an engine without a model, retrievers that follow a script, and a
conformance kit for retrievers.

Modules are imported when a name is asked for. `stream2llm_sdk.testing.core_driver` drives vLLM's own engine core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stream2llm_sdk.testing.conformance import check_retriever
    from stream2llm_sdk.testing.conformance_report import (
        CheckOutcome,
        CheckStatus,
        ConformanceError,
        ConformanceReport,
    )
    from stream2llm_sdk.testing.fake_engine import FakeEngine
    from stream2llm_sdk.testing.fake_request import FakeRequest, Operation
    from stream2llm_sdk.testing.kv_lab import KVBlock, KVLab, KVSnapshot, SlotState
    from stream2llm_sdk.testing.scripted_retriever import ScriptedRetriever

__all__ = [
    "CheckOutcome",
    "CheckStatus",
    "ConformanceError",
    "ConformanceReport",
    "FakeEngine",
    "FakeRequest",
    "KVBlock",
    "KVLab",
    "KVSnapshot",
    "Operation",
    "ScriptedRetriever",
    "SlotState",
    "check_retriever",
]

_MODULES = {
    "CheckOutcome": "conformance_report",
    "CheckStatus": "conformance_report",
    "ConformanceError": "conformance_report",
    "ConformanceReport": "conformance_report",
    "FakeEngine": "fake_engine",
    "FakeRequest": "fake_request",
    "KVBlock": "kv_lab",
    "KVLab": "kv_lab",
    "KVSnapshot": "kv_lab",
    "Operation": "fake_request",
    "ScriptedRetriever": "scripted_retriever",
    "SlotState": "kv_lab",
    "check_retriever": "conformance",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
