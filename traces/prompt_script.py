"""The messages that a trace comes to: what of the prompt stays, and which token ids are new, at which time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np

from stream2llm_sdk.chunk_tokens import ChunkEncoder, EncodedChunk
from stream2llm_sdk.context import Chunk, ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.growing_prompt import Prompt
from stream2llm_sdk.placement import ChunkOrder, DropReason, Room
from stream2llm_sdk.prompt import PromptAssembler
from stream2llm_sdk.serving.engine import EngineLimits
from stream2llm_sdk.serving.lcp import TokenArray, longest_common_prefix
from stream2llm_sdk.traces.synthesis_options import NUM_QUESTION_TOKENS, NUM_TEMPLATE_TOKENS
from stream2llm_sdk.traces.trace import NUM_TOKENS, Trace

__all__ = ["FillerPrompts", "PromptScript", "ScriptStep", "filler_ids", "keeps_sizes_only", "script_of"]

_EMPTY: TokenArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ScriptStep:
    """One message of a prompt.

    Attributes:
        offset_s: seconds after the question.
        keep: tokens of the prompt before that stay, from its start.
        new: the token ids behind them.
        num_documents: documents in the context now.
        num_changed_documents: those of them that were not in the context before.
    """

    offset_s: float
    keep: int
    new: TokenArray
    num_documents: int
    num_changed_documents: int

    def applied_to(self, prompt: TokenArray) -> TokenArray:
        """The whole prompt after this message, of the one before."""
        return self.new if not self.keep else np.concatenate((prompt[: self.keep], self.new))

    def changes(self, prompt: TokenArray) -> bool:
        """Whether the prompt before becomes another."""
        return bool(len(self.new)) or self.keep < len(prompt)


@dataclass(frozen=True, slots=True, eq=False)
class PromptScript:
    """A trace in token ids.

    Attributes:
        trace: what it was made of.
        steps: one for each update of the trace; the last one completes the prompt.
    """

    trace: Trace
    steps: tuple[ScriptStep, ...]

    def prompts(self) -> Iterator[TokenArray]:
        """The whole prompt after each step."""
        prompt = _EMPTY
        for step in self.steps:
            prompt = step.applied_to(prompt)
            yield prompt

    def final_ids(self) -> TokenArray:
        """The complete prompt."""
        *_, prompt = self.prompts()
        return prompt


def script_of(trace: Trace, prompts: PromptAssembler | FillerPrompts, *, max_tokens: int = 1) -> PromptScript:
    """The trace's messages, assembled as `StreamingRAG` does it.

    Args:
        trace: with texts for an assembler; one without them for `FillerPrompts`.
        prompts: what begins a prompt.
        max_tokens: output tokens that room is kept for.

    Raises:
        PromptError: the question has no text, or leaves no room.
    """
    if isinstance(prompts, FillerPrompts):
        trace = _with_sources(trace)
        prompt = prompts.begin_trace(trace, max_tokens)
    else:
        prompt = prompts.begin(trace.query, max_answer_tokens=max_tokens)
    before, documents, steps = _EMPTY, frozenset[str](), []
    for number, timed in enumerate(trace.updates, 1):
        prompt.apply(timed.update)
        is_last = number == len(trace.updates)
        now = np.array(prompt.final_ids if is_last else prompt.ids, dtype=np.int32)
        keep = len(before) if trace.mode is ContextMode.APPEND else longest_common_prefix(before, now)
        names = frozenset(place.chunk.source or place.chunk.text for place in prompt.placements)
        new = now[keep:].copy()  # a view would keep the whole prompt in memory
        steps.append(ScriptStep(timed.offset_s, keep, new, len(prompt.placements), len(names - documents)))
        before, documents = now, names
    return PromptScript(trace, tuple(steps))


def keeps_sizes_only(trace: Trace) -> bool:
    """Whether the trace has the lengths of its chunks in place of their texts.

    Raises:
        ConfigurationError: some chunks have lengths, and others have neither length nor text.
    """
    chunks = [chunk for timed in trace.updates for chunk in timed.update.chunks]
    if any(chunk.text for chunk in chunks):
        return False
    missing = [chunk for chunk in chunks if NUM_TOKENS not in chunk.metadata]
    if missing and len(missing) < len(chunks):
        raise ConfigurationError(
            f"trace {trace.trace_id!r}: the chunk of source {missing[0].source!r} has neither a text nor {NUM_TOKENS}, "
            "which others have: give all of them lengths"
        )
    return len(missing) < len(chunks) or trace.num_query_tokens is not None or not trace.query


class FillerPrompts:
    """Prompts for traces that keep no texts. Their token ids mean nothing, but chunks of the same source have the same.

    Args:
        vocabulary_size: ids are below it.
        limits: what the engine can hold; prompts are cut to it as an assembler cuts them.
        order: how update-mode chunks are arranged; 'rank' leaves them as they are.

    Raises:
        ConfigurationError: the vocabulary has too few ids.
    """

    def __init__(
        self, vocabulary_size: int, limits: EngineLimits, *, order: ChunkOrder | str = ChunkOrder.RANK
    ) -> None:
        if vocabulary_size < 16:
            raise ConfigurationError(f"vocabulary_size={vocabulary_size!r}: filler needs at least 16 token ids")
        self.vocabulary_size = vocabulary_size
        self.limits = limits
        self.order = ChunkOrder(order)
        self._chunks = cast(ChunkEncoder, _FillerEncoder(vocabulary_size))

    def begin_trace(self, trace: Trace, max_tokens: int) -> Prompt:
        """The prompt of a trace's question, without any context yet.

        Raises:
            ConfigurationError: the question leaves no room for context.
        """
        num_question = NUM_QUESTION_TOKENS if trace.num_query_tokens is None else trace.num_query_tokens
        head = filler_ids("template", NUM_TEMPLATE_TOKENS, self.vocabulary_size)
        tail = filler_ids(f"question of {trace.trace_id}", max(1, num_question), self.vocabulary_size)
        capacity = min(self.limits.max_model_len - max_tokens, self.limits.max_prompt_tokens)
        room = capacity - len(head) - len(tail)
        if room < 1:
            raise ConfigurationError(
                f"trace {trace.trace_id!r}: {len(head) + len(tail)} tokens of template and question leave no room in "
                f"a prompt of at most {capacity} tokens; give the engine more"
            )
        reason = DropReason.MODEL_LENGTH
        return Prompt(trace.query, head, tail, self._chunks, Room(room, reason), self.order, max_tokens)


class _FillerEncoder:
    """A `ChunkEncoder` for chunks that have lengths in place of texts."""

    separator_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size

    def encode(self, chunk: Chunk) -> EncodedChunk:
        return EncodedChunk(filler_ids(chunk.source, int(chunk.metadata[NUM_TOKENS]), self._vocabulary_size), 0)

    def cut(self, chunk: Chunk, max_tokens: int) -> EncodedChunk:
        ids = self.encode(chunk).ids
        return EncodedChunk(ids[:max_tokens], max(0, len(ids) - max_tokens))


@lru_cache(maxsize=512)
def filler_ids(name: str, num_tokens: int, vocabulary_size: int) -> tuple[int, ...]:
    """`num_tokens` token ids that stand for the text called `name`. Of the same name a shorter text is a beginning of
    a longer one.

    Ids come from the middle of the vocabulary, a quarter to seven eighths: special tokens are at its ends.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    low, high = vocabulary_size // 4, vocabulary_size * 7 // 8
    # Doubles are drawn one by one, so that a longer draw begins with a shorter one.
    draws = np.random.default_rng(seed).random(num_tokens)
    return tuple((low + (draws * (high - low)).astype(np.int64)).tolist())


def _with_sources(trace: Trace) -> Trace:
    """The trace with a name for each chunk, since a chunk without a text is known by its source alone."""
    if all(chunk.source for timed in trace.updates for chunk in timed.update.chunks):
        return trace
    updates = []
    for number, timed in enumerate(trace.updates):
        chunks = [
            chunk if chunk.source else replace(chunk, source=f"{trace.trace_id}/{number}/{place}")
            for place, chunk in enumerate(timed.update.chunks)
        ]
        updates.append(replace(timed, update=type(timed.update)(chunks)))
    return replace(trace, updates=tuple(updates))
