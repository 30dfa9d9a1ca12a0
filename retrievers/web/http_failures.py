"""What can go wrong in an HTTP exchange, in one line for people."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp

from stream2llm_sdk.errors import FetchError

__all__ = ["fetch_failure", "status_line"]


def status_line(status: int) -> str:
    """An HTTP status as people know it: 'HTTP 404 Not Found'."""
    try:
        return f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def fetch_failure(error: Exception) -> FetchError:
    """What went wrong on the network, in one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return FetchError(f"cannot connect: {error.os_error.strerror or error.os_error}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return FetchError("the server closed the connection without an answer")
    if isinstance(error, aiohttp.ClientPayloadError):
        return FetchError("the connection was lost in the middle of the body")
    if isinstance(error, aiohttp.ClientOSError):
        return FetchError(f"the connection was lost: {error.strerror or error}")
    if isinstance(error, aiohttp.ClientResponseError) and not error.history:
        # The parser's complaint: the status of a real answer never becomes an error here.
        if "Got more than" in error.message or "Too many" in error.message:
            return FetchError("the response's headers are too large or too many")
        first_line = error.message.strip().partition("\n")[0].rstrip(":")
        return FetchError(f"the answer is not valid HTTP: {first_line:.100}")
    text = " ".join(str(error).split())[:300]
    return FetchError(f"{type(error).__name__}: {text}" if text else type(error).__name__)
