"""Prompts in token ids: head, chunks as they arrive, and the tail that holds the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stream2llm_sdk.chat_template import encode_frame, render_frame
from stream2llm_sdk.chunk_tokens import ChunkEncoder, format_chunk
from stream2llm_sdk.context import Chunk
from stream2llm_sdk.context_markers import ContextMarkers
from stream2llm_sdk.errors import ConfigurationError, PromptError, PromptTooLongError
from stream2llm_sdk.growing_prompt import Prompt, PromptChange, Section, chunk_order_of, positive_or_none
from stream2llm_sdk.placement import ChunkOrder, DroppedChunk, DropReason, Placement, Room
from stream2llm_sdk.plain_text import PlainTextEncoder, clean_text
from stream2llm_sdk.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_SYSTEM",
    "DEFAULT_USER",
    "ChunkOrder",
    "DropReason",
    "DroppedChunk",
    "Placement",
    "Prompt",
    "PromptAssembler",
    "PromptChange",
    "Section",
]

DEFAULT_SYSTEM = "Answer the question with the help of the documents. If the answer is not in them, say that it is not."
DEFAULT_USER = "Documents:\n\n{context}Question: {question}"
_ANSWER_CUE = "\nAnswer:"
_MARKERS = ContextMarkers()


class PromptAssembler:
    """Makes prompts for one model: the chat template's head, chunks in between, the question in the tail.

    The template is rendered once, here, and split around the context. Each chunk is tokenised alone and
    once, and a prompt is the concatenation of token ids, so appending a chunk never changes what is before
    it. Chunks and question are untrusted: no token of theirs is one of the tokenizer's special tokens, and
    the context stands between markers that they cannot write.

    Args:
        tokenizer: a transformers tokenizer. Without a chat template the prompt is plain text.
        max_model_len: most tokens of prompt and answer together.
        max_answer_tokens: tokens kept free for the answer.
        max_chunk_tokens: most tokens of one chunk, separator included; a longer one is cut.
        max_context_tokens: most tokens of all chunks together.
        order: how update-mode chunks are arranged, see `ChunkOrder`.
        system: instructions; None leaves the template's default system prompt in place.
        user: the user's turn, with `{context}` and, behind it, `{question}`.
        format_chunk: a chunk's text. It must depend on the chunk alone, so that a kept chunk never changes.
        separator: text behind every chunk.
        markers: what the context stands between, see `ContextMarkers`; None leaves it unmarked.
        chat_template: a Jinja template to use in place of the tokenizer's own.
        template_arguments: further variables of the template, such as `enable_thinking`.
        cache_tokens: most tokens of chunks remembered for later prompts.

    Raises:
        ConfigurationError: a budget that is not positive or leaves no room, an unknown order, a template
            that cannot hold context and question.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_answer_tokens: int,
        max_chunk_tokens: int | None = None,
        max_context_tokens: int | None = None,
        order: ChunkOrder | str = ChunkOrder.STABLE,
        system: str | None = DEFAULT_SYSTEM,
        user: str = DEFAULT_USER,
        format_chunk: Callable[[Chunk], str] = format_chunk,
        separator: str = "\n\n",
        markers: ContextMarkers | None = _MARKERS,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        cache_tokens: int = 500_000,
    ) -> None:
        self.max_model_len = _positive("max_model_len", max_model_len)
        self.max_answer_tokens = _positive("max_answer_tokens", max_answer_tokens)
        self.max_chunk_tokens = positive_or_none("max_chunk_tokens", max_chunk_tokens)
        self.max_context_tokens = positive_or_none("max_context_tokens", max_context_tokens)
        self.order = chunk_order_of(order)
        _check_types(tokenizer, format_chunk, template_arguments, system=system, user=user, separator=separator)
        if markers is not None and not isinstance(markers, ContextMarkers):
            raise ConfigurationError(f"markers={markers!r:.80}: give ContextMarkers(), or None for no markers")
        frame = render_frame(
            tokenizer,
            system=system,
            user=user if markers is None else markers.around_context(user),
            answer_cue=_ANSWER_CUE,
            chat_template=chat_template,
            template_arguments=template_arguments,
        )
        self._frame = encode_frame(tokenizer, frame)
        self._plain = PlainTextEncoder(tokenizer, frame.structure, () if markers is None else (markers.nonce,))
        self._chunks = ChunkEncoder(
            self._plain,
            format_chunk=format_chunk,
            separator=separator,
            max_tokens=min(self.max_chunk_tokens or self.max_model_len, self.max_model_len),
            cache_tokens=_positive("cache_tokens", cache_tokens),
        )
        self._check_room()

    @property
    def head_ids(self) -> list[int]:
        """The tokens that every prompt begins with."""
        return list(self._frame.head)

    def begin(
        self, question: str, *, max_context_tokens: int | None = None, max_answer_tokens: int | None = None
    ) -> Prompt:
        """The prompt of one question, without any context yet.

        Args:
            question: the question.
            max_context_tokens, max_answer_tokens: override this assembler's.

        Raises:
            PromptError: the question has no text.
            PromptTooLongError: the question leaves no room for context.
            ConfigurationError: the question is not text, or a budget is not positive.
        """
        answer = self.max_answer_tokens
        if max_answer_tokens is not None:
            answer = _positive("max_answer_tokens", max_answer_tokens)
        context = positive_or_none("max_context_tokens", max_context_tokens) or self.max_context_tokens
        tail = self._tail(question)
        fixed = len(self._frame.head) + len(tail)
        room = Room(self.max_model_len - answer - fixed, DropReason.MODEL_LENGTH)
        if room.num_tokens < 1:
            raise PromptTooLongError(
                f"no room is left for context: the question and the instructions take {fixed} tokens and the "
                f"answer {answer}, together {fixed + answer} of max_model_len={self.max_model_len}. Shorten "
                "the question, lower max_answer_tokens, or raise max_model_len."
            )
        if context is not None and context < room.num_tokens:
            room = Room(context, DropReason.CONTEXT_BUDGET)
        return Prompt(question, self._frame.head, tail, self._chunks, room, self.order, answer)

    def _tail(self, question: str) -> tuple[int, ...]:
        if not isinstance(question, str):
            raise ConfigurationError(f"the question must be a str, not {type(question).__name__}: {question!r:.80}")
        text = clean_text(question).strip()
        if not text:
            raise PromptError(f"the question has no text: {question!r:.80}")
        frame = self._frame
        # One token over the model's length is enough to be refused; a huge question is not encoded whole.
        ids, total = self._plain.encode_start(frame.question_lead + text, self.max_model_len)
        if total > len(ids):
            raise PromptTooLongError(
                f"the question alone takes about {total} tokens, more than max_model_len={self.max_model_len}"
            )
        return (*frame.middle, *ids, *frame.end)

    def _check_room(self) -> None:
        frame = self._frame
        fixed = len(frame.head) + len(frame.middle) + len(frame.end)
        if fixed + self.max_answer_tokens + 1 >= self.max_model_len:
            raise ConfigurationError(
                f"max_model_len={self.max_model_len} leaves no room: the instructions take {fixed} tokens, the "
                f"answer max_answer_tokens={self.max_answer_tokens}. Raise the first, or lower the others."
            )
        least = len(self._chunks.separator_ids) + 1
        for name, value in (
            ("max_chunk_tokens", self.max_chunk_tokens),
            ("max_context_tokens", self.max_context_tokens),
        ):
            if value is not None and value < least:
                raise ConfigurationError(
                    f"{name}={value} holds no text: a chunk takes {least} tokens or more, separator included"
                )


def _check_types(
    tokenizer: Any, formatter: Any, template_arguments: Any, *, system: Any, user: Any, separator: Any
) -> None:
    if not callable(tokenizer) or not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise ConfigurationError(
            f"tokenizer must be a loaded tokenizer, not {type(tokenizer).__name__}: load_tokenizer(model) makes one"
        )
    for name, text in (("system", system or ""), ("user", user), ("separator", separator)):
        if not isinstance(text, str):
            raise ConfigurationError(f"{name} must be a str, not {type(text).__name__}: {text!r:.80}")
    if not callable(formatter):
        raise ConfigurationError(f"format_chunk must be a function from Chunk to str, not {type(formatter).__name__}")
    if template_arguments is not None and not isinstance(template_arguments, Mapping):
        raise ConfigurationError(
            f"template_arguments must be a mapping of the template's variables, not {type(template_arguments).__name__}"
        )


def _positive(name: str, value: int) -> int:
    if positive_or_none(name, value) is None:
        raise ConfigurationError(f"{name}=None must be a whole number of tokens, 1 or more")
    return value
