"""Handlers for `WebServer` that misbehave on purpose."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
import zlib
from collections.abc import Iterator

import brotli
from web_server import Handler, head


def raw(*pieces: bytes, then_hang: bool = False) -> Handler:
    """Writes these bytes, and closes the connection or waits for ever."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if then_hang:
            await asyncio.Event().wait()

    return answer


def endless(start: bytes, piece: bytes) -> Handler:
    """Writes `piece` again and again, as fast as it is read."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()

    return answer


def slow(start: bytes, piece: bytes, interval_s: float) -> Handler:
    """Writes `piece` every now and then, for ever."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(interval_s)

    return answer


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection by a TCP reset."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def reset_after(start: bytes) -> Handler:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the bytes arrive before the reset
        await reset(writer)

    return answer


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = head(200, {"Transfer-Encoding": "chunked"})


def compressed(encoding: str, num_bytes: int) -> bytes:
    """`num_bytes` of the same letter, compressed as `encoding` says, without ever holding them."""
    return b"".join(_compressed_pieces(encoding, num_bytes))


def _compressed_pieces(encoding: str, num_bytes: int) -> Iterator[bytes]:
    block = b"x" * 1_000_000
    if encoding == "br":
        stream = brotli.Compressor(quality=5)
        for _ in range(num_bytes // len(block)):
            yield stream.process(block)
        yield stream.finish()
        return
    deflate = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS if encoding == "gzip" else zlib.MAX_WBITS)
    for _ in range(num_bytes // len(block)):
        yield deflate.compress(block)
    yield deflate.flush()


def nested_gzip(levels: int) -> bytes:
    body = b"x" * 1000
    for _ in range(levels):
        body = gzip.compress(body)
    return body
