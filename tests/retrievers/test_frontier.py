"""Search results first, then the link that speaks most of the question."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.web.frontier import Candidate, Frontier, LinkOptions
from stream2llm_sdk.retrievers.web.page import PageLink

QUESTION = "How does a task group cancel its tasks?"
ROOT = Candidate("https://e.example/docs/", root="https://e.example/docs/")


def frontier(**options: Any) -> Frontier:
    return Frontier(QUESTION, LinkOptions(**options))


def order(found: Frontier) -> list[str]:
    urls = []
    while (candidate := found.pop()) is not None:
        urls.append(candidate.url)
    return urls


def test_hits_come_in_the_searchs_order_before_links_and_once() -> None:
    found = frontier()
    found.add_links([PageLink("https://e.example/cancel", "cancel a task group")], ROOT, 1.0)
    urls = ["https://a.example/", "https://b.example/x", "http://A.example/index.html", "https://b.example/x#part"]
    assert [found.add_hit(SearchHit(url)) for url in urls] == [True, True, False, False]
    assert order(found) == [*urls[:2], "https://e.example/cancel"]
    assert not found.add_hit(SearchHit(urls[0]))  # also after it was given out


def test_links_are_ordered_by_text_context_url_place_and_parent() -> None:
    found = frontier(max_pages_per_host=None)
    filler = [PageLink(f"https://e.example/{n}", f"chapter {n} of the manual") for n in range(30)]
    main = [
        PageLink(
            "https://e.example/best", "how a task group cancels its tasks", "see how a task group cancels its tasks"
        ),
        PageLink("https://e.example/task-group/cancel", "more", "read more"),
        PageLink("https://e.example/near", "here", "what cancels tasks of a group is written here"),
        PageLink("https://e.example/aside", "how a task group cancels its tasks", "", in_main=False),
    ]
    found.add_links([*filler, *main], ROOT, 0.2)
    assert order(found) == [f"https://e.example/{name}" for name in ("best", "task-group/cancel", "near", "aside")]


def test_parents_relevance_decides_between_equal_links() -> None:
    found = frontier()
    found.add_links([PageLink("https://a.example/poor", "cancel tasks")], ROOT, 0.1)
    found.add_links([PageLink("https://b.example/good", "cancel tasks")], ROOT, 0.9)
    assert order(found) == ["https://b.example/good", "https://a.example/poor"]


def test_link_without_a_word_of_the_question_is_not_followed_unless_asked() -> None:
    link = PageLink("https://e.example/privacy", "Privacy", "Privacy notice")
    strict, open_ = frontier(), frontier(min_relevance=0.0)
    for found in (strict, open_):
        found.add_links([link], ROOT, 0.9)
    assert (order(strict), order(open_)) == ([], [link.url])


@pytest.mark.parametrize("question", ["uvloop", "How fast is uvloop compared with other event loops of Python and Go?"])
def test_word_that_all_links_share_still_counts(question: str) -> None:
    found = Frontier(question, LinkOptions(max_pages_per_host=None))
    urls = [f"https://e.example/{number}" for number in range(50)]
    found.add_links([PageLink(url, "uvloop documentation", in_main=False) for url in urls], ROOT, 0.5)
    found.add_links([PageLink("https://e.example/privacy", "privacy")], ROOT, 0.5)
    assert sorted(order(found)) == sorted(urls)


def test_depth_is_bounded() -> None:
    found = frontier(max_depth=2)
    parent = ROOT
    for depth in (1, 2):
        assert found.add_links([PageLink(f"https://e.example/cancel{depth}", "cancel")], parent, 0.5) == 1
        popped = found.pop()
        assert popped is not None
        parent = popped
        assert (parent.depth, parent.root) == (depth, ROOT.url)
    assert found.add_links([PageLink("https://e.example/cancel3", "cancel")], parent, 0.5) == 0
    assert frontier(max_depth=0).add_links([PageLink("https://e.example/cancel", "cancel")], ROOT, 1.0) == 0


@pytest.mark.parametrize(
    ("scope", "followed"),
    [
        ("any", ["https://e.example/1", "https://www.e.example/2", "https://e.example:444/3", "https://o.example/4"]),
        ("site", ["https://e.example/1", "https://www.e.example/2"]),
        ("host", ["https://e.example/1"]),
    ],
)
def test_scope_is_that_of_the_searchs_page(scope: str, followed: list[str]) -> None:
    found = frontier(scope=scope)
    urls = ["https://e.example/1", "https://www.e.example/2", "https://e.example:444/3", "https://o.example/4"]
    found.add_links([PageLink(url, "cancel tasks") for url in urls], ROOT, 0.5)
    assert sorted(order(found)) == sorted(followed)


def test_one_host_does_not_use_up_the_crawl_and_busy_hosts_wait() -> None:
    found = frontier(max_pages_per_host=2)
    found.add_links([PageLink(f"https://e.example/{n}", "cancel tasks group") for n in range(5)], ROOT, 0.9)
    found.add_links([PageLink("https://o.example/", "cancel")], ROOT, 0.1)
    busy = found.pop({"e.example"})
    assert busy is not None
    assert busy.host == "o.example"
    assert found.pop({"e.example"}) is None
    assert len(order(found)) == 2


@pytest.mark.parametrize(
    ("url", "is_followed"),
    [
        ("https://e.example/a.html", True),
        ("https://e.example/a.php?x=1", True),
        ("https://e.example/v1.2", True),
        ("https://e.example/paper.pdf", True),
        ("https://e.example/file.c", True),
        ("https://e.example/a.png", False),
        ("https://e.example/a.tar.gz", False),
        ("https://e.example/a.mp4", False),
        ("https://e.example/a.js", False),
        ("ftp://e.example/a", False),
        ("javascript:cancel()", False),
        ("http://[::1", False),
        ("https://e.example/" + "x" * 3_000, False),
    ],
)
def test_only_what_may_be_a_page_is_followed(url: str, is_followed: bool) -> None:
    assert frontier().add_links([PageLink(url, "cancel")], ROOT, 0.5) == is_followed


def test_only_the_best_links_are_kept() -> None:
    found = frontier(max_pages_per_host=None)
    links = [PageLink(f"https://e.example/{n}", f"some chapter {n}") for n in range(2_500)]
    links.insert(100, PageLink("https://e.example/best", "task group cancel tasks"))
    found.add_links(links, ROOT, 0.1)
    assert len(found) == 2_000
    assert order(found) == ["https://e.example/best"]


def test_relevance_of_a_text() -> None:
    found = frontier()
    exact, partly = found.relevance("A task group cancels all tasks. Cancelling a group…"), found.relevance("a group")
    assert 0.4 < exact <= 1
    assert 0 < partly < exact
    assert found.relevance("nothing of it") == found.relevance("") == 0
    assert Frontier("???", LinkOptions()).relevance("anything") == 0


@given(
    query=st.text(max_size=30),
    links=st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20), st.text(max_size=40)), max_size=30),
)
def test_every_link_comes_at_most_once_whatever_the_texts(query: str, links: list[tuple[str, str, str]]) -> None:
    found = Frontier(query, LinkOptions(min_relevance=0.0, max_pages_per_host=None))
    num_added = found.add_links([PageLink(f"https://e.example/{u}", t, c) for u, t, c in links], ROOT, 0.5)
    urls = order(found)
    assert len(urls) == len(set(urls)) == num_added
    assert len(found) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_depth": -1},
        {"max_depth": True},
        {"scope": "domain"},
        {"max_pages_per_host": 0},
        {"min_relevance": 1.5},
        {"min_relevance": "0"},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigurationError, match=f"{name}="):
        LinkOptions(**options)
