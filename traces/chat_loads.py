"""Whole requests that decode: chat-like and long-context loads, all at once or one after another.

Only what is marked published is; the rest is assumed, to have something to schedule:

* Chat. Published (LMSYS-Chat-1M, arXiv 2309.11998, table 1): 69.5 tokens a prompt and 214.5 a response on average.
  Assumed: four kinds of request whose means average to those, and that prompts and responses of a kind are lognormal.
* Long context. Published (LongBench, arXiv 2308.14508, and its repository): the sixteen English and code data sets, how
  many questions each has, the mean length of its prompts in words, and how many tokens its evaluation generates at
  most. Assumed: 1.4 tokens a word of prose and 3 a word of code, lognormal lengths within a data set, and answers whose
  median is half of what the evaluation generates at most, so that few get further.
* Both. Published as the set-up of the SVF experiments (arXiv 2606.22327): a context of 65,536 tokens, at most 4,096
  generated, bursts of 200 and Poisson arrivals. Longer draws are cut.

A prompt ends in a question of up to 40 words, which tells something of its kind as questions do: some of its words are
from a vocabulary of the kind, the others from one that all kinds share. Nothing in a prompt tells how long the answer
is among those of its kind, so a predictor can know the kind at best. The share of such words is assumed: in chat it is
so low, and prompts so short, that a classifier finds short from long about as well as published ones do on real chats
(73 %); data sets of long contexts have instructions of their own, and are easily told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.length_prediction import RequestFeatures
from stream2llm_sdk.serving.length_training import LengthRecord
from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest, TokenSpan, token_ids
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.distributions import generator

__all__ = [
    "CHAT",
    "LONG_CONTEXT",
    "MAX_CONTEXT_TOKENS",
    "MAX_OUTPUT_TOKENS",
    "Load",
    "RequestKind",
    "draw_requests",
    "length_records",
    "with_known_lengths",
]

MAX_CONTEXT_TOKENS: Final = 65_536
MAX_OUTPUT_TOKENS: Final = 4_096

_MAX_QUESTION_TOKENS = 40
_NUM_QUESTION_TOKENS_READ = 64
_NUM_COMMON_WORDS = 3_000
_NUM_WORDS_OF_KIND = 60
_FIRST_DOCUMENT_ID = 1_000_000


@dataclass(frozen=True, slots=True)
class RequestKind:
    """What requests are alike in.

    Attributes:
        name: of the kind.
        weight: how often it comes, relative to the others.
        mean_prompt_tokens: mean of the lognormal prompt lengths.
        prompt_sigma: their spread, of the logarithm.
        mean_output_tokens: mean of the lognormal output lengths.
        output_sigma: their spread.
    """

    name: str
    weight: float
    mean_prompt_tokens: float
    prompt_sigma: float
    mean_output_tokens: float
    output_sigma: float


@dataclass(frozen=True, slots=True)
class Load:
    """A mixture of kinds of request.

    Attributes:
        name: also the tag of its requests.
        kinds: at least one.
        share_of_telling_words: how many of a question's words are from its kind's vocabulary.
    """

    name: str
    kinds: tuple[RequestKind, ...]
    share_of_telling_words: float


CHAT: Final = Load(
    "chat",
    (
        RequestKind("talk", 0.35, 25.0, 1.0, 60.0, 0.9),
        RequestKind("question", 0.35, 45.0, 1.0, 200.0, 0.8),
        RequestKind("writing", 0.18, 80.0, 1.0, 420.0, 0.7),
        RequestKind("code", 0.12, 255.0, 1.0, 400.0, 0.7),
    ),
    share_of_telling_words=0.3,
)

# Questions, mean words of a prompt, most tokens generated: all published.
_LONG_BENCH = {
    "narrativeqa": (200, 18_409, 128),
    "qasper": (200, 3_619, 128),
    "multifieldqa_en": (150, 4_559, 64),
    "hotpotqa": (200, 9_151, 32),
    "2wikimqa": (200, 4_887, 32),
    "musique": (200, 11_214, 32),
    "gov_report": (200, 8_734, 512),
    "qmsum": (200, 10_614, 512),
    "multi_news": (200, 2_113, 512),
    "trec": (200, 5_177, 64),
    "triviaqa": (200, 8_209, 32),
    "samsum": (200, 6_258, 128),
    "passage_count": (200, 11_141, 32),
    "passage_retrieval_en": (200, 9_289, 32),
    "lcc": (500, 1_235, 64),
    "repobench-p": (500, 4_206, 64),
}
_CODE = ("lcc", "repobench-p")
_LONG_OUTPUT_SIGMA = 0.6

LONG_CONTEXT: Final = Load(
    "long-context",
    tuple(
        RequestKind(
            name,
            num_questions,
            num_words * (3.0 if name in _CODE else 1.4),
            0.4,
            num_generated / 2 * float(np.exp(_LONG_OUTPUT_SIGMA**2 / 2)),
            _LONG_OUTPUT_SIGMA,
        )
        for name, (num_questions, num_words, num_generated) in _LONG_BENCH.items()
    ),
    share_of_telling_words=0.6,
)


def draw_requests(
    load: Load, num_requests: int, *, seed: int, rate_per_s: float | None = None
) -> list[SimulatedRequest]:
    """Requests whose prompt is there when they arrive, in the order of arrival. The same seed gives the same prompts
    and outputs at any rate.

    Args:
        load: what is asked.
        num_requests: how many, at least 1.
        seed: of prompts, outputs and arrivals.
        rate_per_s: of Poisson arrivals; None for all of them at time 0.

    Raises:
        ConfigurationError: there is nothing to draw, or the rate is not positive.
    """
    if num_requests < 1:
        raise ConfigurationError(f"num_requests={num_requests}: draw at least one")
    arrivals_s = np.zeros(num_requests)
    if rate_per_s is not None:
        arrivals_s = Arrivals(rate_per_s=rate_per_s).draw(num_requests, seed=seed)
    random = generator(seed, load.name)
    weights = np.array([kind.weight for kind in load.kinds])
    requests, next_id = [], _FIRST_DOCUMENT_ID
    for arrival_s, kind_index in zip(
        arrivals_s, random.choice(len(load.kinds), num_requests, p=weights / weights.sum()), strict=True
    ):
        kind = load.kinds[kind_index]
        most = MAX_CONTEXT_TOKENS - MAX_OUTPUT_TOKENS - 1
        num_prompt = _lognormal(random, kind.mean_prompt_tokens, kind.prompt_sigma, most)
        num_output = _lognormal(random, kind.mean_output_tokens, kind.output_sigma, MAX_OUTPUT_TOKENS)
        question = _question(random, int(kind_index), min(num_prompt, _MAX_QUESTION_TOKENS), load)
        spans = [(next_id, num_prompt - len(question)), *question]
        next_id += num_prompt
        requests.append(
            SimulatedRequest(
                float(arrival_s),
                (SimulatedChunk(0.0, "append", tuple(span for span in spans if span[1])),),
                max_tokens=MAX_OUTPUT_TOKENS,
                stops_after=num_output,
                tag=load.name,
            )
        )
    return requests


def with_known_lengths(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """The same requests, each allowed one token more than it will put out: whoever subtracts it knows the length."""
    return [
        replace(request, max_tokens=request.num_output_tokens + 1, stops_after=request.num_output_tokens)
        for request in requests
    ]


def length_records(requests: Sequence[SimulatedRequest]) -> list[LengthRecord]:
    """What a log of these requests would teach a predictor."""
    return [
        LengthRecord(
            RequestFeatures(
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                tag=request.tag,
                tenant=request.tenant,
                question_token_ids=tuple(token_ids(request.final_spans)[-_NUM_QUESTION_TOKENS_READ:].tolist()),
            ),
            request.num_output_tokens,
        )
        for request in requests
    ]


def _lognormal(random: np.random.Generator, mean: float, sigma: float, most: int) -> int:
    return int(np.clip(np.rint(mean * np.exp(sigma * random.normal() - sigma**2 / 2)), 1, most))


def _question(random: np.random.Generator, kind_index: int, num_words: int, load: Load) -> list[TokenSpan]:
    tells = random.random(num_words) < load.share_of_telling_words
    # The square makes some words common and most rare.
    places = random.random(num_words) ** 2
    first_of_kind = _NUM_COMMON_WORDS + kind_index * _NUM_WORDS_OF_KIND
    words = np.where(tells, first_of_kind + places * _NUM_WORDS_OF_KIND, places * _NUM_COMMON_WORDS)
    return [(int(word), 1) for word in words]
