"""What `stream2llm demo` works with: a documentation site, its passages and a small model, all offline."""

from __future__ import annotations

from stream2llm_sdk.demo.arrivals import ArrivalSchedule
from stream2llm_sdk.demo.model import DemoModelError, demo_model_path, ensure_demo_model
from stream2llm_sdk.demo.passages import passages
from stream2llm_sdk.demo.site import DEFAULT_MODULES, PydocSite

__all__ = [
    "DEFAULT_MODULES",
    "ArrivalSchedule",
    "DemoModelError",
    "PydocSite",
    "demo_model_path",
    "ensure_demo_model",
    "passages",
]
