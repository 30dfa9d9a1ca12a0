"""What commands call the arguments of which errors speak: code gives `max_pages=3`, a person `--max-pages=3`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, TraceError

__all__ = ["OptionNames", "Phrase", "called_by_options"]

Phrase = tuple[str, str | Callable[[re.Match[str]], str]]
"""What errors say of arguments in more than a name, as a pattern, and what a command says instead: see `re.sub`."""


class OptionNames:
    """Puts a command's options in place of the arguments that code would give.

    Args:
        options: by argument.
        phrases: looked for first, in this order.
    """

    def __init__(self, options: Mapping[str, str], phrases: tuple[Phrase, ...] = ()) -> None:
        self._options = dict(options)
        self._phrases = [(re.compile(pattern), said) for pattern, said in phrases]
        # A name that is an ordinary word, too, is the argument only where a value follows.
        names = "|".join(name + (r"(?![\w/-])" if "_" in name else "(?==(?!=))") for name in options)
        self._argument = re.compile(rf"(?<![\w./-])(?:{names})")

    def __call__(self, text: str) -> str:
        """The text as the command says it."""
        for pattern, said in self._phrases:
            text = pattern.sub(said, text)
        return self._argument.sub(lambda found: self._options[found[0]], text)


@contextmanager
def called_by_options(names: Callable[[str], str]) -> Iterator[None]:
    """Lets an error of what was asked for pass with a command's options in place of the arguments that code gives."""
    try:
        yield
    except (ConfigurationError, IndexFormatError, TraceError) as error:
        error.args = (names(str(error)), *error.args[1:])
        raise
