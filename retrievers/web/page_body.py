"""Reading an HTTP body: bounded before and after decompression, then decoded to text."""

from __future__ import annotations

import asyncio
import codecs
import functools
import importlib
import re
import zlib
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any, Protocol

from stream2llm_sdk.errors import FetchError

__all__ = ["accepted_encodings", "decode_text", "decode_text_gently", "read_capped"]

# Python's codecs that the web uses. Others (punycode, unicode_escape) take quadratic time or are not charsets.
_WEB_CODECS = re.compile(
    r"utf-8|utf-8-sig|utf-16(-[lb]e)?|cp125\d|cp866|cp874|cp932|cp949|iso8859-\d+|koi8-[ru]"
    r"|mac-(roman|cyrillic)|gb2312|gbk|gb18030|big5(hkscs)?|euc_jp|euc_kr|iso2022_jp|shift_jis"
)
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_META_CHARSET = re.compile(rb"<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.I)
_META_WINDOW_BYTES = 2048
# Charsets that a guess is believed for: their letters are unlike those of Windows-1252, which is right far more
# often than a guess of one of its neighbours.
_GUESSABLE_CODECS = re.compile(
    r"cp125[1356]|cp866|cp1125|cp874|cp932|cp949|iso8859-[5678]|iso8859-11|koi8-[ru]|mac-cyrillic"
    r"|gb2312|gbk|gb18030|big5(hkscs)?|euc_jp|euc_jis(_2004|x0213)|euc_kr|shift_jis(_2004|x0213)?"
)
_GUESS_WINDOW_BYTES = 4096
_SLICE_BYTES = 64 * 1024  # decoded in 2 ms in the slowest charset


class _Decompressor(Protocol):
    def feed(self, data: bytes, max_bytes: int) -> bytes: ...

    @property
    def is_complete(self) -> bool: ...


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


class _BrotliDecompressor:
    """Decompresses `br` piece by piece, for which it holds a window of up to 16 MB; may produce a few more bytes than
    it is asked for, in one output block."""

    def __init__(self) -> None:
        self._brotli = importlib.import_module("brotli")
        self._stream: Any = self._brotli.Decompressor()

    def feed(self, data: bytes, max_bytes: int) -> bytes:
        if self._stream.is_finished():
            return b""
        try:
            output = bytearray(self._stream.process(data, output_buffer_limit=max_bytes))
            while len(output) < max_bytes and not self._stream.can_accept_more_data():
                output += self._stream.process(b"", output_buffer_limit=max_bytes - len(output))
        except self._brotli.error as error:
            raise zlib.error(str(error)) from error
        return bytes(output)

    @property
    def is_complete(self) -> bool:
        return bool(self._stream.is_finished())


@functools.cache
def _has_bounded_brotli() -> bool:
    """Whether a Brotli library is there that bounds its output, as the one of crawl4ai does since its version 1.2."""
    try:
        brotli = importlib.import_module("brotli")
    except ImportError:
        return False
    return hasattr(brotli.Decompressor, "can_accept_more_data")


def accepted_encodings() -> str:
    """The Accept-Encoding: what `read_capped` can decompress with a bound on what comes out."""
    return "gzip, deflate, br" if _has_bounded_brotli() else "gzip, deflate"


def _decompressor(encoding: str) -> _Decompressor | None:
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _Inflater(encoding)
    if encoding == "br" and _has_bounded_brotli():
        return _BrotliDecompressor()
    raise FetchError(f"content encoding {encoding!r:.40} was not asked for")


async def read_capped(
    pieces: AsyncIterable[bytes],
    *,
    encoding: str,
    max_bytes: int,
    check_start: Callable[[bytes], object] | None = None,
    start_bytes: int = 0,
    is_cut: bool = False,
) -> bytes:
    """The whole body, decompressed.

    Args:
        pieces: the body as it comes from the network.
        encoding: the Content-Encoding: '', 'identity', 'gzip', 'x-gzip', 'deflate' or 'br'.
        max_bytes: bound on the body both as sent and as decompressed. Reading stops at the first byte beyond it.
        check_start: called once with the body's beginning, at least `start_bytes` of it unless the body is shorter,
            before the rest is read. What it raises ends the reading.
        is_cut: whether a larger body is cut at `max_bytes` instead of refused.

    Raises:
        FetchError: the body is larger, or is not what `encoding` says.
    """
    decompressor = _decompressor(encoding.strip().lower())
    body, num_received = bytearray(), 0
    async for piece in pieces:
        num_received += len(piece)
        if piece and num_received <= max_bytes:
            body += _decompressed(decompressor, piece, max_bytes + 1 - len(body)) if decompressor else piece
        if max(num_received, len(body)) > max_bytes:
            if is_cut:
                return bytes(body[:max_bytes])
            raise FetchError(f"larger than max_page_bytes={max_bytes}")
        if check_start is not None and len(body) >= start_bytes:
            check_start(bytes(body))
            check_start = None
    if decompressor and num_received and not decompressor.is_complete:
        raise FetchError("the compressed body ends early")
    if check_start is not None:
        check_start(bytes(body))
    return bytes(body)


def decode_text(body: bytes, declared: str | None) -> str:
    """`body` as text. Bytes that do not fit the charset become U+FFFD.

    The charset is the byte order mark's, else the `declared` one (the Content-Type's), else the document's own, else
    UTF-8 if it is valid. What is none of these is guessed from its beginning if it is not in Latin letters, and
    Windows-1252 otherwise.
    """
    return "".join(_decoded_slices(body, _codec(body, declared)))


async def decode_text_gently(body: bytes, declared: str | None) -> str:
    """As `decode_text`, letting the event loop run in between: 4 MB of some charsets take 90 ms."""
    slices = []
    for text in _decoded_slices(body, _codec(body, declared)):
        slices.append(text)
        await asyncio.sleep(0)
    return "".join(slices)


def _decoded_slices(body: bytes, codec: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(codec)(errors="replace")
    for start in range(0, len(body), _SLICE_BYTES):
        yield decoder.decode(body[start : start + _SLICE_BYTES], final=start + _SLICE_BYTES >= len(body))


def _codec(body: bytes, declared: str | None) -> str:
    for mark, marked_codec in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return marked_codec
    codec = _web_codec(declared) or _named_in(body)
    if codec is not None:
        return codec
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        if not _is_mostly_utf8(body[: error.start + _SLICE_BYTES]):
            return _guessed(body, error.start) or "cp1252"
    return "utf-8"


def _is_mostly_utf8(body: bytes) -> bool:
    """Whether a page is UTF-8 with single broken characters, as templates and cut bodies make them."""
    text = body.decode("utf-8", errors="replace")
    num_broken = text.count("\ufffd")
    num_whole = len(text) - len(text.encode("ascii", errors="ignore")) - num_broken
    return num_whole > 10 * num_broken


def _guessed(body: bytes, start: int) -> str | None:
    """The charset by the letters from `start`; what comes before is markup, which tells nothing."""
    from charset_normalizer import from_bytes

    start = max(0, start - 64)
    best = from_bytes(body[start : start + _GUESS_WINDOW_BYTES], steps=4, chunk_size=512).best()
    codec = codecs.lookup(best.encoding).name if best is not None else ""
    return codec if _GUESSABLE_CODECS.fullmatch(codec) else None


def _decompressed(decompressor: _Decompressor, piece: bytes, max_bytes: int) -> bytes:
    try:
        return decompressor.feed(piece, max_bytes)
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
