"""Block copies between a GPU and pinned host memory. Needs torch and one GPU; run with

pytest -c /dev/null --rootdir . -s tests/gpu/test_block_copies.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from block_copy_cases import CASES, LAYOUTS, make_cache, rewrite  # noqa: E402

from stream2llm_sdk.serving.swap import block_copies  # noqa: E402
from stream2llm_sdk.serving.swap.block_copies import BlockCopier  # noqa: E402

CUDA = torch.device("cuda")
NUM_BLOCKS = 40


@pytest.fixture(params=["torch", "vllm"])
def path(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of copying: torch's alone, and vLLM's batched operation where its kernels are there."""
    if request.param == "vllm":
        pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
        if block_copies._batch_copy_op(CUDA) is None:
            pytest.skip("this vLLM has no batched copy")
    else:
        monkeypatch.setattr(block_copies, "_batch_copy_op", lambda device: None)
    return str(request.param)


@pytest.fixture(params=["default", "own"])
def stream(request: Any) -> Iterator[str]:
    """The default stream, and one of its own, as vLLM computes on."""
    if request.param == "default":
        yield "default"
        return
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        yield "own"
    own.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_gpu(case: Callable[..., None], layout: str, path: str, stream: str) -> None:
    case(layout, CUDA, torch.bfloat16)


def test_host_memory_is_pinned() -> None:
    copier = BlockCopier({"layer": make_cache("blocks-first", CUDA, torch.bfloat16)}, NUM_BLOCKS, 8)
    assert all(rows.is_pinned() for rows in copier._host)
    copier.close()


def busy(seconds: float) -> None:
    """Keeps the current stream busy for about that long."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_a_busy_stream_orders_copies_and_compute_and_the_host_does_not_wait(path: str, stream: str) -> None:
    cache = make_cache("blocks-first", CUDA, torch.bfloat16)
    copier = BlockCopier({"layer": cache}, NUM_BLOCKS, 8)
    copier.copy_in([])  # whatever is set up once
    torch.cuda.synchronize()
    busy(0.2)
    rewrite(cache, 1)  # queued, will run in 0.2 s
    saved = cache[3:5].clone()
    start_s = time.perf_counter()
    timer = copier.copy_out([(3, 0), (4, 1)])
    waited_s = time.perf_counter() - start_s
    rewrite(cache, 2)
    copier.copy_in([(0, 10), (1, 11)])
    found = cache[10:12].clone()
    rewrite(cache, 3)
    was_running = timer.elapsed_s() is None
    copier.synchronize()
    assert torch.equal(found, saved)
    assert was_running, "the copy out was over before the stream got to it, or the host waited for it"
    assert timer.elapsed_s() is not None
    print(f"\n{path}, {stream} stream: the host spent {waited_s * 1e3:.2f} ms on queueing")
    copier.close()


def test_how_long_copies_take_beside_compute(path: str) -> None:
    """Measures only: 2,048 blocks of 16 tokens, 16 layers of a model with 8 KV heads of 128, in bfloat16."""
    num_layers, num_blocks, num_moved = 16, 2048, 512
    caches = {
        f"layer{index}": torch.zeros((num_blocks, 8, 16, 256), device=CUDA, dtype=torch.bfloat16)
        for index in range(num_layers)
    }
    copier = BlockCopier(caches, num_blocks, num_moved, block_dims=0)
    matrix = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
    scattered = torch.randperm(num_blocks)[:num_moved].tolist()
    pairs = {"in a row": list(range(num_moved)), "scattered": scattered}

    def compute() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    def timed(*work: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for one in work:
            one()
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    num_bytes = copier.block_bytes * num_moved
    with torch.cuda.stream(torch.cuda.Stream()):
        timed(compute)
        alone_s = timed(compute)
        print(f"\n{path}: compute alone {alone_s * 1e3:.1f} ms, {num_bytes / 1e6:.0f} MB each way")
        for name, blocks in pairs.items():
            out = [(block, host) for host, block in enumerate(blocks)]
            back = [(host, block) for block, host in out]
            for direction, copy in (("out", partial(copier.copy_out, out)), ("in", partial(copier.copy_in, back))):
                timed(copy)
                copy_s = timed(copy)
                behind_s = timed(copy, compute)
                side = torch.cuda.Stream()

                def beside(copy: Callable[[], Any] = copy, side: Any = side) -> None:
                    with torch.cuda.stream(side):
                        copy()

                beside_s = timed(beside, compute)
                print(
                    f"  {direction:3} {name:9}: {copy_s * 1e3:6.1f} ms, {num_bytes / copy_s / 1e9:5.1f} GB/s; with "
                    f"compute on its stream {behind_s * 1e3:6.1f} ms, beside it {beside_s * 1e3:6.1f} ms"
                )
    copier.close()
