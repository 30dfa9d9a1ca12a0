"""A page's text survives conversion; its decoration does not."""

from __future__ import annotations

import pytest

from stream2llm_sdk.retrievers.web.convert import convert_html, prepare_crawl4ai

prepare_crawl4ai()


@pytest.mark.parametrize(
    ("html", "markdown"),
    [
        ("<p>Hello <noscript>n</noscript> world</p>", "Hello world"),
        ("<body><nav>menu</nav>direct text<footer>f</footer> and more<p>para</p></body>", "direct text and more\npara"),
        ("<h1>Head</h1><p>Some <b>bold</b> <a href='/x'>link</a> <code>x=1</code><img src=a alt=pic></p>",
         "# Head\nSome **bold** link `x=1`"),
        ("<pre>def f():\n    return 1</pre>", "```\ndef f():\n    return 1\n```"),
        ("<aside>the whole text</aside>", "the whole text"),
        ("no tags at all", "no tags at all"),
        ("<p>a\0b &#xD800; &#0;c", "ab \ufffd \ufffdc"),
        ("<script>x = '<p>no</p>'</script><style>p {}</style>", ""),
        ("<!-- only a comment -->", ""),
        ("  \n ", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_markdown(html: str, markdown: str) -> None:
    assert convert_html(html, "http://example.com/").markdown == markdown


def test_xhtml_with_declaration_and_title() -> None:
    html = (
        '<?xml version="1.0" encoding="utf-8"?>\n<html xmlns="http://www.w3.org/1999/xhtml">'
        "<head><title>\n Cats\n &amp; dogs </title></head><body><p>text</p></body></html>"
    )
    page = convert_html(html, "http://example.com/")
    assert (page.title, page.markdown) == ("Cats & dogs", "text")
