"""The URLs that a data set of questions carries."""

from __future__ import annotations

import ast
import csv
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.search.provider import SearchHit

__all__ = ["DatasetURLs", "urls_of_metadata"]

_MAX_METADATA_CHARS = 100_000


class DatasetURLs:
    """For each known question the URLs that its data set names, for evaluations: the search is perfect, the reading is
    ours. A question that the data set does not have finds nothing.

    Args:
        urls: the URLs by question. White space and letter case of a question do not matter.

    Raises:
        ConfigurationError: there is no question, or its URLs are no list of text.
    """

    def __init__(self, urls: Mapping[str, Iterable[str]]) -> None:
        if not isinstance(urls, Mapping):
            raise ConfigurationError(f"urls={urls!r:.80}: give a dict of lists of URLs by question")
        self._urls: dict[str, tuple[str, ...]] = {}
        for question, listed in urls.items():
            if not isinstance(question, str):
                raise ConfigurationError(f"urls holds the question {question!r:.80}: give it as text")
            is_list = isinstance(listed, Iterable) and not isinstance(listed, (str, bytes, Mapping))
            found = list(listed) if is_list else []
            if not is_list or not all(isinstance(url, str) for url in found):
                raise ConfigurationError(f"the URLs of {question!r:.80} are {listed!r:.80}: give a list of URLs")
            self._urls[_key(question)] = tuple(dict.fromkeys(url.strip() for url in found if url.strip()))
        if not self._urls:
            raise ConfigurationError("urls holds no question")
        self.questions = tuple(urls)

    @classmethod
    def from_simpleqa(cls, source: str | PathLike[str] | Iterable[Mapping[str, Any]]) -> DatasetURLs:
        """From SimpleQA's CSV (columns `metadata, problem, answer`), as a file or as rows. `metadata` is a Python
        literal such as `{'topic': …, 'answer_type': …, 'urls': […]}`; it is read, never run.

        Raises:
            ConfigurationError: the file or a row cannot be read; it names the row.
        """
        if isinstance(source, (str, PathLike)):
            try:
                text = Path(source).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"{source} cannot be read: {error}") from None
            source = csv.DictReader(text.splitlines(keepends=True))
        elif not isinstance(source, Iterable):
            raise ConfigurationError(f"source={source!r:.80}: give a CSV file of SimpleQA, or its rows")
        urls: dict[str, list[str]] = {}
        number = 0
        try:
            for number, row in enumerate(source, start=1):
                urls.setdefault(*_question_and_urls(row, number))
        except csv.Error as error:
            raise ConfigurationError(f"row {number + 1} cannot be read: {error}") from None
        return cls(urls)

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` URLs of the question `query`, in the data set's order."""
        return [SearchHit(url) for url in self._urls.get(_key(query), ())[:k]]


def _key(question: str) -> str:
    return " ".join(question.split()).casefold()


def _question_and_urls(row: Mapping[str, Any], number: int) -> tuple[str, list[str]]:
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"row {number} is {row!r:.80}: give a mapping with `problem` and `metadata`")
    question, metadata = row.get("problem"), row.get("metadata")
    if not isinstance(question, str) or metadata is None:
        found = ", ".join(map(str, row))
        raise ConfigurationError(f"row {number} lacks `problem` or `metadata`; its columns are: {found:.200}")
    try:
        return question, urls_of_metadata(metadata)
    except ValueError as error:
        raise ConfigurationError(f"row {number}: {error}") from None


def urls_of_metadata(metadata: Any) -> list[str]:
    """The list `urls` of a question's metadata, which is a mapping or, as SimpleQA has it, a Python literal of one.

    Raises:
        ValueError: it is neither, or names no list of URLs.
    """
    found = metadata
    if isinstance(metadata, str):
        try:
            found = ast.literal_eval(metadata[:_MAX_METADATA_CHARS])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"metadata is no Python literal: {metadata!r:.120}") from None
    urls = found.get("urls") if isinstance(found, Mapping) else None
    if not isinstance(urls, (list, tuple)):
        raise ValueError(f"metadata names no list of urls: {metadata!r:.120}")
    return [url for url in urls if isinstance(url, str)]
