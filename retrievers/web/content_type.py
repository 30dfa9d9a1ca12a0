"""What a body is, whatever its server calls it.

After the WHATWG MIME Sniffing standard (https://mimesniff.spec.whatwg.org), cut down to what can become text and made
stricter in one place: a body that is declared to be HTML but is plainly something else is not believed.
"""

from __future__ import annotations

import re

from stream2llm_sdk.errors import FetchError

__all__ = ["HTML_TYPES", "PDF", "PLAIN_TEXT", "SNIFFED_BYTES", "check_declared_type", "sniffed_type"]

PDF = "application/pdf"
PLAIN_TEXT = "text/plain"
HTML_TYPES = ("text/html", "application/xhtml+xml")

SNIFFED_BYTES = 1445
"""How much of a body's beginning is looked at."""

_MARKUP_TEXT = ("text/markdown", "text/x-markdown", "text/x-rst", "text/x-web-markdown")
# What servers send when they do not know: only these are replaced by what the bytes look like.
_UNKNOWN_TYPES = (
    "",
    "application/octet-stream",
    "binary/octet-stream",
    "application/unknown",
    "unknown/unknown",
    "*/*",
)
_XML_TYPES = ("application/xml", "text/xml")
_PDF_TYPES = (PDF, "application/x-pdf")
_READABLE = (*HTML_TYPES, PLAIN_TEXT, *_MARKUP_TEXT, *_UNKNOWN_TYPES, *_XML_TYPES, *_PDF_TYPES)

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"RIFF", "a RIFF media file"),
    (b"\x00\x00\x01\x00", "an icon"),
    (b"PK\x03\x04", "a ZIP archive or an office document"),
    (b"\x1f\x8b\x08", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x7fELF", "a program"),
    (b"MZ\x90\x00", "a program"),
    (b"OggS", "an Ogg media file"),
    (b"ID3", "an MP3 file"),
    (b"\x1aE\xdf\xa3", "a Matroska media file"),
    (b"wOFF", "a font"),
    (b"wOF2", "a font"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old office document"),
    (b"SQLite format 3\x00", "a database"),
)
_SPACE = b"\t\n\x0c\r "
_BOM_UTF8, _BOMS_UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_HTML_START = re.compile(
    rb"<(?:!doctype html|html|head|script|iframe|h1|div|font|table|a|style|title|b|body|br|p|meta|main|article|section"
    rb"|nav|ul|link)[\s>/]|<!--|<\?xml[^>]*\?>\s*(?:<!--(?:(?!-->).)*-->\s*)*<(?:!doctype html|html)[\s>]",
    re.IGNORECASE | re.DOTALL,
)
# Bytes that no text in an ASCII-compatible charset holds. ESC is left out: ISO-2022-JP uses it.
_BINARY = bytes([*range(0x09), 0x0B, *range(0x0E, 0x1B), *range(0x1C, 0x20)])
# Real pages hold a stray NUL here and there; a tenth of control bytes is no page.
_MAX_BINARY_SHARE = 0.1


def check_declared_type(declared: str) -> None:
    """Refuses by the Content-Type alone what cannot become text, so that its body is not read.

    Args:
        declared: the media type without parameters, in lower case; '' if there is none.

    Raises:
        FetchError: it is an image, a film, an archive, data for programs, …
    """
    if declared not in _READABLE:
        raise FetchError(f"content type {declared!r:.80} is not text")


def sniffed_type(start: bytes, declared: str, charset: str | None = None) -> str:
    """What the body is: 'text/html', 'application/xhtml+xml', 'text/plain' or 'application/pdf'.

    Args:
        start: the body's first `SNIFFED_BYTES`, decompressed, or all of it if it is shorter.
        declared: the media type of the Content-Type without parameters, in lower case; '' if there is none.
        charset: the declared charset.

    Raises:
        FetchError: the body is not text; the message says what it looks like.
    """
    check_declared_type(declared)
    start = start[:SNIFFED_BYTES]
    content = start.removeprefix(_BOM_UTF8).lstrip(_SPACE)
    if content.startswith(b"%PDF-"):
        return PDF
    looks_like_html = _HTML_START.match(content) is not None
    if not looks_like_html and (reason := _binary_reason(start, charset)):
        raise FetchError(f"{reason}, although its content type is {declared!r:.80}" if declared else reason)
    if declared in HTML_TYPES:
        return declared
    if looks_like_html and declared not in (PLAIN_TEXT, *_MARKUP_TEXT):
        return "text/html"
    if declared in _XML_TYPES or content.startswith(b"<?xml"):
        raise FetchError(f"content type {declared or 'XML'!r:.80} is data for programs, not a page")
    if declared in _PDF_TYPES:
        raise FetchError("content type 'application/pdf', but the body is no PDF")
    return PLAIN_TEXT


def _binary_reason(start: bytes, charset: str | None) -> str | None:
    if start.startswith(_BOMS_UTF16) or (charset or "").lower().startswith("utf-16"):
        return None
    for magic, name in _MAGIC:
        if start.startswith(magic):
            return f"the body is {name}"
    num_binary = len(start) - len(start.translate(None, _BINARY))
    if num_binary > _MAX_BINARY_SHARE * len(start):
        return "the body is binary data"
    return None
