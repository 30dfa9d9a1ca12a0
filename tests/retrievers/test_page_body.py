"""Bodies are bounded before and after decompression, and become text whatever their charset."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import brotli
import pytest

from stream2llm_sdk.errors import FetchError
from stream2llm_sdk.retrievers.web.page_body import decode_text, decode_text_gently, read_capped

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
        ("br", brotli.compress(TEXT)),
    ],
)
async def test_body_of_exactly_the_cap_is_read(encoding: str, body: bytes) -> None:
    max_bytes = max(len(TEXT), len(body))
    assert await read_capped(in_pieces(body, 7), encoding=encoding, max_bytes=max_bytes) == TEXT


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("", TEXT), ("gzip", gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT)), ("br", brotli.compress(TEXT))],
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
        ("br", brotli.compress(TEXT)[:-20], "ends early"),
        ("br", b"this is not Brotli", "damaged"),
        ("zstd", b"", "not asked for"),
        ("gzip, gzip", b"", "not asked for"),
    ],
)
async def test_body_that_is_not_what_it_says_is_refused(encoding: str, body: bytes, reason: str) -> None:
    with pytest.raises(FetchError, match=reason):
        await read_capped(in_pieces(body), encoding=encoding, max_bytes=1_000_000)


async def test_the_start_is_checked_once_and_before_the_rest() -> None:
    starts: list[int] = []

    def check(start: bytes) -> None:
        starts.append(len(start))

    options = {"encoding": "", "max_bytes": 10_000, "check_start": check, "start_bytes": 25}
    assert await read_capped(in_pieces(TEXT[:100], 10), **options) == TEXT[:100]  # type: ignore[arg-type]
    assert await read_capped(in_pieces(TEXT[:20], 10), **options) == TEXT[:20]  # type: ignore[arg-type]
    assert starts == [30, 20]


async def test_a_body_may_be_cut_instead() -> None:
    body = gzip.compress(TEXT)
    assert await read_capped(in_pieces(body, 9), encoding="gzip", max_bytes=1000, is_cut=True) == TEXT[:1000]


async def test_the_loop_runs_while_a_large_page_is_decoded() -> None:
    body, num_beats = ("你好世界，" * 200_000).encode("gb18030"), 0

    async def beat() -> None:
        nonlocal num_beats
        while True:
            num_beats += 1
            await asyncio.sleep(0)

    heart = asyncio.create_task(beat())
    assert await decode_text_gently(body, "gb18030") == body.decode("gb18030")
    heart.cancel()
    assert num_beats >= len(body) / 65_536


@pytest.mark.parametrize("codec", ["utf-8", "utf-16", "gb18030", "shift_jis", "iso2022_jp", "euc_kr", "cp1252"])
def test_decoding_in_slices_is_decoding(codec: str) -> None:
    body = ("aé日本語한국어—🙂" * 30_000).encode(codec, errors="ignore") + b"\xff\x80"
    assert decode_text(body, codec) == body.decode(codec, errors="replace")


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("Эта страница написана без указания кодировки, как это часто бывает на старых сайтах.", "koi8-r"),
        ("Эта страница написана без указания кодировки, как это часто бывает на старых сайтах.", "cp1251"),
        ("このページには文字コードが指定されていません。古いサイトではよくあることです。", "shift_jis"),
        ("このページには文字コードが指定されていません。古いサイトではよくあることです。", "euc_jp"),
        ("이 페이지는 문자 코드를 지정하지 않았습니다. 오래된 사이트에서는 흔한 일입니다.", "euc_kr"),
        ("Αυτή η σελίδα γράφτηκε χωρίς κωδικοποίηση, όπως συμβαίνει συχνά σε παλιούς ιστότοπους.", "cp1253"),
        ("דף זה נכתב ללא ציון קידוד, כפי שקורה לעתים קרובות באתרים ישנים.", "cp1255"),
        ("كتبت هذه الصفحة بدون ذكر الترميز كما يحدث غالبا في المواقع القديمة", "cp1256"),
        ("這個頁面沒有說明它的編碼，舊網站上經常是這樣的。我們必須自己去猜測。", "big5"),
        ("这个页面没有说明它的编码，旧网站上经常是这样的。我们必须自己去猜测。", "gb18030"),
        ("Cette page a été écrite sans dire son codage : « Où est-elle ? » Très tôt, l’été.", "cp1252"),
        ("Diese Seite wurde ohne Angabe geschrieben, was früher häufig war: größer, schöner – übel.", "cp1252"),
    ],
)
def test_a_charset_that_nobody_names(text: str, codec: str) -> None:
    html = "<html><body><div class='menu'>" + "<p>" * 2000 + text * 3
    assert decode_text(html.encode(codec), None) == html


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
