"""What the README shows runs: its Python blocks in order, on an engine without a model and without a network."""

from __future__ import annotations

import ast
import asyncio
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
from stream2llm_sdk.serving import POLICIES, Stream2LLMEngine, vllm_engine
from stream2llm_sdk.testing import FakeEngine

from .rag_parts import tokenizer

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


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


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def model() -> Path:
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_engine, "Stream2LLMEngine", fake_engine)
    monkeypatch.setattr(crawler, "CrawlerRetriever", OfflineCrawler)
    monkeypatch.setattr("stream2llm_sdk.demo.ensure_demo_model", model)
    monkeypatch.setattr("stream2llm_sdk.serving.vllm_start.require_vllm", lambda: None)
    for place in (stream2llm_sdk, stream2llm_sdk.rag):
        monkeypatch.setattr(place, "load_tokenizer", lambda model: tokenizer())


def compiled(block: str) -> CodeType:
    return compile(block, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("block", [block for block in BLOCKS if "__main__" in block])
def test_a_script_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compiled(block), {"__name__": "__main__"})  # noqa: S102
    assert "In May." in capsys.readouterr().out


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # parts that are only made there are not closed
def test_the_fragments_run_one_after_another(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "readme", "model": str(tmp_path)}

    async def run() -> None:
        for block in BLOCKS:
            if "__main__" not in block and inspect.isawaitable(running := eval(compiled(block), names)):  # noqa: S307
                await running

    asyncio.run(run())
    assert (tmp_path / "trail.csv").read_text().startswith("request_id,type")
    assert (tmp_path / "trail.jsonl").stat().st_size > 0
    assert (tmp_path / "my-index").is_dir()


def test_every_policy_is_named() -> None:
    assert set(re.findall(r"^\| `([A-Z_0-9]+)` \|", README.read_text("utf-8"), re.MULTILINE)) == set(POLICIES)
