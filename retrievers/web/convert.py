"""HTML to Markdown with crawl4ai. A large page takes seconds of Python: keep it off an event loop."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ConvertedPage", "convert_html", "prepare_crawl4ai"]

_BOILERPLATE_TAGS = ("nav", "footer", "aside", "button", "noscript", "template", "style", "script", "link", "meta")
_MEDIA_TAGS = ("img", "picture", "svg", "video", "audio", "canvas", "iframe", "object")
_UNPARSABLE = re.compile(r"\A\s*<\?xml[^>]*\?>|\x00")
_TRAILING_SPACE = re.compile(r"[^\S\n]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")
_MARKDOWN_FAILURE = "Error converting HTML to markdown: "


@dataclass(frozen=True, slots=True)
class ConvertedPage:
    """A page as text for a model."""

    title: str
    markdown: str


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


def convert_html(html: str, url: str) -> ConvertedPage:
    """The page's text in Markdown, without navigation, links and images. Empty where the page has no text.

    Raises:
        ValueError: crawl4ai cannot read the page.
    """
    html = _UNPARSABLE.sub("", html)
    main_html = _without_boilerplate(html)
    title, markdown = _convert(main_html, url)
    if main_html and not markdown:  # some pages have all of their text inside what usually is decoration
        title, markdown = _convert(html, url)
    return ConvertedPage(title, markdown)


def _convert(html: str, url: str) -> tuple[str, str]:
    from crawl4ai.content_scraping_strategy import LXMLWebScrapingStrategy
    from crawl4ai.markdown_generation_strategy import DefaultMarkdownGenerator

    if not html:
        return "", ""
    page = LXMLWebScrapingStrategy().scrap(url, html)
    if not page.success:
        raise ValueError("the page is not readable as HTML")
    generator = DefaultMarkdownGenerator(options={"ignore_links": True, "ignore_images": True, "body_width": 0})
    markdown = generator.generate_markdown(page.cleaned_html, base_url=url, citations=False).raw_markdown.strip()
    if markdown.startswith(_MARKDOWN_FAILURE):
        raise ValueError(markdown.removeprefix(_MARKDOWN_FAILURE))
    text = _BLANK_LINES.sub("\n\n", _TRAILING_SPACE.sub("", markdown))
    return " ".join(str(page.metadata.get("title") or "").split()), text


def _without_boilerplate(html: str) -> str:
    """The page without navigation, media and links; '' if it has no element at all. (crawl4ai has options for this,
    which lose the text that follows a removed element.)"""
    from lxml import etree  # type: ignore[import-untyped]
    from lxml import html as lxml_html

    try:
        document = lxml_html.document_fromstring(html)
    except etree.ParserError:
        return ""
    body = document.body if document.body is not None else document
    for element in list(body.iter(*_BOILERPLATE_TAGS, *_MEDIA_TAGS)):
        element.drop_tree()
    etree.strip_tags(body, "a")  # links are not kept, and crawl4ai is slow at looking into each
    return str(lxml_html.tostring(document, encoding="unicode"))
