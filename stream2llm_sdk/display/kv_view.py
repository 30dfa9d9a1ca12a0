"""KV blocks as rows of cells, a cell a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stream2llm_sdk.display.markup import Markup, block, facts, legend, note
from stream2llm_sdk.display.svg import Svg
from stream2llm_sdk.display.theme import INK, KEPT, NEW, VOID, Fill
from stream2llm_sdk.testing.kv_lab import SlotState

if TYPE_CHECKING:
    from stream2llm_sdk.testing.kv_lab import KVBlock, KVSnapshot

__all__ = ["snapshot_html"]

_CELL, _GAP, _LEFT, _WIDTH = 7.0, 12.0, 58.0, 770.0
_ROW = 42.0
_FILLS = {
    SlotState.KEPT: KEPT,
    SlotState.NEW: NEW,
    SlotState.VOID: VOID,
    SlotState.WAITING: Fill(INK, 0.0),
    SlotState.FREE: Fill(INK, 0.0),
}


def snapshot_html(snapshot: KVSnapshot) -> str:
    """The block tables before and after a change, and how many tokens were kept, new and void."""
    groups = [(name, blocks) for name, blocks in (("before", snapshot.before), ("after", snapshot.after)) if blocks]
    per_row = _blocks_per_row(groups)
    rows = [
        (name if start == 0 else "", blocks[start : start + per_row])
        for name, blocks in groups
        for start in range(0, len(blocks), per_row)
    ]
    svg = Svg(_WIDTH, _ROW * len(rows), "KV blocks before and after a change")
    for number, (name, blocks) in enumerate(rows):
        _draw_row(svg, name, blocks, _ROW * number)
    figures = facts(
        (
            ("prompt tokens", snapshot.num_tokens),
            ("KV kept", snapshot.num_kept),
            ("prefilled", snapshot.num_new),
            ("made void", snapshot.num_void),
            ("held back", snapshot.num_held_back),
            ("engine steps", snapshot.num_steps),
        )
    )
    return str(block(figures, svg.markup(), _legend(snapshot)))


def _blocks_per_row(groups: Sequence[tuple[str, Sequence[KVBlock]]]) -> int:
    size = max((len(blocks[0].slots) for _, blocks in groups), default=16)
    return max(1, int((_WIDTH - _LEFT) / (_CELL * size + _GAP)))


def _draw_row(svg: Svg, name: str, blocks: Sequence[KVBlock], top: float) -> None:
    svg.text(_LEFT - 8, top + 17, name, anchor="end", bold=True)
    left = _LEFT
    for each in blocks:
        width = _CELL * len(each.slots)
        for slot, state in enumerate(each.slots):
            svg.rect(left + _CELL * slot, top + 6, _CELL - 1, 14, _FILLS[state], f"block {each.block_id}: {state}")
            if state is SlotState.WAITING:
                svg.dot(left + _CELL * slot + 3, top + 13, 2, Fill(INK))
        svg.frame(left - 1.5, top + 4.5, width + 2, 17, Fill(INK, 0.6))
        svg.text(left, top + 34, f"block {each.block_id}", size=11, opacity=0.72)
        left += width + _GAP


def _legend(snapshot: KVSnapshot) -> Markup:
    colours = [(KEPT, "KV kept"), (NEW, "prefilled now")]
    if snapshot.num_void:
        colours.append((VOID, "made void"))
    held_back = note("• a token that is held back: the prompt may still change behind it")
    is_seen = any(SlotState.WAITING in each.slots for each in snapshot.after)
    return legend((fill.colour, fill.opacity, meaning) for fill, meaning in colours) + (held_back if is_seen else "")
