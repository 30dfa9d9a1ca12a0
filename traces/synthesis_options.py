"""What may be chosen about synthetic traces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals import Arrivals

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
        if not (1 <= self.median < math.inf and 0 <= self.spread < math.inf and self.most >= 1):
            raise ConfigurationError(
                f"median={self.median!r} and most={self.most!r} must be at least 1, spread={self.spread!r} at least 0"
            )


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
        for name in ("delay_multiplier", "popularity_exponent"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be finite, 0 or more")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if not 0 <= self.update_share <= 1:
            raise ConfigurationError(f"update_share={self.update_share!r} must be between 0 and 1")
        self._check_sizes()
        if any(not 0 < weight < math.inf for weight in self.tenants.values()):
            raise ConfigurationError(f"tenants={dict(self.tenants)!r}: weights must be finite and above 0")

    def _check_sizes(self) -> None:
        if not 1 <= self.num_documents <= _MOST_DOCUMENTS:
            raise ConfigurationError(f"num_documents={self.num_documents!r} must be 1 to {_MOST_DOCUMENTS:,}")
        if self.num_shared_documents > _MOST_SHARED_DOCUMENTS:
            raise ConfigurationError(
                f"num_shared_documents={self.num_shared_documents!r} must be at most {_MOST_SHARED_DOCUMENTS:,}"
            )
        if self.num_shared_documents and self.num_shared_documents < _SHARED_PER_DOCUMENT * self.num_documents:
            raise ConfigurationError(
                f"num_shared_documents={self.num_shared_documents!r} must be 0 or at least {_SHARED_PER_DOCUMENT} times"
                f" num_documents={self.num_documents!r}, so that a search finds enough different ones"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < _MIN_PROMPT_TOKENS:
            raise ConfigurationError(
                f"max_prompt_tokens={self.max_prompt_tokens!r} must be at least {_MIN_PROMPT_TOKENS}"
            )
        if isinstance(self.max_tokens, int) and self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens={self.max_tokens!r} must be at least 1")
