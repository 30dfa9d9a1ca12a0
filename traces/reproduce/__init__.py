"""The published tables, run again in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.traces.reproduce.cells import OUR_ARMS
    from stream2llm_sdk.traces.reproduce.matrix import load_reproduction, published_runs, reproduce
    from stream2llm_sdk.traces.reproduce.published import ARMS, PUBLISHED, PublishedRun
    from stream2llm_sdk.traces.reproduce.report import FITTED, Reproduction

__all__ = [
    "ARMS",
    "FITTED",
    "OUR_ARMS",
    "PUBLISHED",
    "PublishedRun",
    "Reproduction",
    "load_reproduction",
    "published_runs",
    "reproduce",
]

_MODULES = {
    "ARMS": "published",
    "FITTED": "report",
    "OUR_ARMS": "cells",
    "PUBLISHED": "published",
    "PublishedRun": "published",
    "Reproduction": "report",
    "load_reproduction": "matrix",
    "published_runs": "matrix",
    "reproduce": "matrix",
}

# numpy and the tables are read when a name is used.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
