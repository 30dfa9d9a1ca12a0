"""What a KV lab shows is what vLLM's scheduler did to one prompt's blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.testing.kv_lab import KVLab, SlotState

SIZE = 16
HEAD = list(range(10, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama_config(tmp_path_factory.mktemp("models") / "llama")


def test_an_append_keeps_all_and_fills_the_last_block_up(model: Path) -> None:
    with KVLab(model, "append", block_size=SIZE) as lab:
        opened = lab.open(HEAD)
        assert (opened.before, opened.num_new, opened.num_held_back) == ((), 49, 1)
        change = lab.change(range(100, 130), is_replace=False)
        assert (change.num_kept, change.num_new, change.num_void, change.num_tokens) == (49, 30, 0, 80)
        assert [block.block_id for block in change.after[:4]] == [block.block_id for block in opened.after]
        assert change.after[3].slots == (SlotState.KEPT, *[SlotState.NEW] * 15)
        assert change.after[4].slots == (*[SlotState.NEW] * 15, SlotState.WAITING)
        assert lab.finish([7]) == lab.expected_output([*HEAD, *range(100, 130), 7])


def test_a_replacement_keeps_the_common_beginning_and_voids_the_rest(model: Path) -> None:
    with KVLab(model, "update", block_size=SIZE) as lab:
        lab.open(HEAD)
        lab.change(range(100, 130), is_replace=False)
        replaced = [*HEAD[:20], *range(200, 240)]
        change = lab.change(replaced, is_replace=True)
        assert (change.num_kept, change.num_void, change.num_new, change.num_held_back) == (20, 59, 39, 1)
        assert change.before[1].slots == (*[SlotState.KEPT] * 4, *[SlotState.VOID] * 12)
        assert change.after[1].slots == (*[SlotState.KEPT] * 4, *[SlotState.NEW] * 12)
        assert change.before[1].block_id == change.after[1].block_id
        for word in ("before", "after", "made void", "20"):
            assert word in change._repr_html_()
        assert lab.finish([]) == lab.expected_output(replaced)


def test_what_the_engine_refuses_is_said(model: Path) -> None:
    with KVLab(model, "append") as lab:
        lab.open(HEAD)
        with pytest.raises(ConfigurationError, match="refused to append 600 tokens"):
            lab.change([5] * 600, is_replace=False)
    with pytest.raises(ConfigurationError, match="choose 'append' or 'update'"):
        KVLab(model, "both")
