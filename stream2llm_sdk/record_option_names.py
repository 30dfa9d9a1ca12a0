"""What the commands `stream2llm trace record …` call the arguments and settings of which errors and reasons speak."""

from __future__ import annotations

import re

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

_LONG_NAMES = "|".join(name for name in _OPTIONS if "_" in name)
_WORDS = "|".join(name for name in _OPTIONS if "_" not in name)
# A name that is an ordinary word, too, is the argument only where a value follows.
_ARGUMENT = re.compile(rf"(?<![\w./-])(?:(?:{_LONG_NAMES})(?![\w/-])|(?:{_WORDS})(?==(?!=)))")


def with_option_names(text: str) -> str:
    """A text with the command line's options in place of the arguments that code would give."""
    return _ARGUMENT.sub(lambda found: _OPTIONS[found[0]], text)
