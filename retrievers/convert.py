"""HTML to Markdown with crawl4ai, and the process that does it.

Conversion takes hundreds of milliseconds of Python for a large page, so it runs in processes of its own. A converter
process speaks over one socket: frames of a JSON header and a body, one request at a time, each answered by one reply.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["FRAME_HEAD", "ConvertedPage", "convert_html", "pack_frame", "prepare_crawl4ai", "serve"]

FRAME_HEAD = struct.Struct(">II")
"""Lengths in bytes of a frame's JSON header and of its body."""

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


def pack_frame(header: dict[str, Any], body: str = "") -> bytes:
    """One message between the pool and a converter process."""
    head, payload = json.dumps(header).encode(), body.encode(errors="replace")
    return FRAME_HEAD.pack(len(head), len(payload)) + head + payload


class _JobStopped(BaseException):
    """Not an Exception, so that a library's `except Exception` does not swallow it."""


class _JobLoop:
    """The converter process: answers requests until its socket is closed; SIGUSR1 stops the current one."""

    def __init__(self, stream: io.BufferedRWPair) -> None:
        self._stream = stream
        self._is_busy = False
        signal.signal(signal.SIGUSR1, self._stop_job)

    def run(self) -> None:
        self._send({"ready": True})
        while (request := self._receive()) is not None:
            header, html = request
            self._send(*self._answer(html, header["url"]))

    def _answer(self, html: str, url: str) -> tuple[dict[str, Any], str]:
        try:
            self._is_busy = True
            page = convert_html(html, url)
            self._is_busy = False
        except _JobStopped:
            return {"error": "stopped"}, ""
        except Exception as error:
            self._is_busy = False
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())}, ""
        return {"title": page.title}, page.markdown

    def _stop_job(self, *_: object) -> None:
        if self._is_busy:
            self._is_busy = False
            raise _JobStopped

    def _receive(self) -> tuple[dict[str, Any], str] | None:
        head = self._stream.read(FRAME_HEAD.size)
        if len(head) < FRAME_HEAD.size:
            return None
        header_size, body_size = FRAME_HEAD.unpack(head)
        header = json.loads(self._stream.read(header_size))
        return header, self._stream.read(body_size).decode()

    def _send(self, header: dict[str, Any], body: str = "") -> None:
        self._stream.write(pack_frame(header, body))
        self._stream.flush()


def serve(file_descriptor: int) -> None:
    """The converter process's main function, on its end of the socket. Ends when the other end is closed."""
    with socket.socket(fileno=file_descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            prepare_crawl4ai()
            convert_html("<html><body><p>warm</p></body></html>", "http://localhost/")
        except Exception as error:
            stream.write(pack_frame({"failed": f"{type(error).__name__}: {error}"}))
            return
        _JobLoop(stream).run()
