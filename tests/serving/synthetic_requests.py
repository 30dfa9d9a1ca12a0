"""Streams as a crawler makes them, and requests whose output length depends on what is known of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from stream2llm_sdk.serving.length_prediction import RequestFeatures
from stream2llm_sdk.serving.length_training import LengthRecord

HEAD_TOKENS = 40

PAGES_MEAN, PAGES_SD = 6.9, 2.3
PAGE_TOKENS, PAGE_SD, QUERY_SD, EMPTY_SHARE = 585.0, 1.1, 0.72, 0.08
SEARCH_S, SEARCH_SD = 2.3, 0.5
GAP_S, GAP_SD = 0.7, 0.9


@dataclass(frozen=True)
class StreamEvent:
    """One arrival: seconds from the opening, and the prompt's tokens then. The last one completes the prompt."""

    at_s: float
    num_tokens: int


def crawler_stream(rng: random.Random, *, scale: float = 1.0) -> list[StreamEvent]:
    """The published crawler's statistics: pages, their sizes (with a part of the query's own), search and gaps."""
    query = rng.gauss(0, QUERY_SD)
    at_s, num_tokens = SEARCH_S * math.exp(rng.gauss(0, SEARCH_SD)), HEAD_TOKENS
    events = []
    for _ in range(max(1, round(rng.gauss(PAGES_MEAN, PAGES_SD)))):
        if rng.random() >= EMPTY_SHARE:
            num_tokens += min(40_000, round(scale * PAGE_TOKENS * math.exp(rng.gauss(query, PAGE_SD))))
        events.append(StreamEvent(at_s, num_tokens))
        at_s += GAP_S * math.exp(rng.gauss(0, GAP_SD))
    return events


def length_records(num: int, rng: random.Random) -> list[LengthRecord]:
    """Requests of which about a quarter are long: those of one tag mostly, and those with certain words in the
    question, with chance in between."""
    records = []
    for _ in range(num):
        tag = rng.choice(("crawler", "crawler", "diskann"))
        asks_for_list = rng.random() < 0.15
        words = [rng.randrange(1_000, 9_000) for _ in range(rng.randint(4, 20))] + [42] * asks_for_list
        rng.shuffle(words)
        long = rng.random() < (0.9 if asks_for_list else 0.35 if tag == "diskann" else 0.03)
        length = (600 if long else 60) * math.exp(rng.gauss(0, 0.5))
        max_tokens = rng.choice((None, 2_048))
        features = RequestFeatures(rng.randint(200, 20_000), max_tokens, tag, rng.choice("abc"), tuple(words))
        records.append(LengthRecord(features, min(2_048, max(1, round(length)))))
    return records
