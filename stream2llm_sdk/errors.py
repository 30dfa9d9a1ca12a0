"""Every error of the SDK, in one tree.

Stream2LLMError
├── ConfigurationError (also ValueError)
│   └── BadDocumentError
├── MissingExtraError (also ImportError)
├── UnsupportedFeatureError
├── TraceError
├── RecordingError
├── PromptError (also ValueError)
│   ├── PromptTooLongError
│   └── EmptyPromptError
├── StreamError
│   ├── StreamFinishedError
│   ├── StreamAbortedError
│   ├── StreamIdleError
│   └── UnknownRequestError
├── EngineError
│   ├── EngineStartError
│   ├── EngineBusyError
│   └── EngineDeadError
└── RetrievalError
    ├── AddressNotAllowedError
    ├── FetchError
    │   └── RobotsDisallowedError
    └── IndexFormatError
"""

from __future__ import annotations

from os import PathLike
from typing import Any

__all__ = [
    "AddressNotAllowedError",
    "BadDocumentError",
    "ConfigurationError",
    "EmptyPromptError",
    "EngineBusyError",
    "EngineDeadError",
    "EngineError",
    "EngineStartError",
    "FetchError",
    "IndexFormatError",
    "MissingExtraError",
    "PromptError",
    "PromptTooLongError",
    "RecordingError",
    "RetrievalError",
    "RobotsDisallowedError",
    "Stream2LLMError",
    "StreamAbortedError",
    "StreamError",
    "StreamFinishedError",
    "StreamIdleError",
    "TraceError",
    "UnknownRequestError",
    "UnsupportedFeatureError",
]


class Stream2LLMError(Exception):
    """Root of every error that the SDK raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As it is, whatever its arguments were: errors of worker processes are pickled.
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[Stream2LLMError], args: tuple[Any, ...], state: dict[str, Any]) -> Stream2LLMError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(Stream2LLMError, ValueError):
    """An option has a value that cannot work; the message names the value and the way out."""


class BadDocumentError(ConfigurationError):
    """A row of a corpus that cannot be a document; the message names the file, the row and the reason."""


class MissingExtraError(Stream2LLMError, ImportError):
    """An optional part is not installed.

    Args:
        part: what is missing.
        extras: any one of them brings it.
    """

    def __init__(self, part: str, *extras: str) -> None:
        commands = " or ".join(f"pip install 'stream2llm-sdk[{extra}]'" for extra in extras)
        super().__init__(f"{part} is not installed. Install it with: {commands}")


class UnsupportedFeatureError(Stream2LLMError):
    """The engine cannot do this for a streaming prompt."""


class TraceError(Stream2LLMError):
    """A trace file that cannot be read: damaged, or with a value that cannot be.

    Attributes:
        reason: what is wrong, with the value.
        file: where it was found.
        row: which row of the file, the first below its heading being 1; in a JSON file, the key. None for all of it.
        column: which column, or None.
    """

    def __init__(
        self, reason: str, *, file: str | PathLike[str], row: int | str | None = None, column: str | None = None
    ) -> None:
        place = [str(file)]
        if row is not None:
            place.append(f"row {row}" if isinstance(row, int) else f"key {row!r:.80}")
        if column is not None:
            place.append(f"column {column!r}")
        super().__init__(f"{', '.join(place)}: {reason}")
        self.reason = reason
        self.file = file
        self.row = row
        self.column = column


class RecordingError(Stream2LLMError):
    """Nothing could be recorded for a question.

    Attributes:
        reason: why, in one line for people.
        failures: what could not be retrieved, each a `TimedFailure`; empty where the search itself failed.
    """

    def __init__(self, reason: str, failures: tuple[Any, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failures = failures


class PromptError(Stream2LLMError, ValueError):
    """A prompt, or an update of one, that the engine refuses. The stream stays as it was."""


class PromptTooLongError(PromptError):
    """The prompt could never fit the model's length or the KV cache."""


class EmptyPromptError(PromptError):
    """A prompt was finished without a single token."""


class StreamError(Stream2LLMError):
    """An operation on a stream that is not open."""


class StreamFinishedError(StreamError):
    """The prompt was already finished: no further update is possible."""


class StreamAbortedError(StreamError):
    """The stream was aborted."""


class StreamIdleError(StreamError):
    """The stream was ended, because nothing was sent to it for too long."""


class UnknownRequestError(StreamError):
    """No request with this id is alive in the engine."""


class EngineError(Stream2LLMError):
    """The engine as a whole cannot serve."""


class EngineStartError(EngineError):
    """The engine could not be started."""


class EngineBusyError(EngineError):
    """The engine is full for now: try the same again later. What was refused has changed nothing.

    Args:
        message: for people.

    Attributes:
        limit: the name of the limit that was reached.
        tenant: who was refused.
        retry_after_s: seconds after which it may work, by the rate at which requests ended of late; None if unknown.
    """

    def __init__(self, message: str, *, limit: str = "", tenant: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.tenant = tenant
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine's core process ended; every open stream gets this error."""


class RetrievalError(Stream2LLMError):
    """Retrieval failed before it produced any context."""


class AddressNotAllowedError(RetrievalError):
    """A URL, or an address it resolves to, is not one that may be fetched."""


class FetchError(RetrievalError):
    """One page could not be fetched."""


class RobotsDisallowedError(FetchError):
    """The site's robots.txt forbids the page, or cannot be read at the moment."""


class IndexFormatError(RetrievalError):
    """Index files are missing, cut short, or of a version that cannot be read."""
