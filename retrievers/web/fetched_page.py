"""One page as it was fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FetchedPage"]


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """A page's text, or its bytes where these are no text.

    Attributes:
        url: the last hop's URL, without a fragment; relative links count from here.
        status: the HTTP status, 200 to 299.
        headers: the response's headers, names in lower case.
        content_type: what the body is, whatever the server calls it: 'text/html', 'application/xhtml+xml',
            'text/plain' or 'application/pdf'.
        text: the decoded text; None for a PDF.
        body: a PDF's bytes; None for text.
        from_cache: whether the body came from the HTTP cache, with or without asking the server if it still holds.
        began: when the first request for it went out, in the event loop's time; None where none did.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    content_type: str
    text: str | None = field(repr=False)
    body: bytes | None = field(default=None, repr=False)
    from_cache: bool = False
    began: float | None = None
