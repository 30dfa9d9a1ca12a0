"""The questions of a recording: of a data set's table, of a hub's data set, or lines of text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, TraceError
from stream2llm_sdk.traces.checked_files import not_unicode, read_text

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.diskann.corpus_files import Row

__all__ = ["QUESTION_COLUMNS", "Question", "read_questions"]

QUESTION_COLUMNS = ("problem", "question", "query")
"""The columns in which a question is looked for, SimpleQA's first."""

_ID_COLUMNS = ("question_id", "query_id", "id")
_TEXT_FILES = (".txt", ".md")
_MAX_TEXT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Question:
    """A question to record.

    Attributes:
        question_id: what it is known by in the recording: its row, from 0, or the id that its row has.
        text: what is asked.
        urls: pages that its data set names for it.

    Raises:
        ConfigurationError: the id or the text is blank or no text.
    """

    question_id: str
    text: str
    urls: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("question_id", "text"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigurationError(f"{name}={value!r:.80}: a question has an id and a text that are not blank")
            if (reason := not_unicode(value)) is not None:
                raise ConfigurationError(f"a question's {name} {reason}")


def read_questions(
    source: str,
    *,
    column: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> list[Question]:
    """The questions of a source, in its order. The same text may be asked twice: each row is a question of its own.

    Args:
        source: a `.parquet`, `.jsonl`, `.ndjson` or `.csv` file (the last three also with `.gz` or `.zst`) with a
            column of questions; a `.txt` or `.md` file with a question a line; or `hub:NAME[:CONFIG[:SPLIT]]`, which
            streams with `datasets`, where SPLIT is `train` if left out. A column `metadata` with a list `urls`, as
            SimpleQA has it, or a column `urls`, names the pages of a question.
        column: the column with the questions; if left out, the first of `problem`, `question` and `query` that is
            there.
        limit: only the first so many; of a hub's data set no more are read.
        sample: only so many, drawn by `seed`, before `limit`; they keep their order and their ids.
        seed: of the sample.

    Raises:
        ConfigurationError: the source cannot be read, holds no question, or a row is none; it names the row.
        MissingExtraError: pyarrow or datasets is not installed.
    """
    for name, number in (("limit", limit), ("sample", sample)):
        if number is not None and number < 1:
            raise ConfigurationError(f"{name}={number!r}: give 1 or more, or None for all")
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for place, question in _questions(source, column):
        if (first := seen.setdefault(question.question_id, place)) != place:
            raise ConfigurationError(f"{place}: the id {question.question_id!r:.80} is that of {first} already")
        questions.append(question)
        if sample is None and len(questions) == limit:
            break
    if not questions:
        raise ConfigurationError(f"{source}: there are no questions in it")
    if sample is not None:
        if sample > len(questions):
            raise ConfigurationError(f"sample={sample}: {source} has {len(questions)} questions; ask for fewer, or all")
        chosen = sorted(random.Random(seed).sample(range(len(questions)), sample))
        questions = [questions[number] for number in chosen]
    return questions[:limit]


def _questions(source: str, column: str | None) -> Iterator[tuple[str, Question]]:
    if not source.startswith("hub:") and source.lower().endswith(_TEXT_FILES):
        yield from _lines(Path(source))
        return
    from stream2llm_sdk.retrievers.diskann.corpus import open_rows

    if not source.startswith("hub:") and not Path(source).exists():
        raise _missing(Path(source))
    for number, row in enumerate(open_rows(source)):
        yield row.place, _question(row, number, column)


def _missing(file: Path) -> ConfigurationError:
    return ConfigurationError(f"{file}: there is no such file; give questions, or hub:NAME for a data set")


def _lines(file: Path) -> Iterator[tuple[str, Question]]:
    if not file.is_file():
        raise _missing(file)
    number = 0
    try:
        text = read_text(file, _MAX_TEXT_BYTES)
    except TraceError as error:
        raise ConfigurationError(str(error)) from error
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file.name}, line {line_number}", Question(str(number), line.strip())
            number += 1


def _question(row: Row, number: int, column: str | None) -> Question:
    if row.fault is not None:
        raise ConfigurationError(f"{row.place}: {row.fault}")
    values = row.values
    names = QUESTION_COLUMNS if column is None else (column,)
    name = next((name for name in names if name in values), None)
    if name is None:
        found = ", ".join(map(repr, values)) or "none"
        wanted = " or ".join(map(repr, names))
        raise ConfigurationError(f"{row.place}: lacks the column {wanted}; it has: {found:.200}. Name it with --column")
    text = values[name]
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"{row.place}: its {name!r} is {text!r:.80}, which is no question")
    given = next((values[key] for key in _ID_COLUMNS if values.get(key) not in (None, "")), number)
    try:
        return Question(str(given), text.strip(), _urls(values))
    except ConfigurationError as error:
        raise ConfigurationError(f"{row.place}: {error}") from None


def _urls(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The pages that a row names. What a data set has as `metadata` may be anything else too."""
    from stream2llm_sdk.retrievers.search.dataset import urls_of_metadata

    urls: Any = values.get("urls")
    if isinstance(urls, str):
        urls = urls.split()
    if urls is None and values.get("metadata") is not None:
        with suppress(ValueError):
            urls = urls_of_metadata(values["metadata"])
    listed = urls if isinstance(urls, (list, tuple)) else ()
    return tuple(dict.fromkeys(url.strip() for url in listed if isinstance(url, str) and url.strip()))
