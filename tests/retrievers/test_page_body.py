"""Bodies are bounded before and after decompression, and become text whatever their charset."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import pytest

from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.web.page_body import decode_text, read_capped

TEXT = b"".join(b"line %d\n" % number for number in range(5000))


async def in_pieces(body: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", TEXT),
        ("identity", TEXT),
        ("gzip", gzip.compress(TEXT)),
        (" X-GZIP ", gzip.compress(TEXT) + b"trailing rubbish"),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
    ],
)
async def test_body_of_exactly_the_cap_is_read(encoding: str, body: bytes) -> None:
    max_bytes = max(len(TEXT), len(body))
    assert await read_capped(in_pieces(body, 7), encoding=encoding, max_bytes=max_bytes) == TEXT


@pytest.mark.parametrize(
    ("encoding", "body"), [("", TEXT), ("gzip", gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT))]
)
async def test_one_byte_more_is_refused(encoding: str, body: bytes) -> None:
    with pytest.raises(FetchError, match=f"max_page_bytes={len(TEXT) - 1}"):
        await read_capped(in_pieces(body), encoding=encoding, max_bytes=len(TEXT) - 1)


async def test_bomb_takes_no_memory() -> None:
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(FetchError, match="larger"):
            await read_capped(in_pieces(bomb, len(bomb)), encoding="gzip", max_bytes=1_000_000)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5_000_000


@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [
        ("gzip", gzip.compress(TEXT)[:-20], "ends early"),
        ("gzip", b"this is not gzip", "damaged"),
        ("deflate", b"\xff\xff\xff", "damaged"),
        ("br", b"", "not asked for"),
        ("gzip, gzip", b"", "not asked for"),
    ],
)
async def test_body_that_is_not_what_it_says_is_refused(encoding: str, body: bytes, reason: str) -> None:
    with pytest.raises(FetchError, match=reason):
        await read_capped(in_pieces(body), encoding=encoding, max_bytes=1_000_000)


@pytest.mark.parametrize(
    ("body", "declared", "text"),
    [
        ("grün".encode(), None, "grün"),
        ("grün".encode(), "utf-8", "grün"),
        ("grün".encode("latin-1"), None, "grün"),
        ("grün".encode("latin-1"), "utf-8", "gr\ufffdn"),
        ("“grün”".encode("cp1252"), "iso-8859-1", "“grün”"),
        ("grün".encode(), "no-such-charset", "grün"),
        ("grün".encode(), "punycode", "grün"),
        ("grün".encode(), "hex", "grün"),
        ("grün".encode(), "utf\0-8", "grün"),
        ("grün".encode("utf-16"), "latin-1", "grün"),
        ("\ufeffgrün".encode(), "latin-1", "grün"),
        ('<meta charset="koi8-r">мир'.encode("koi8-r"), None, '<meta charset="koi8-r">мир'),
        ("<meta charset=utf-16>grün".encode(), None, "<meta charset=utf-16>grün"),
        ("こんにちは".encode("shift_jis"), "Shift_JIS", "こんにちは"),
        (b"\x81\x8d\x8f", "windows-1252", "\ufffd\ufffd\ufffd"),
    ],
)
def test_charset(body: bytes, declared: str | None, text: str) -> None:
    assert decode_text(body, declared) == text
