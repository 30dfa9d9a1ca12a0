"""What importing costs and offers, and what is said when an optional part is not installed."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import stream2llm_sdk
import stream2llm_sdk.retrievers
import stream2llm_sdk.serving
import stream2llm_sdk.traces

EXTRAS = [
    "sklearn",
    "vllm",
    "torch",
    "transformers",
    "crawl4ai",
    "trafilatura",
    "diskannpy",
    "numba",
    "wordllama",
    "gguf",
    "accelerate",
    "prometheus_client",
    "pyarrow",
    "matplotlib",
    "langchain_core",
    "llama_index",
    "haystack",
]
HEAVY = [*EXTRAS, "numpy", "tokenizers", "jinja2", "httpx", "rich", "typer"]

# Run by a Python of its own, in which the extras cannot be found.
WITHOUT_EXTRAS = """
import asyncio, importlib, json, os, sys
from importlib.machinery import PathFinder

extras, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None:
        None if name.partition(".")[0] in extras else find_spec(name, path, target)
)

def look_at(name):
    # Public names that are missing, and those that cannot be had without an extra.
    absent, unknown = [], []
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        try:
            getattr(module, public)
        except AttributeError:
            absent.append(public)
        except ImportError:
            unknown.append(public)
    return {"absent": absent, "unknown": unknown}

imported = {}
for name in modules:
    try:
        imported[name] = look_at(name)
    except ImportError as error:
        missing = error.name or type(error).__name__
        imported[name] = {"absent": [], "unknown": None, "missing": missing.partition(".")[0]}

from stream2llm_sdk import StreamingRAG, load_tokenizer
from stream2llm_sdk.demo.model import ensure_demo_model
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.diskann.build import build_index
from stream2llm_sdk.retrievers.diskann.search import load_kernel
from stream2llm_sdk.retrievers import adapters
from stream2llm_sdk.retrievers.embedding import WordLlamaEmbedder
from stream2llm_sdk.serving.metrics import SchedulerMetrics
from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine
from stream2llm_sdk.testing.core_driver import CoreDriver

async def typing(query):
    yield query

parts = {
    "engine": lambda: asyncio.run(Stream2LLMEngine("no-model", progress=None).start()),
    "rag": lambda: asyncio.run(StreamingRAG("no-model", typing, tokenizer=object()).start()),
    "core driver": lambda: CoreDriver("no-model"),
    "tokenizer": lambda: load_tokenizer(os.getcwd()),
    "crawler": lambda: CrawlerRetriever(["http://a.example"]),
    "index": lambda: build_index(["text"], "index"),
    "search": load_kernel,
    "langchain": lambda: adapters.LangChainRetriever,
    "chat": lambda: adapters.StreamingRAGChat,
    "llamaindex": lambda: adapters.LlamaIndexRetriever,
    "embedder": lambda: WordLlamaEmbedder().embed(["text"]),
    "metrics": SchedulerMetrics,
    "demo": lambda: asyncio.run(ensure_demo_model()),
}
errors = {}
for name, use in parts.items():
    try:
        use()
    except Exception as error:
        errors[name] = [type(error).__name__, isinstance(error, ImportError), str(error)]
print(json.dumps({"imported": imported, "errors": errors}))
"""


def python(code: str, *arguments: str) -> Any:
    """What a program of its own prints, read as JSON."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def modules() -> list[str]:
    """Every module of the distribution, wherever its folder lies."""
    names = []
    for package in (stream2llm_sdk, stream2llm_sdk.retrievers, stream2llm_sdk.serving, stream2llm_sdk.traces):
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
        names += [package.__name__, *(module.name for module in found)]
    return sorted(set(names))


def test_importing_the_sdk_imports_nothing_heavy() -> None:
    loaded = python("import json, sys, stream2llm_sdk; print(json.dumps(list(sys.modules)))")
    assert "stream2llm_sdk.rag" in loaded
    assert not set(HEAVY) & set(loaded)


def names_of(tree: ast.Module) -> tuple[set[str], list[str]]:
    """What a module binds anywhere, and what it calls public, without running it."""
    bound: set[str] = set()
    public: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = ast.literal_eval(node.value)
    return bound, public


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a Python without any extra makes of every module, and of every part that needs one."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        found: dict[str, Any] = python(WITHOUT_EXTRAS, json.dumps(EXTRAS), json.dumps(modules()))
    return found


def test_what_a_module_calls_public_exists(without_extras: dict[str, Any]) -> None:
    assert len(without_extras["imported"]) > 50
    for name, outcome in without_extras["imported"].items():
        assert outcome["absent"] == [], name
        if outcome["unknown"] != []:  # read instead of run
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            bound, public = names_of(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            assert set(outcome["unknown"] or public) <= bound, name


def test_only_what_runs_in_the_engine_or_uses_an_extra_needs_one(without_extras: dict[str, Any]) -> None:
    missing = {name: outcome["missing"] for name, outcome in without_extras["imported"].items() if "missing" in outcome}
    assert set(missing.values()) <= {*EXTRAS, "MissingExtraError"}
    assert {name.split(".")[1] for name in missing} <= {"serving", "retrievers", "traces"}


@pytest.mark.parametrize(
    ("part", "what", "extras"),
    [
        ("engine", "vLLM", ["cpu", "gpu"]),
        ("rag", "vLLM", ["cpu", "gpu"]),
        ("core driver", "vLLM", ["cpu"]),
        ("tokenizer", "transformers", ["cpu"]),
        ("crawler", "trafilatura", ["crawler"]),
        ("index", "diskannpy", ["diskann"]),
        ("search", "numba", ["diskann"]),
        ("embedder", "wordllama", ["diskann"]),
        ("langchain", "langchain-core", ["langchain"]),
        ("chat", "langchain-core", ["langchain"]),
        ("llamaindex", "llama-index-core", ["llamaindex"]),
        ("metrics", "prometheus_client", ["metrics"]),
        ("demo", "gguf", ["demo"]),
    ],
)
def test_a_part_that_is_not_installed_is_named_with_its_extra(
    part: str, what: str, extras: list[str], without_extras: dict[str, Any]
) -> None:
    kind, is_import_error, message = without_extras["errors"][part]
    assert (kind, is_import_error) == ("MissingExtraError", True), message
    assert message.startswith(f"{what} is not installed. Install it with: pip install ")
    for extra in extras:
        assert f"stream2llm-sdk[{extra}]" in message
