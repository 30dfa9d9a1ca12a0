"""A page, whatever its form, as the Markdown that is worth prompt tokens. Takes up to seconds of CPU: keep it off an
event loop.

How HTML becomes Markdown was chosen by `tests/benchmarks/extraction.py`: word F1 against the main text, decided by
hand, of 18 documentation pages of 6 kinds of sites (Sphinx, DocBook, AsciiDoc, Apache's own, hand-written, Debian's)
and of the 181 news and blog pages of Scrapinghub's article-extraction-benchmark; sentences that must and must not come
out; code lines that keep their indentation; and milliseconds of CPU time a page.

| extractor             | F1 docs | F1 articles | sentences | code lines | ms docs | ms articles |
|-----------------------|---------|-------------|-----------|------------|---------|-------------|
| ours                  |    .991 |        .940 |      1.00 |       1.00 |     144 |          42 |
| trafilatura 2.3       |    .975 |        .958 |       .98 |        .73 |     105 |          24 |
| crawl4ai 0.9's        |    .975 |        .749 |       .57 |        .91 |      58 |          22 |
| resiliparse 2.0       |    .933 |        .915 |       .77 |       1.00 |       9 |           3 |
| readability-lxml 0.8  |    .857 |        .860 |       .81 |        .82 |     115 |          27 |

trafilatura finds the main text best but loses code, definitions and cells; resiliparse is fast and loses whole lists;
readability-lxml loses sections of long pages; crawl4ai's Markdown is complete but keeps what surrounds an article. So
trafilatura decides what is main text, its decision is carried over to the page's own elements (`main_text`), and
html-to-markdown renders these (`markdown`). Our rules were tuned on these same pages, so our row is the optimistic one;
on articles trafilatura alone is better.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import MissingExtraError
from stream2llm_sdk.retrievers.web.html_tree import parse_html, read_head
from stream2llm_sdk.retrievers.web.links import page_links
from stream2llm_sdk.retrievers.web.main_text import linked_chars, main_text
from stream2llm_sdk.retrievers.web.markdown import to_markdown
from stream2llm_sdk.retrievers.web.page import ConvertedPage, ExtractionOptions
from stream2llm_sdk.retrievers.web.passages import select_passages
from stream2llm_sdk.retrievers.web.pdf import is_pdf, pdf_text
from stream2llm_sdk.retrievers.web.quality import identify_language, quality_fault

__all__ = ["ConvertedPage", "convert_html", "convert_page", "prepare_crawl4ai", "warm_up"]

_CHARSET_SAMPLE_BYTES = 64_000


def prepare_crawl4ai() -> None:
    """Sets crawl4ai's environment before its first import: no notice on the terminal, and its folder in the user's
    cache instead of the home directory. What the user has set stays."""
    os.environ.setdefault("CRAWL4AI_NO_CLOUD_NOTICE", "1")
    if "CRAWL4_AI_BASE_DIRECTORY" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "stream2llm-sdk" / "crawl4ai"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a home that cannot be written
            folder = Path(tempfile.mkdtemp(prefix="stream2llm-crawl4ai-"))
        os.environ["CRAWL4_AI_BASE_DIRECTORY"] = str(folder)


def warm_up() -> None:
    """Imports what conversion needs, by converting a little.

    Raises:
        MissingExtraError: one of the libraries is not installed.
    """
    options = ExtractionOptions(query="warm", max_page_tokens=16)
    html = "<html><body><p>warm</p>" + "<p>words and words.</p>" * 20
    try:
        convert_html(html, "http://localhost/", options)
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "crawler") from error


def convert_page(
    page: str | bytes, url: str, options: ExtractionOptions, *, content_type: str = "text/html"
) -> ConvertedPage:
    """An HTML, plain-text or PDF page as Markdown. Bytes that begin as a PDF does are one, whatever `content_type`
    says.

    Raises:
        ValueError: the page is damaged or needs a password.
        MissingExtraError: a library that this page needs is not installed.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if isinstance(page, bytes):
        if is_pdf(page):
            return _convert_pdf(page, options)
        if kind == "application/pdf":
            raise ValueError("the page is said to be a PDF, but is none")
        page = _decoded(page)
    if kind == "text/plain":
        return _finished(page.replace("\x00", "").strip(), options, title="")
    return convert_html(page, url, options)


def convert_html(html: str, url: str, options: ExtractionOptions | None = None) -> ConvertedPage:
    """The page's main text in Markdown, its links and what its head says. Without `options`, all of its main text."""
    options = options or ExtractionOptions(max_page_tokens=None)
    root = parse_html(html)
    if root is None:
        return ConvertedPage("", "")
    head = read_head(root, url)
    facts = {
        "links": page_links(root, head.base_url, options.max_links) if options.max_links and head.follows_links else (),
        "canonical_url": head.canonical_url,
        "has_scripts": next(root.iter("script"), None) is not None,
        "metadata": {"description": head.description} if head.description else {},
    }
    tree = main_text(html, root)
    linked = linked_chars(tree)
    return _finished(to_markdown(tree), options, title=head.title, language=head.language, linked=linked, **facts)


def _convert_pdf(body: bytes, options: ExtractionOptions) -> ConvertedPage:
    markdown, facts = pdf_text(body, options.max_pdf_pages)
    page = _finished(markdown, options, title=str(facts.pop("title")), metadata=facts)
    if not markdown:
        return ConvertedPage(page.title, "", refusal="the PDF holds no text; it may be scanned", metadata=facts)
    return page


def _finished(
    markdown: str, options: ExtractionOptions, *, title: str, language: str = "", linked: int = 0, **facts: Any
) -> ConvertedPage:
    """The page after the filters, cut to what matters for the question."""
    refusal = ""
    if options.languages and markdown:
        language = identify_language(markdown) or language
        if language and language not in options.languages:
            refusal = f"the page's language is {language!r}, which is not among languages={options.languages}"
    if options.quality is not None and not refusal:
        refusal = quality_fault(markdown, linked, options.quality)
    text = "" if refusal else select_passages(markdown, options.query, options.max_page_tokens)
    num_words = len(markdown.split())
    return ConvertedPage(title, text, language=language, refusal=refusal, num_words=num_words, **facts)


def _decoded(body: bytes) -> str:
    """Text of a page whose charset nobody has found: UTF-8 if it is, else the likeliest."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        from charset_normalizer import from_bytes

        guess = from_bytes(body[:_CHARSET_SAMPLE_BYTES]).best()
        return body.decode(guess.encoding if guess is not None else "utf-8", errors="replace")
