"""What is asked of a page's conversion, and what comes out: plain values that cross a process boundary as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.value_checks import is_whole

__all__ = ["ConvertedPage", "ExtractionOptions", "PageLink", "QualityLimits"]

_LANGUAGE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLimits:
    """When a page's text is too poor to be worth prompt tokens. `None` switches a rule off.

    The rules on words, symbols and repetition are those of Gopher's web filter with its values (Rae et al. 2021,
    "Scaling Language Models", table A1), save that the shortest page is 20 words here and not 50: a page that answers
    a question may be a short one. The rule on links is jusText's (Pomikálek 2011), whose bound for good text is 0.2
    and which is applied here to the whole main text, where lists of references are common.

    Args:
        min_words: fewest words.
        min_mean_word_length, max_mean_word_length: bounds of the mean length of a word in characters. They suit
            languages that put spaces between words and are not applied to the others.
        max_symbol_ratio: most ellipses and hash signs a word (Markdown's own hash signs do not count).
        min_alphabetic_words: smallest share of words that hold a letter.
        max_duplicate_lines: largest share of characters in lines (code blocks aside) that occurred before.
        max_link_density: largest share of the main text's characters that are inside links.

    Raises:
        ConfigurationError: a limit is negative, or a share is above 1.
    """

    min_words: int | None = 20
    min_mean_word_length: float | None = 3.0
    max_mean_word_length: float | None = 10.0
    max_symbol_ratio: float | None = 0.1
    min_alphabetic_words: float | None = 0.6
    max_duplicate_lines: float | None = 0.3
    max_link_density: float | None = 0.6

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigurationError(f"{name}={value!r}: give a number of at least 0, or None to switch it off")
            is_share = name in ("min_alphabetic_words", "max_duplicate_lines", "max_link_density")
            if is_share and value > 1:
                raise ConfigurationError(f"{name}={value!r}: it is a share, so give a number from 0 to 1, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionOptions:
    """What to take from a page.

    Args:
        query: the question; passages that match it are kept. Without one, the page's beginning is kept.
        max_page_tokens: most tokens of the Markdown, as `passages.estimate_tokens` counts; None keeps the whole page.
        languages: ISO 639-1 codes such as `("en", "de")`; a page in another language gives no text. Empty: any.
        quality: when a page is too poor to be used; None uses every page.
        max_links: most links reported; 0 saves the time of looking for them.
        max_pdf_pages: most pages read of a PDF, from its beginning.

    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    query: str = ""
    max_page_tokens: int | None = 2_000
    languages: tuple[str, ...] = ()
    quality: QualityLimits | None = None
    max_links: int = 200
    max_pdf_pages: int = 50

    def __post_init__(self) -> None:
        if not isinstance(self.query, str):
            raise ConfigurationError(f"query must be a str, not {type(self.query).__name__}: {self.query!r:.80}")
        tokens = self.max_page_tokens
        if tokens is not None and not is_whole(tokens, 16):
            raise ConfigurationError(f"max_page_tokens={tokens!r}: give a whole number of at least 16, or None for all")
        if not is_whole(self.max_links, 0):
            raise ConfigurationError(f"max_links={self.max_links!r}: give a whole number, 0 for no links")
        if not is_whole(self.max_pdf_pages, 1):
            raise ConfigurationError(f"max_pdf_pages={self.max_pdf_pages!r}: give a whole number of at least 1")
        languages: object = self.languages
        if isinstance(languages, (str, bytes)) or not isinstance(languages, Iterable):
            raise ConfigurationError(f"languages={self.languages!r}: give a list of codes, such as ('en',)")
        object.__setattr__(self, "languages", tuple(self.languages))
        for code in self.languages:
            if not isinstance(code, str) or not _LANGUAGE.fullmatch(code):
                raise ConfigurationError(f"languages holds {code!r:.80}: give ISO 639-1 codes in small letters: 'en'")
        if self.quality is not None and not isinstance(self.quality, QualityLimits):
            raise ConfigurationError(f"quality={self.quality!r:.80}: give QualityLimits(), or None for no filter")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExtractionOptions:
        """The options that `to_json` wrote."""
        quality = values["quality"]
        return cls(**{**values, "quality": None if quality is None else QualityLimits(**quality)})


@dataclass(frozen=True, slots=True)
class PageLink:
    """A link of a page.

    Attributes:
        url: absolute, http(s), without a fragment. Not trusted: whoever fetches it checks it.
        text: what the link reads.
        context: the sentence or cell around it, the link's own text included; at most 200 characters.
        in_main: whether it stands in the main text, as against navigation, header and footer.
    """

    url: str
    text: str = ""
    context: str = ""
    in_main: bool = True


@dataclass(frozen=True, slots=True)
class ConvertedPage:
    """A page as text for a model.

    Attributes:
        title: one line; empty if the page has none.
        markdown: the passages kept; empty if the page has no text or was refused.
        links: in document order, each URL once.
        language: ISO 639-1 code of the main text, as identified; empty if the text is too short to tell, or if nothing
            asked for it (see `ExtractionOptions.languages`).
        canonical_url: what the page calls its own address, absolute; empty if it names none.
        refusal: why the page gives no text, if a filter refused it; one line for people.
        num_words: words of the main text before it was cut to passages.
        has_scripts: whether the page carries scripts, which may be what writes its text.
        metadata: anything else worth keeping with the chunk, such as `description` and, of a PDF, `num_pages`.
        shingle_hashes: of the Markdown, for telling pages apart (`duplicates.Shingles`); comparable among pages of one
            `ConverterPool`.
    """

    title: str
    markdown: str
    links: tuple[PageLink, ...] = ()
    language: str = ""
    canonical_url: str = ""
    refusal: str = ""
    num_words: int = 0
    has_scripts: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    shingle_hashes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values without the Markdown, which travels apart, for `from_json`."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("markdown", "links")}
        links = [[link.url, link.text, link.context, link.in_main] for link in self.links]
        return {**values, "metadata": dict(self.metadata), "links": links}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], markdown: str) -> ConvertedPage:
        """The page that `to_json` wrote."""
        links = tuple(PageLink(*link) for link in values["links"])
        hashes = tuple(values["shingle_hashes"])
        return cls(**{**values, "links": links, "markdown": markdown, "shingle_hashes": hashes})
