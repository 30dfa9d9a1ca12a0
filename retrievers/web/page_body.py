"""Reading an HTTP body: bounded before and after decompression, then decoded to text."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import AsyncIterable

from stream2llm_sdk.errors import FetchError

__all__ = ["decode_text", "read_capped"]

# Python's codecs that the web uses. Others (punycode, unicode_escape) take quadratic time or are not charsets.
_WEB_CODECS = re.compile(
    r"utf-8|utf-8-sig|utf-16(-[lb]e)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]"
    r"|mac-(roman|cyrillic)|gb2312|gbk|gb18030|big5(hkscs)?|euc_jp|euc_kr|iso2022_jp|shift_jis"
)
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_META_CHARSET = re.compile(rb"<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.I)
_META_WINDOW_BYTES = 2048


class _Inflater:
    """Decompresses `gzip` and `deflate` piece by piece, never producing more than it is asked for. As in browsers,
    whatever follows the end of the compressed stream is ignored."""

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding != "deflate"
        self._stream: zlib._Decompress | None = None

    def feed(self, data: bytes, max_bytes: int) -> bytes:
        """What `data` decompresses to, cut at `max_bytes` (positive); the cut part is lost."""
        if self._stream is None:
            self._stream = zlib.decompressobj(self._window_bits(data[0]))
        return self._stream.decompress(data, max_bytes)

    @property
    def is_complete(self) -> bool:
        return self._stream is not None and self._stream.eof

    def _window_bits(self, first_byte: int) -> int:
        if self._is_gzip:
            return 16 + zlib.MAX_WBITS
        # "deflate" means a zlib stream, but some servers send a raw one.
        return zlib.MAX_WBITS if first_byte & 0x0F == 8 else -zlib.MAX_WBITS


async def read_capped(pieces: AsyncIterable[bytes], *, encoding: str, max_bytes: int) -> bytes:
    """The whole body, decompressed.

    Args:
        pieces: the body as it comes from the network.
        encoding: the Content-Encoding: '', 'identity', 'gzip', 'x-gzip' or 'deflate'.
        max_bytes: bound on the body both as sent and as decompressed. Reading stops at the first byte beyond it.

    Raises:
        FetchError: the body is larger, or is not what `encoding` says.
    """
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise FetchError(f"content encoding {encoding!r:.40} was not asked for")
    inflater = _Inflater(encoding) if encoding not in ("", "identity") else None
    body, num_received = bytearray(), 0
    async for piece in pieces:
        num_received += len(piece)
        if piece and num_received <= max_bytes:
            body += _inflate(inflater, piece, max_bytes + 1 - len(body)) if inflater else piece
        if max(num_received, len(body)) > max_bytes:
            raise FetchError(f"larger than max_page_bytes={max_bytes}")
    if inflater and num_received and not inflater.is_complete:
        raise FetchError("the compressed body ends early")
    return bytes(body)


def decode_text(body: bytes, declared: str | None) -> str:
    """`body` as text. Bytes that do not fit the charset become U+FFFD.

    The charset is the byte order mark's, else the `declared` one (the Content-Type's), else the document's own,
    else UTF-8, or Windows-1252 for what is not valid UTF-8.
    """
    for mark, marked_codec in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body.decode(marked_codec, errors="replace")
    codec = _web_codec(declared) or _named_in(body)
    if codec is not None:
        return body.decode(codec, errors="replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", errors="replace")


def _inflate(inflater: _Inflater, piece: bytes, max_bytes: int) -> bytes:
    try:
        return inflater.feed(piece, max_bytes)
    except zlib.error as error:
        raise FetchError(f"the compressed body is damaged: {error}") from error


def _web_codec(name: str | None) -> str | None:
    try:
        codec = codecs.lookup(name).name if name else ""
    except (LookupError, ValueError):
        return None
    if codec in ("ascii", "iso8859-1"):
        return "cp1252"  # what the web means by these
    return codec if _WEB_CODECS.fullmatch(codec) else None


def _named_in(body: bytes) -> str | None:
    named = _META_CHARSET.search(body[:_META_WINDOW_BYTES])
    codec = _web_codec(named[1].decode("ascii", errors="replace")) if named else None
    # A name that was found by reading the bytes as ASCII cannot be true of UTF-16.
    return None if codec is not None and codec.startswith("utf-16") else codec
