"""What records: the seam between what is recorded and how a recording is driven."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from stream2llm_sdk.errors import RecordingError
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.trace import Trace

__all__ = ["Outcome", "OutcomeSource", "Recorder", "RecorderSpec"]

Outcome = Trace | RecordingError
"""What became of a question."""


class Recorder(Protocol):
    """Retrieves for one question after another, or for several at once, and takes the times."""

    async def record(self, question: Question) -> Trace:
        """What was retrieved for a question, and when.

        Raises:
            RecordingError: there is nothing to record for it; other questions are not affected.
        """
        ...

    async def aclose(self) -> None:
        """Ends everything that it holds. Idempotent."""
        ...


class RecorderSpec(Protocol):
    """Describes a recorder by plain values, so that it can be made wherever the recording runs: a frozen dataclass that
    pickles."""

    @property
    def tag(self) -> str:
        """What kind of retrieval it is; a trace is called '<tag>-<question's id>'."""
        ...

    @property
    def concurrency(self) -> int:
        """Most questions at the same time."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """What decides what is recorded, as JSON: it must be the same where a recording goes on."""
        ...

    async def start(self) -> Recorder:
        """Makes the recorder, ready for the first question.

        Raises:
            ConfigurationError: it cannot work as it is described.
        """
        ...


OutcomeSource = Callable[[RecorderSpec, Sequence[Question]], AsyncGenerator[tuple[Question, Outcome], None]]
"""Records questions somewhere, and gives what became of each as it is known, in any order. Who iterates closes it."""
