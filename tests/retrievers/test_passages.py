"""A page within its tokens: what matters is kept, in order, and never more than allowed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.lexical import bm25_scores, terms
from stream2llm_sdk.retrievers.web.page import ExtractionOptions, QualityLimits
from stream2llm_sdk.retrievers.web.passages import estimate_tokens, select_passages, split_passages

FILLER = "Nothing of any interest stands in this paragraph, which only fills the page with its many words. " * 6
PAGE = "\n\n".join(
    [
        "# Manual", FILLER, "## Cats", FILLER, "### Food", "Cats eat fish.", FILLER, "## Dogs", FILLER,
        "Dogs bark at the postman.", "They sleep at night.", FILLER, "## Code", "```\n# no heading\n\nbark()\n```",
    ]
)  # fmt: skip


def test_page_that_fits_is_left_as_it_is() -> None:
    assert select_passages(PAGE, "cats", None) == PAGE
    assert select_passages(PAGE, "cats", 10_000) == PAGE


def test_passages_that_match_are_kept_in_order_under_their_headings() -> None:
    text = select_passages(PAGE, "Why do dogs bark, and what do cats eat?", 400)
    places = [
        text.index(part) for part in ("# Manual", "## Cats", "### Food", "Cats eat fish.", "## Dogs", "Dogs bark")
    ]
    assert places == sorted(places)
    assert text.count("## Dogs") == 1
    assert "They sleep at night." in text  # beside one that matches
    assert "[…]" in text
    assert estimate_tokens(text) <= 400


@pytest.mark.parametrize("query", ["", "zebra", "the of"])
def test_beginning_where_nothing_matches(query: str) -> None:
    text = select_passages(PAGE, query, 150)
    assert text.startswith("# Manual\n\nNothing of any interest")
    assert "Dogs" not in text


def test_code_block_is_one_block_and_stays_fenced_when_it_is_cut() -> None:
    code = "```\n" + "\n".join(f"    line_{i} = call(argument_{i})" for i in range(100)) + "\n```"
    passages = split_passages(f"# Head\n\n{code}", max_tokens=80)
    assert len(passages) > 5
    for passage in passages:
        lines = passage.text.split("\n")
        assert (lines[0], lines[-1]) == ("```", "```")
        assert all(line.startswith("    line_") for line in lines[1:-1])
        assert passage.headings == ("# Head",)
    assert [p.text for p in split_passages(PAGE)][-1].endswith("```\n# no heading\n\nbark()\n```")


@pytest.mark.parametrize("text", ["word " * 100_000, "x" * 300_000, "漢字" * 60_000, "a,b;" * 50_000, " \n" * 100_000])
def test_page_without_any_structure(text: str) -> None:
    start = time.perf_counter()
    selected = select_passages(text, "word 漢 a", 300)
    assert estimate_tokens(selected) <= 300
    assert selected or not text.strip()
    assert time.perf_counter() - start < 20


MARKDOWN = st.lists(
    st.sampled_from(
        ["# A", "## B b", "### C", "```", "~~~", "cats and dogs", "x" * 80, "- item\n  - sub", "", "| a | b |"]
    )
    | st.text(max_size=40),
    max_size=25,
).map("\n".join)


@given(MARKDOWN, st.text(max_size=20) | st.just("cats"), st.integers(16, 200))
def test_never_more_tokens_than_allowed_and_never_nothing_of_something(markdown: str, query: str, most: int) -> None:
    selected = select_passages(markdown, query, most)
    assert estimate_tokens(selected) <= most
    for part in selected.split("[…]"):
        assert all(line.strip() in markdown or line.strip("`~ ") == "" for line in part.split("\n"))


def test_own_way_of_counting() -> None:
    selected = select_passages(PAGE, "dogs", 60, count_tokens=lambda text: len(text.split()))
    assert 0 < len(selected.split()) <= 60
    assert "Dogs bark" in selected


def test_terms_and_scores() -> None:
    assert terms("How are the Tasks canceled?") == terms("task cancel")
    assert terms("the of") == ["the", "of"]
    assert terms("日本 x") == ["日", "本", "x"]
    texts = [terms(text) for text in ("a task is cancelled", "cancel", "something else", "")]
    scores = bm25_scores(texts, terms("cancel a task"))
    assert scores[0] > scores[1] > scores[2] == scores[3] == 0
    assert bm25_scores([], ["x"]) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_page_tokens": 3}, {"max_page_tokens": True}, {"max_links": -1}, {"max_pdf_pages": 0}, {"languages": "en"},
        {"languages": ("english",)}, {"quality": 0.5}, {"query": None},
    ],
)  # fmt: skip
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ExtractionOptions(**options)  # type: ignore[arg-type]


def test_limits_are_checked() -> None:
    for limits in ({"min_words": -1}, {"max_link_density": 1.5}, {"min_alphabetic_words": "0.5"}):
        with pytest.raises(ConfigurationError, match=next(iter(limits))):
            QualityLimits(**limits)  # type: ignore[arg-type]
