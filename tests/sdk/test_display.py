"""How results show themselves in notebooks: what is drawn, that nothing hostile gets into a page, and that it can be
read on light and dark ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_tokenizer import byte_tokenizer

from stream2llm_sdk import (
    Answer,
    Append,
    Chunk,
    ContextEnd,
    DroppedChunk,
    DropReason,
    EventTrail,
    EventType,
    PromptAssembler,
    Replace,
    Source,
    SourceFailure,
    Timings,
    TokenCounts,
)
from stream2llm_sdk.display import theme
from stream2llm_sdk.display.markup import Markup, block, link, seconds, table
from stream2llm_sdk.display.plots import PLOT_INK, new_plot, plot_lines, plot_style, themed
from stream2llm_sdk.display.svg import ticks
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.prompt_history import PromptHistory
from stream2llm_sdk.traces import TimedFailure, TimedUpdate, Trace, TraceSet, workload_statistics
from stream2llm_sdk.traces.recording.summary import RecordingSummary
from stream2llm_sdk.traces.report.phases import Phase

HOSTILE = "<script>alert('x')</script>"
EVENTS: list[tuple[EventType, float, dict[str, Any]]] = [
    (EventType.QUEUED, 0.0, {}),
    (EventType.SCHEDULED, 0.1, {}),
    (EventType.KV_ON_GPU, 0.3, {}),
    (EventType.CHUNK_ARRIVED, 0.8, {"num_tokens": 128}),
    (EventType.PROMPT_UPDATED, 0.9, {"lcp": 40, "num_tokens": 168, "num_invalidated": 12}),
    (EventType.SCHEDULED, 0.9, {}),
    (EventType.CONTEXT_COMPLETE, 1.0, {}),
    (EventType.PREEMPTED_RECOMPUTE, 1.2, {"num_tokens": 100}),
    (EventType.SCHEDULED, 1.5, {}),
    (EventType.FIRST_TOKEN, 2.0, {}),
    (EventType.FINISHED, 3.0, {}),
]


def trail(events: list[tuple[EventType, float, dict[str, Any]]] = EVENTS) -> EventTrail:
    return EventTrail.from_records("one", [(kind, 500 + at_s, 1e9 + at_s, data) for kind, at_s, data in events])


def answer(**changes: Any) -> Answer:
    chunk = Chunk(text="Some text.", source=f"https://a.example/{HOSTILE}", title=HOSTILE)
    sly = Chunk(text="More.", source="javascript:alert(1)", title="sly")
    fields: dict[str, Any] = {
        "question": f"What? {HOSTILE}",
        "text": f"This.\n{HOSTILE}",
        "token_ids": (1, 2),
        "finish_reason": "length",
        "sources": (Source(chunk, "crawler", 10, 40, True), Source(sly, "crawler", 40, 50, False)),
        "dropped": (DroppedChunk(chunk, DropReason.CHUNK_BUDGET, 100, 30),),
        "failures": (SourceFailure(HOSTILE, f"HTTP 404 {HOSTILE}"),),
        "context_end": ContextEnd.RETRIEVED,
        "timings": Timings(0.5, 1.0, 1.1, 2.0, 3.0),
        "tokens": TokenCounts(60, 2, 60, 0, 12, 0),
        "trail": trail(),
    }
    return Answer(**(fields | changes))


def traces() -> list[Trace]:
    documents = [Chunk(text="x" * 400, source=f"d{number}", title=HOSTILE) for number in range(4)]
    crawl = Trace(
        "crawl",
        HOSTILE,
        (TimedUpdate(0.2, Append(()), begin_s=0.0), TimedUpdate(0.9, Append((documents[0],)), begin_s=0.2)),
        tag="crawler",
        failures=(TimedFailure(1.4, "http://gone.example", HOSTILE),),
    )
    pools = (documents[:2], [documents[0], documents[2]])
    updates = (TimedUpdate(0.1 * number, Replace(tuple(pool))) for number, pool in enumerate(pools, start=1))
    return [crawl, Trace("search", "?", tuple(updates), tag="anns")]


def history(order: str = "rank") -> PromptHistory:
    assembler = PromptAssembler(byte_tokenizer(), max_model_len=4096, max_answer_tokens=16, order=order)
    found = PromptHistory(assembler.begin("Which?"))
    a, b, c = (Chunk(text=letter * 20, title=f"{HOSTILE}{letter}") for letter in "abc")
    for chunks in ((a, b), (b, a), (b, c)):
        found.apply(Replace(chunks))
    found.complete()
    return found


def shown() -> dict[str, str]:
    """Everything here, as HTML."""
    kinds = TraceSet(tuple(traces()))
    things: dict[str, Any] = {
        "answer": answer(),
        "trail": trail(),
        "history": history(),
        "tokens": history().tokens(byte_tokenizer()),
        "prompt": history().prompt,
        "traces": kinds,
        "plot": kinds.plot(),
        **{trace.trace_id: trace for trace in kinds},
        **{kind.name: kind for kind in workload_statistics(kinds)},
    }
    return {name: thing._repr_html_() for name, thing in things.items()}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return shown()


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def texts(page: str) -> str:
    return " ".join("".join(drawing.itertext()) for drawing in drawings(page))


def contrast(colour: str, background: str) -> float:
    """By WCAG 2.1."""

    def luminance(code: str) -> float:
        parts = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    brighter, darker = sorted((luminance(colour), luminance(background)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("background", ["#FFFFFF", "#111111"])
@pytest.mark.parametrize("colour", [colour for colour in theme.LINES if colour != theme.INK])
def test_a_line_stands_out_on_light_and_on_dark(colour: str, background: str) -> None:
    assert contrast(colour, background) >= 3


def test_every_phase_has_a_colour() -> None:
    assert set(theme.PHASES) == set(Phase)


def test_nothing_hostile_gets_into_a_page(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert "<script" not in page, name
        assert "href='javascript" not in page.replace('"', "'"), name
    assert "https://a.example/" in pages["answer"]


def test_text_has_the_colour_of_the_page(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        assert PLOT_INK not in page, name
        assert "<style" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL), name
        for drawing in drawings(page):
            for text in drawing.iter("{http://www.w3.org/2000/svg}text"):
                assert theme.INK in (text.get("fill") or text.get("style") or ""), (name, text.text)


def test_a_drawing_says_what_it_shows(pages: dict[str, str]) -> None:
    assert all(drawing.get("aria-label") for page in pages.values() for drawing in drawings(page))
    assert all(drawings(pages[name]) for name in ("answer", "trail", "history", "prompt", "crawl", "search", "plot"))


def test_a_trail_shows_what_the_request_did_and_both_times_to_the_first_token(pages: dict[str, str]) -> None:
    text = texts(pages["trail"])
    for said in (
        "prefills, 1.00 s",
        "decodes, 1.00 s",
        "waits for a chunk, 500 ms",
        "waits for its turn, 100 ms",
        "preempted, KV dropped, 300 ms",
        "queued, no KV, 100 ms",
        "TTFT from the request: 2.00 s",
        "TTFT from the complete context: 1.00 s",
        "a chunk of 128 tokens at 800 ms",
        "12 computed tokens became void at 900 ms",
    ):
        assert said in text
    assert "11 events" in pages["trail"]


def test_a_trail_without_an_answer_is_shown(pages: dict[str, str]) -> None:
    queued = trail(EVENTS[:1])._repr_html_()
    assert drawings(queued)
    assert "TTFT" not in queued
    assert "no trail" in EventTrail("none", [])._repr_html_()


def test_a_long_trail_is_a_small_page() -> None:
    many = [EVENTS[0]] + [
        (EventType.SCHEDULED if number % 2 else EventType.KV_ON_GPU, 0.1 + number * 1e-5, {})
        for number in range(20_000)
    ]
    assert len(trail(many)._repr_html_()) < 100_000


def test_an_answer_shows_its_times_its_sources_and_what_is_missing(pages: dict[str, str]) -> None:
    page = pages["answer"]
    for said in ("2.00 s", "1.00 s", "made void by updates", "1 cut or left out", "1 could not be retrieved", "budget"):
        assert said in page
    empty = answer(sources=(), dropped=(), failures=(), trail=EventTrail("none", []), finish_reason="stop")
    assert "the model read no sources" in empty._repr_html_()


def test_a_history_says_what_each_update_kept_and_undid() -> None:
    head, first, swapped, replaced, whole = history()
    assert (head.name, first.name, whole.name) == ("head", "update 1", "question")
    assert first.lcp == len(head.ids)
    assert first.num_invalidated == 0
    # Both chunks stand there again, and both are void; the titles differ in their last letter.
    assert swapped.num_invalidated == first.num_new - (swapped.lcp - first.lcp)
    assert replaced.lcp >= replaced.placements[0].end
    assert whole.ids[: whole.lcp] == replaced.ids
    assert set(whole.written_by[whole.lcp :]) == {4}


@pytest.mark.parametrize("order", ["rank", "stable"])
def test_what_is_prefilled_is_the_prompt_and_what_was_in_vain(order: str) -> None:
    found = history(order)
    assert found.num_prefilled - found.num_invalidated == len(found[-1].ids) == len(found.prompt.final_ids)
    assert found.num_invalidated <= history("rank").num_invalidated


def test_tokens_are_shown_one_by_one(pages: dict[str, str]) -> None:
    num_tokens = sum(len(step.ids) + step.num_invalidated for step in history())
    assert pages["tokens"].count("<span style='white-space:pre-wrap") == num_tokens
    assert pages["tokens"].count("line-through") == history().num_invalidated


def test_a_trace_shows_what_came_when_and_what_failed(pages: dict[str, str]) -> None:
    assert "+100 tokens" in texts(pages["crawl"])
    assert "failed: http://gone.example" in texts(pages["crawl"])
    assert "no text: a search ended" in texts(pages["crawl"])
    assert "2 documents, 200 tokens, 100 void" in texts(pages["search"])


def test_a_set_of_traces_is_told_by_kind(pages: dict[str, str]) -> None:
    assert "2 traces" in pages["traces"]
    assert "all of them" in pages["traces"]
    assert "ESTIMATED" in pages["plot"]
    with pytest.raises(ConfigurationError, match="no traces"):
        TraceSet(()).plot()


def test_a_recording_is_told_in_numbers_and_why_some_of_it_failed(tmp_path: Path) -> None:
    page = RecordingSummary(tmp_path / HOSTILE, 3, 2, 1, 9, 4, {"no results": 1}, {HOSTILE: 4}, {"disturbance": 1.02})
    shown = page._repr_html_()
    for said in ("no results", "disturbance", "1.02", "9"):
        assert said in shown
    assert "<script" not in shown


def test_a_plot_takes_the_colour_of_the_page_and_can_be_saved(tmp_path: Path) -> None:
    with plot_style():
        figure = new_plot(2.0)
        axes = figure.subplots()
        for number, style in enumerate(plot_lines(7)):
            axes.plot([0, 1], [0, number], label=f"{number} <b>", **style)
        axes.legend()
        plot = themed(figure, f"Title {HOSTILE}", "caption")
    (drawing,) = drawings(plot._repr_html_())
    assert "0 <b>" in "".join(drawing.itertext())
    assert PLOT_INK not in plot.svg
    plot.save(tmp_path / "plot.svg")
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().get("style", "").startswith("color:black")


def test_settings_of_matplotlib_come_back() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with plot_style():
        assert mpl.rcParams["svg.fonttype"] == "none"
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0.00 s"), (12.345, "12.35 s"), (1234.5, "1,234.5 s"), (0.05, "50 ms"), (2e-5, "20 µs")],
)
def test_times_are_told_in_their_own_unit(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_a_table_sets_numbers_on_the_right() -> None:
    page = table(("name", "n", "share"), [("a", 12345, 0.5), ("<b>", None, 2.0)])
    assert ">12,345<" in page
    assert "&lt;b&gt;" in page
    assert page.count("text-align:right") == 6
    assert table(("a",), []).count("<tr>") == 1


def test_what_html_cannot_hold_is_replaced() -> None:
    shown = str(block("a\0b", table(("\ud800",), [("c",)]), title="\0"))
    assert "\0" not in shown
    assert shown.encode().count("\ufffd".encode()) == 3


def test_what_is_markup_already_is_not_escaped_again() -> None:
    assert block(Markup("<i>x</i>"), "<i>") == block(Markup("<i>x</i>"), Markup("&lt;i&gt;"))
    assert link("ftp://a.example", "<b>") == "&lt;b&gt;"


@pytest.mark.parametrize("end", [0.0, 1e-9, 0.37, 1.0, 7.9, 3600.0, float("inf")])
def test_ticks_are_few_and_within(end: float) -> None:
    found = ticks(end)
    assert 1 <= len(found) <= 9
    assert found[0] == 0
    assert found[-1] <= end * (1 + 1e-6)
