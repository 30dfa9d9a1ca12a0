"""What came into one question's prompt, and when: noted at next to no cost, for a recording to be made of it later."""

from __future__ import annotations

from typing import NamedTuple

from stream2llm_sdk.answer import ContextEnd
from stream2llm_sdk.context import ContextMode, SourceFailure
from stream2llm_sdk.growing_prompt import Contents, Prompt

__all__ = ["AskedQuestion", "ContextLog"]


class ContextLog:
    """The changes of a prompt's context, by their times in seconds after the question. Kept on the event loop, so it
    refers to what the prompt made anyway and computes nothing.

    Attributes:
        appended: of a context that grows by one section alone, how many chunks there were after each change.
        replaced: of any other, the whole contents after each change.
        failures: what could not be used.
    """

    __slots__ = ("appended", "failures", "replaced")

    def __init__(self) -> None:
        self.appended: list[tuple[float, int]] = []
        self.replaced: list[tuple[float, Contents]] = []
        self.failures: list[tuple[float, SourceFailure]] = []

    def changed(self, at_s: float, contents: Contents, mode: ContextMode) -> None:
        """The prompt's contents are these from now on."""
        if mode is ContextMode.APPEND:
            # All that append share one section, whose list grows at its end: the last one has those before it.
            self.appended.append((at_s, len(contents[0][0])))
        else:
            self.replaced.append((at_s, contents))


class AskedQuestion(NamedTuple):
    """A question that has ended, one way or another.

    Attributes:
        arrived_s: when it was asked, on the monotonic clock.
        question: its text.
        tenant: who asked.
        tag: the names of its retrievers.
        mode: whether its context appended or was updated.
        prompt: its prompt, which does not change any more.
        log: how the prompt came to be.
        retrieved_s: seconds after the question at which its retrieval ended.
        context_end: why it ended.
        ended_s: seconds after the question at which the answer ended.
        num_output_tokens: tokens of the answer that came.
        error: the class and the message of what ended it; None for an answer that is complete.
    """

    arrived_s: float
    question: str
    tenant: str
    tag: str
    mode: ContextMode
    prompt: Prompt
    log: ContextLog
    retrieved_s: float
    context_end: ContextEnd
    ended_s: float
    num_output_tokens: int
    error: tuple[str, str] | None
