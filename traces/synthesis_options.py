"""What may be chosen about synthetic traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.value_checks import is_number, is_whole, plain, plain_numbers

__all__ = ["NUM_QUESTION_TOKENS", "NUM_TEMPLATE_TOKENS", "OutputLength", "SynthesisOptions"]

NUM_TEMPLATE_TOKENS = 60
"""Length of the prompt template that the fitted prompt lengths include, and that is no part of a trace."""
NUM_QUESTION_TOKENS = 30

_MIN_PROMPT_TOKENS = 1_000
_SHARED_PER_DOCUMENT = 30
_MOST_DOCUMENTS, _MOST_SHARED_DOCUMENTS = 1_000, 10_000_000
_CHOICES = {"search_gap": ("first", "last", "split"), "durations": ("replayed", "all")}


@dataclass(frozen=True, slots=True)
class OutputLength:
    """Lognormal numbers of output tokens.

    Attributes:
        median: half of the outputs are shorter.
        spread: standard deviation of the logarithm; 0 makes all alike.
        most: longer ones are cut to it.
    """

    median: float
    spread: float
    most: int = 4_096

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not is_whole(self.most, 1):
            raise ConfigurationError(f"most={self.most!r:.80} must be a whole number, at least 1")
        if not is_number(self.median, 1, self.most):
            raise ConfigurationError(
                f"median={self.median!r:.80} must be 1 to most={self.most}, to which longer outputs are cut"
            )
        if not is_number(self.spread):
            raise ConfigurationError(f"spread={self.spread!r:.80} must be finite, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisOptions:
    """Options of `synthesize`.

    Attributes:
        delay_multiplier: of a crawl stretches the waits between pages (not the search before them), of a vector search
            all waits. The published runs under memory pressure have 10 and 30.
        search_gap: where the long wait of a vector search is. 'split' has as much of it before the first top-k as was
            measured on searches of a disk (27.5 % of their time) and the rest before the last one, so that the stream
            holds its KV meanwhile; 'last' and 'first' have all of it there. A crawl's is always first.
        durations: which published durations vector searches have: those of the 500 'replayed' traces (mean 4.5 s), on
            which the published latencies were measured, or those of 'all' 4,997 (3.6 s).
        num_documents: the k of a vector search.
        num_shared_documents: so many documents there are altogether, and all vector searches find theirs among them,
            popular ones more often; 0 gives every search documents of its own. At least 30 times `num_documents`.
            Documents are then cut to `max_prompt_tokens / num_documents`, so prompts have a shorter tail.
        popularity_exponent: the document of popularity rank r is found in proportion to 1 / r**exponent (Zipf's law).
        update_share: of kind 'mixed', the share of vector searches (update mode); the rest are crawls (append mode).
        max_prompt_tokens: longer prompts have all their pages or documents halved until they fit. Left out, 125,000
            for crawls and 110,000 for vector searches.
        arrivals: when the questions come; None leaves `Trace.arrival_s` empty.
        tenants: names and weights; each question is one of them's, drawn by weight. Empty: nobody's.
        max_tokens: output tokens of every trace, or their distribution; None leaves it to whoever replays them.
        texts: fills chunks and questions with text of about their length in tokens, for real engines. Otherwise their
            texts are empty, and the metadata of a chunk has `NUM_TOKENS`.

    Raises:
        ConfigurationError: a value cannot work; the message names it.
    """

    delay_multiplier: float = 1.0
    search_gap: Literal["first", "last", "split"] = "split"
    durations: Literal["replayed", "all"] = "replayed"
    num_documents: int = 10
    num_shared_documents: int = 0
    popularity_exponent: float = 1.0
    update_share: float = 0.5
    max_prompt_tokens: int | None = None
    arrivals: Arrivals | None = None
    tenants: Mapping[str, float] = field(default_factory=dict, hash=False)
    max_tokens: int | OutputLength | None = None
    texts: bool = False

    def __post_init__(self) -> None:
        plain_numbers(self)
        for name in ("delay_multiplier", "popularity_exponent"):
            self._require(name, is_number(getattr(self, name)), "be a finite number, 0 or more")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            self._require(name, isinstance(value, str) and value in allowed, f"be one of {', '.join(allowed)}")
        self._require("update_share", is_number(self.update_share, 0, 1), "be a number between 0 and 1")
        self._require("texts", isinstance(self.texts, bool), "be True or False")
        self._require("arrivals", isinstance(self.arrivals, Arrivals | None), "be Arrivals, or None")
        self._check_sizes()
        self._require("tenants", isinstance(self.tenants, Mapping), "have a weight for each name")
        for name, weight in self.tenants.items():
            if not isinstance(name, str) or not is_number(plain(weight), above=True):
                raise ConfigurationError(
                    f"tenants={dict(self.tenants)!r:.200}: weights must be finite and above 0, and names be texts"
                )

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigurationError(f"{name}={getattr(self, name)!r:.80} must {wanted}")

    def _check_sizes(self) -> None:
        for name, least, most in (
            ("num_documents", 1, _MOST_DOCUMENTS),
            ("num_shared_documents", 0, _MOST_SHARED_DOCUMENTS),
        ):
            self._require(name, is_whole(getattr(self, name), least, most), f"be a whole number of {least} to {most:,}")
        if self.num_shared_documents and self.num_shared_documents < _SHARED_PER_DOCUMENT * self.num_documents:
            raise ConfigurationError(
                f"num_shared_documents={self.num_shared_documents!r} must be 0 or at least {_SHARED_PER_DOCUMENT} times"
                f" num_documents={self.num_documents!r}, so that a search finds enough different ones"
            )
        if self.max_prompt_tokens is not None:
            wanted = f"be a whole number, at least {_MIN_PROMPT_TOKENS:,}, or None"
            self._require("max_prompt_tokens", is_whole(self.max_prompt_tokens, _MIN_PROMPT_TOKENS), wanted)
        if not isinstance(self.max_tokens, OutputLength | None):
            self._require("max_tokens", is_whole(self.max_tokens, 1), "be a whole number, at least 1, or None")
