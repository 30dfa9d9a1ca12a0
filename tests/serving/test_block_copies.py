"""Block copies between two places of host memory: the CPU backend's swap, and the cases that a GPU must pass too."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from stream2llm_sdk.errors import ConfigurationError, UnsupportedFeatureError
from stream2llm_sdk.serving.swap import block_copies
from stream2llm_sdk.serving.swap.block_copies import BlockCopier, block_dim

from .block_copy_cases import CASES, LAYOUTS

CPU = torch.device("cpu")


def copy_one_by_one(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
    """What vLLM's batched operation does, between two addresses of the host."""
    assert not any_order
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.fixture(params=["runs", "staged", "batched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own way, and a GPU's two: what they take for device memory is the host's here."""
    if request.param == "staged":
        monkeypatch.setattr(BlockCopier, "_copy_runs", BlockCopier._copy_staged)
    elif request.param == "batched":
        monkeypatch.setattr(block_copies, "_batch_copy_op", lambda device: copy_one_by_one)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_the_cpu(case: Callable[..., None], layout: str, dtype: torch.dtype) -> None:
    case(layout, CPU, dtype)


def test_the_dimension_of_the_blocks_is_found() -> None:
    assert block_dim((40, 2, 16, 8), 40) == 0
    assert block_dim((2, 40, 16, 8), 40) == 1


@pytest.mark.parametrize("shape", [(2, 40, 40, 8), (2, 41, 16, 8)])
def test_a_dimension_that_cannot_be_told_is_not_guessed(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="block_dims"):
        BlockCopier({"layer": torch.zeros(shape)}, 40, 4)


def test_an_ambiguous_dimension_can_be_said() -> None:
    cache = torch.arange(2 * 4 * 4, dtype=torch.float32).view(2, 4, 4)
    copier = BlockCopier({"layer": cache}, 4, 4, block_dims={"layer": 1})
    copier.copy_out([(0, 3)])
    copier.copy_in([(3, 2)])
    assert torch.equal(cache[:, 2], cache[:, 0])


def test_a_dimension_said_wrong_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not count"):
        BlockCopier({"layer": torch.zeros(2, 40, 16)}, 40, 4, block_dims=0)


def test_blocks_in_scattered_memory_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="scattered"):
        BlockCopier({"layer": torch.zeros(40, 3, 16, 8)[..., :4]}, 40, 4)


def test_the_module_does_not_import_vllm() -> None:
    code = "import sys, stream2llm_sdk.serving.swap.block_copies; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
