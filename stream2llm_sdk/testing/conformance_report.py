"""What the conformance kit found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stream2llm_sdk.errors import Stream2LLMError

__all__ = ["CheckOutcome", "CheckStatus", "ConformanceError", "ConformanceReport"]


class CheckStatus(StrEnum):
    """What became of a check.

    Attributes:
        PASSED: the retriever keeps the rule.
        FAILED: it breaks it.
        SKIPPED: it was not run.
    """

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What one check found.

    Attributes:
        name: the check's.
        status: passed, failed or skipped.
        detail: why it failed or was skipped; of one that passed, what was done.
    """

    name: str
    status: CheckStatus
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status.value:<7}  {self.name:<13}  {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What all checks found. As a str it has one line for each.

    Attributes:
        retriever: the retriever's name.
        outcomes: by check, in the order in which they ran.
    """

    retriever: str
    outcomes: tuple[CheckOutcome, ...]

    @property
    def failed(self) -> tuple[CheckOutcome, ...]:
        """The checks that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is CheckStatus.FAILED)

    def __getitem__(self, name: str) -> CheckOutcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    def __str__(self) -> str:
        return "\n".join([f"{self.retriever}:", *map(str, self.outcomes)])

    def raise_for_failures(self) -> None:
        """Does nothing if no check failed.

        Raises:
            ConformanceError: a check failed.
        """
        if self.failed:
            raise ConformanceError(self)


class ConformanceError(Stream2LLMError, AssertionError):
    """A retriever that breaks a rule; the message says which and how.

    Attributes:
        report: all that was found.
    """

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(f"{len(report.failed)} of {len(report.outcomes)} checks failed\n{report}")
        self.report = report
