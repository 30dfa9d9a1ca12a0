"""URLs of one page are equal, and those of two pages are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream2llm_sdk.retrievers.web.canonical_url import canonical_url, is_same_site, names_same_page


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://example.com", "https://example.com/"),
        ("http://EXAMPLE.com:80/a", "https://example.com:443/a"),
        ("https://example.com./a", "https://example.com/a"),
        ("https://e.example/a#part", "https://e.example/a"),
        ("https://e.example/x/../a/./b", "https://e.example/a/b"),
        ("https://e.example/docs/index.html", "https://e.example/docs/"),
        ("https://e.example/docs/INDEX.PHP", "https://e.example/docs/"),
        ("https://e.example/?b=2&a=1", "https://e.example/?a=1&b=2"),
        ("https://e.example/a?utm_source=x&utm_medium=y&gclid=z&fbclid=w", "https://e.example/a"),
        ("https://e.example/a?id=3&PHPSESSID=abc", "https://e.example/a?id=3"),
        ("https://e.example/a;jsessionid=1A2B?x=1", "https://e.example/a?x=1"),
        ("https://e.example/%7Eme/a%20b", "https://e.example/~me/a b"),
        ("https://bücher.example/ä", "https://xn--bcher-kva.example/%C3%A4"),
        ("  https://e.example/a\n", "https://e.example/a"),
    ],
)
def test_forms_of_one_page_are_equal(one: str, other: str) -> None:
    assert canonical_url(one) == canonical_url(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://e.example/a", "https://e.example/A"),
        ("https://e.example/a", "https://e.example/a?page=2"),
        ("https://e.example/a?x=", "https://e.example/a"),
        ("https://e.example:8443/", "https://e.example/"),
        ("http://e.example:8080/", "https://e.example:8080/"),
        ("https://e.example/?a=1&a=2", "https://e.example/?a=2"),
        ("https://e.example/a", "https://www.e.example/a"),
    ],
)
def test_two_pages_differ(one: str, other: str) -> None:
    assert canonical_url(one) != canonical_url(other)


@given(st.text(max_size=60), st.text(max_size=60))
def test_is_stable_for_whatever_a_page_holds(path: str, query: str) -> None:
    try:
        once = canonical_url(f"https://e.example/{path}?{query}")
    except ValueError:
        return
    assert canonical_url(once) == once


@pytest.mark.parametrize("url", ["http://[::1", "http://e.example:99999/"])
def test_malformed_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError):
        canonical_url(url)


def test_page_is_believed_about_its_own_site_only() -> None:
    assert is_same_site("https://www.e.example/a", "http://e.example/b")
    assert names_same_page("https://e.example/a?view=print", "https://e.example/a")
    assert not names_same_page("https://e.example/a", "https://other.example/a")
    assert not names_same_page("https://e.example/a", "https://e.example/")  # said of every page by mistake
    assert names_same_page("https://e.example/index.html", "https://e.example/")
    assert not names_same_page("https://e.example/a", "")
