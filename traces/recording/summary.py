"""What came of a recording, in numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError, RecordingError
from stream2llm_sdk.files import read_json_object
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.recording.recorder import Outcome

__all__ = ["RecordingSummary", "kind_of_reason", "nothing_recorded", "summary_of"]

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+[^\s'\"<>.,;:)]", re.IGNORECASE)
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_SIZE = re.compile(r"(?<![\w.=])\d[\d,.]*\d|(?<![\w.=])\d")
_STATUS = re.compile(r"HTTP \d{3}")
_MAX_KIND_CHARACTERS, _MAX_REASON_CHARACTERS = 120, 240


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    """A recording in numbers.

    Attributes:
        folder: where it is.
        num_questions: that were asked.
        num_traces: of them, those that gave a trace.
        num_failed: of them, those for which nothing could be recorded.
        num_updates: updates of the traces that brought something: pages of a crawl, pools of a search.
        num_source_failures: sources, such as pages, that failed, whether or not others gave a trace.
        failed_reasons: why nothing could be recorded, by kind, the commonest first.
        source_reasons: why sources failed, likewise.
        figures: what the recorder measured of itself, by name.
    """

    folder: Path
    num_questions: int
    num_traces: int
    num_failed: int
    num_updates: int
    num_source_failures: int
    failed_reasons: Mapping[str, int] = field(default_factory=dict)
    source_reasons: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the folder, which may be moved."""
        values = asdict(self)
        del values["folder"]
        return values

    @classmethod
    def read(cls, file: Path) -> RecordingSummary:
        """The summary of a JSON file.

        Raises:
            ConfigurationError: it cannot be read, or holds something else.
        """
        try:
            return cls(folder=file.parent, **read_json_object(file, "a recording's summary"))
        except TypeError as error:
            raise ConfigurationError(
                f"{file}: no summary of a recording: {error}. Export the recording again"
            ) from error

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.recording_view import summary_html

        return summary_html(self)


def summary_of(
    folder: Path, outcomes: Iterable[tuple[Question, Outcome]], figures: Mapping[str, float]
) -> RecordingSummary:
    """Counts what became of questions."""
    num_questions = num_failed = num_updates = num_source_failures = 0
    failed, sources = _Reasons(), _Reasons()
    for _, outcome in outcomes:
        num_questions += 1
        if isinstance(outcome, RecordingError):
            num_failed += 1
            failed.add(outcome.reason)
        else:
            num_updates += sum(bool(timed.update.chunks) for timed in outcome.updates)
        num_source_failures += len(outcome.failures)
        for failure in outcome.failures:
            sources.add(failure.reason)
    return RecordingSummary(
        folder,
        num_questions,
        num_questions - num_failed,
        num_failed,
        num_updates,
        num_source_failures,
        failed.by_count(),
        sources.by_count(),
        dict(figures),
    )


def nothing_recorded(num_questions: int) -> str:
    """Says that none of the questions that were asked gave a trace."""
    whom = "the only question" if num_questions == 1 else f"any of the {num_questions:,} questions"
    return f"nothing could be recorded for {whom}"


def kind_of_reason(reason: str) -> str:
    """A reason without what differs from one case to the next: addresses, quotations, numbers other than an HTTP
    status."""
    kind = _QUOTED.sub("'…'", _URL.sub("URL", " ".join(reason.split())))
    statuses = _STATUS.findall(kind)
    kind = _STATUS.sub("HTTP STATUS", kind)
    kind = _SIZE.sub("N", kind)
    for status in statuses:
        kind = kind.replace("HTTP STATUS", status, 1)
    return _cut(kind, _MAX_KIND_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class _Reasons:
    """Counts reasons by kind. A kind whose cases all have the same words is called by them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._words: dict[str, str | None] = {}

    def add(self, reason: str) -> None:
        kind, words = kind_of_reason(reason), _cut(" ".join(reason.split()), _MAX_REASON_CHARACTERS)
        self._counts[kind] += 1
        if self._words.setdefault(kind, words) != words:
            self._words[kind] = None

    def by_count(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for kind, count in self._counts.items():
            counts[self._words[kind] or kind] += count
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
