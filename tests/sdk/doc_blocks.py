"""Python blocks of documentation, run in their order on an engine without a model and without a network."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import stream2llm_sdk
from stream2llm_sdk.context import Append, Chunk
from stream2llm_sdk.retrievers import CrawlerRetriever
from stream2llm_sdk.retrievers.web import crawler
from stream2llm_sdk.serving import Stream2LLMEngine, vllm_engine
from stream2llm_sdk.testing import FakeEngine

from .rag_parts import tokenizer

ROOT = Path(__file__).resolve().parents[2]


def load_reference() -> Any:
    """The module `docs/reference.py`, which is part of no package."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OfflineCrawler(CrawlerRetriever):
    """Checks its arguments as the real one does, and finds one page."""

    async def warm_up(self) -> None:
        pass

    async def stream(self, query: str) -> AsyncIterator[Append]:
        yield Append(Chunk("a page", "http://a.example", "a"))


def fake_engine(model: Any, **options: Any) -> FakeEngine:
    """Takes what the embedded engine takes; makes one without a model."""
    Stream2LLMEngine(model, **options)
    return FakeEngine("In May.")


def take_offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Has everything that is made from now on do without a model and a network, in a folder of its own."""

    async def model() -> Path:
        return folder

    monkeypatch.chdir(folder)
    monkeypatch.setattr(vllm_engine, "Stream2LLMEngine", fake_engine)
    monkeypatch.setattr(crawler, "CrawlerRetriever", OfflineCrawler)
    monkeypatch.setattr("stream2llm_sdk.demo.ensure_demo_model", model)
    monkeypatch.setattr("stream2llm_sdk.serving.vllm_start.require_vllm", lambda: None)
    for place in (stream2llm_sdk, stream2llm_sdk.rag):
        monkeypatch.setattr(place, "load_tokenizer", lambda model: tokenizer())


class Blocks:
    """The Python blocks of one page."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.text = page.read_text("utf-8")
        found = re.finditer(r"^```python\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        # With empty lines before it, a block's errors tell the lines of the page.
        blocks = ["\n" * (self.text[: match.start(1)].count("\n")) + match[1] for match in found]
        self.scripts = [block for block in blocks if "__main__" in block]
        self.fragments = [block for block in blocks if "__main__" not in block]

    def run_script(self, script: str) -> None:
        """Runs a whole program."""
        exec(self._compiled(script), {"__name__": "__main__"})  # noqa: S102

    def run_fragments(self, model: str) -> None:
        """Runs what is not a program, one after another: names are those of the blocks before, and `model`."""
        names: dict[str, Any] = {"__name__": "page", "model": model}

        async def run() -> None:
            for block in self.fragments:
                if inspect.isawaitable(running := eval(self._compiled(block), names)):  # noqa: S307
                    await running

        asyncio.run(run())

    def _compiled(self, block: str) -> CodeType:
        return compile(block, str(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
