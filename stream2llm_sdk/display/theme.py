"""Colours that can be read on a light and on a dark page.

The hues are those of Okabe and Ito, "Color Universal Design" (2008); those that fade on white are darkened until they
stand out by 3 to 1 from white and from JupyterLab's dark background (WCAG 2.1, success criterion 1.4.11).
"""

from __future__ import annotations

from dataclasses import dataclass

from stream2llm_sdk.traces.report.phases import Phase

__all__ = ["INK", "KEPT", "LINES", "NEW", "PHASES", "VOID", "Fill"]

INK = "currentColor"
"""The page's text colour."""

BLUE, VERMILION, GREEN, PURPLE, OCHRE, SKY = "#1F83C9", "#D55E00", "#009E73", "#B8689A", "#C48200", "#56B4E9"

LINES = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, INK)
"""Colours of lines, in the order in which they are taken."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A colour and how much it covers of what is below, from 0 to 1."""

    colour: str
    opacity: float = 1.0


KEPT, NEW, VOID = Fill(INK, 0.28), Fill(BLUE), Fill(VERMILION)
"""What stays as it was, what is new, and what became void."""

PHASES = {
    Phase.RUNNING: Fill(BLUE),
    Phase.QUEUED: Fill(OCHRE),
    Phase.AWAITING_TURN: Fill("#D9C400"),
    Phase.DROPPED: Fill(VERMILION),
    Phase.SWAPPED: Fill(PURPLE),
    Phase.AWAITING_CHUNK: Fill(SKY, 0.45),
    Phase.RETRIEVING: Fill(INK, 0.16),
    Phase.UNKNOWN: Fill(INK, 0.4),
}
"""What a request is doing, in the order in which it is stacked and listed; the hues are those of reports."""
