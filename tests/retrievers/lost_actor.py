"""A recorder that takes its process with it, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Chunk, Replace
from stream2llm_sdk.traces.recording.questions import Question
from stream2llm_sdk.traces.trace import TimedUpdate, Trace


@dataclass(frozen=True)
class LostOnce:
    """Records at once, but dies of question 37 the first time."""

    mark: str
    tag: str = "anns"
    concurrency: int = 1

    def settings(self) -> Mapping[str, Any]:
        return {}

    async def start(self) -> LostOnce:
        return self

    async def record(self, question: Question) -> Trace:
        if question.question_id == "37" and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        update = TimedUpdate(0.1, Replace([Chunk(question.text, source=question.question_id)]), 0.0, (0, 1))
        return Trace(question.question_id, question.text, (update,), tag="anns")

    async def aclose(self) -> None:
        pass
