"""What the commands `stream2llm trace record …` call the arguments and settings of which errors and reasons speak."""

from __future__ import annotations

import re

from stream2llm_sdk.option_names import OptionNames, Phrase

__all__ = ["with_option_names"]

_OPTIONS = {
    "allow_networks": "--allow-network",
    "beam_width": "--beam-width",
    "cold": "--cold",
    "column": "--column",
    "concurrency": "--concurrency",
    "early_stop": "--early-stop",
    "embedder": "--embedder",
    "fetch": "--fetch",
    "filter": "--filter",
    "gate": "--gate",
    "index": "--index",
    "k": "--k",
    "limit": "--limit",
    "max_depth": "--max-depth",
    "max_page_tokens": "--max-page-tokens",
    "max_pages": "--max-pages",
    "max_wait_s": "--total-timeout",
    "num_actors": "--ray-actors",
    "num_workers": "--workers",
    "page_timeout_s": "--page-timeout",
    "per_host_concurrency": "--per-host-concurrency",
    "per_host_interval_s": "--per-host-interval",
    "respect_robots": "--robots",
    "sample": "--sample",
    "scope": "--scope",
    "search": "--search",
    "search_list_size": "--search-list-size",
    "seed": "--seed",
    "total_timeout_s": "--total-timeout",
    "user_agent": "--user-agent",
}


def _networks(found: re.Match[str]) -> str:
    return " ".join(f"--allow-network={network}" for network in re.findall(r'"([^"]*)"', found[1]))


_INDEX_DIGEST = 'index="[0-9a-f]{64}"'
_PHRASES: tuple[Phrase, ...] = (
    # The settings that a recording was begun with, as `check_settings` writes them.
    (rf"with {_INDEX_DIGEST}, not with {_INDEX_DIGEST}", "with another --index"),
    (
        r'\bgate=\{"min_stable_expansions": (\d+), "min_rank_factor": ([^,}]+)\}',
        r"--gate --gate-expansions=\1 --gate-rank=\2",
    ),
    (r"\bearly_stop=\{[^{}]*\}", "--early-stop"),
    (r"\ballow_networks=(\[[^\[\]]*\])", _networks),
    (r"\bfilter=(\{.*?\})(?=, not |; |\. )", r"--filter='\1'"),
    (r"\bcold=true\b", "--cold"),
    (r"\brespect_robots=true\b", "--robots"),
    (r"\bwithout respect_robots\b", "with --no-robots"),
    (r"\bwithout max_page_tokens\b", "with --max-page-tokens=0"),
    (rf"(?<=\bwithout )({'|'.join(_OPTIONS)})(?=[,;.] )", lambda found: _OPTIONS[found[0]]),
    # Other ways out.
    (r"\bgive api_key=, or set (?=TAVILY_API_KEY)", "set "),
    (
        r"\bdoes not exist: (.+) is no index, or its build did not finish; build the index again: build_index\(\), or "
        r"`stream2llm index build`",
        r"does not exist: \1 is no index, or its build did not finish: give --corpus CORPUS, or build it with "
        r"`stream2llm index build CORPUS --out \1`",
    ),
    (r"\bagain: build_index\(\), or (?=`stream2llm index build`)", "again with "),
    (r"\bwith build_index\(\)", "with `stream2llm index build`"),
    (
        r"\bBuild it with filterable=\('(.+)', …\)",
        r"Build another one: `stream2llm index build CORPUS --out DIR --filterable \1`",
    ),
)
_NAMES = OptionNames(_OPTIONS, _PHRASES)


def with_option_names(text: str) -> str:
    """A text with the command line's options in place of the arguments that code would give."""
    return _NAMES(text)
