"""A real index that is made in a second, and questions for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index
from stream2llm_sdk.retrievers.embedding import WordLlamaEmbedder
from stream2llm_sdk.traces.recording.questions import Question

TOPICS = [
    "tasks",
    "locks",
    "queues",
    "streams",
    "sockets",
    "processes",
    "threads",
    "signals",
    "pipes",
    "timers",
    "files",
    "folders",
    "paths",
    "archives",
    "tables",
    "rows",
    "columns",
    "indexes",
    "keys",
    "joins",
    "views",
    "triggers",
    "branches",
    "commits",
    "merges",
    "tags",
    "remotes",
    "hooks",
    "modules",
    "handlers",
]
VERBS = ["cancels", "opens", "closes", "copies", "waits", "renames", "removes", "compares", "encodes", "schedules"]


def documents() -> Iterator[Chunk]:
    """900 passages; three have one source."""
    for topic in TOPICS:
        for other in VERBS:
            for number in range(3):
                text = (
                    f"How one {other} {topic}, part {number}: {topic} are what a program {other} in section {number}."
                )
                yield Chunk(text, source=f"http://docs/{topic}/{other}", title=topic, metadata={"part": number})


def build_small_index(folder: Path) -> Path:
    build_index(documents(), folder, filterable=("part",), options=BuildOptions(graph_degree=16)).close()
    return folder


def questions(count: int) -> list[Question]:
    return [
        Question(str(number), f"What {VERBS[number % 10]} {TOPICS[number % 30]} in case {number}?")
        for number in range(count)
    ]


class DeadlyEmbedder(WordLlamaEmbedder):
    """WordLlama, until it is asked for what kills the process that it runs in: 'die', each time, or 'die once FILE',
    the first time."""

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        for text in texts:
            if text == "die":
                os.abort()
            if text.startswith("die once "):
                mark = Path(text.removeprefix("die once "))
                if not mark.exists():
                    mark.touch()
                    os.abort()
        return super().embed(texts)
