"""A chat template as a fixed frame around the context and the question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.plain_text import anchored
from stream2llm_sdk.tokenizer import Tokenizer, special_tokens

__all__ = ["FrameTokens", "PromptFrame", "encode_frame", "render_frame"]

# Stand for the untrusted parts while the template is rendered, before any of these exists.
_SYSTEM_SLOT = "Slot4System7Qx"
_CONTEXT_SLOT = "Slot4Context7Qx"
_QUESTION_SLOT = "Slot4Question7Qx"


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """The trusted text of a prompt: `head` context `middle` question `end`.

    Attributes:
        structure: what the template itself writes, without the instructions; empty without a template.
        is_chat: whether a chat template wrote it, special tokens included.
    """

    head: str
    middle: str
    end: str
    structure: str
    is_chat: bool


@dataclass(frozen=True, slots=True)
class FrameTokens:
    """A frame in token ids. `question_lead` is white space that is encoded together with the question."""

    head: tuple[int, ...]
    middle: tuple[int, ...]
    end: tuple[int, ...]
    question_lead: str


def render_frame(
    tokenizer: Tokenizer,
    *,
    system: str | None,
    user: str,
    answer_cue: str,
    chat_template: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> PromptFrame:
    """Renders the chat template once and splits it around the context and the question.

    Args:
        tokenizer: its own template is used unless `chat_template` is given. One without any template gets
            the instructions, the user text and `answer_cue` as plain text.
        system: instructions; None leaves a template's default system prompt in place. A template without a
            system role gets them at the start of the user's turn.
        user: the user's turn, with `{context}` and, behind it, `{question}`.
        template_arguments: further variables of the template.

    Raises:
        ConfigurationError: `user` lacks a slot, or the template loses, repeats or swaps them.
    """
    _check_reads_special_tokens(tokenizer)
    _check_texts(tokenizer, system, user)
    user = user.replace("{context}", _CONTEXT_SLOT).replace("{question}", _QUESTION_SLOT)
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        text = (f"{system}\n\n" if system else "") + user + answer_cue
        return PromptFrame(*_split(text), structure="", is_chat=False)

    arguments = {**(template_arguments or {}), "chat_template": chat_template}
    reason: object = "it writes the context and the question other than once each, in this order"
    for shape in _shapes(system):
        try:
            probe = _render(tokenizer, shape, _SYSTEM_SLOT, _CONTEXT_SLOT + _QUESTION_SLOT, arguments)
            text = _render(tokenizer, shape, system or "", user, arguments)
        except Exception as error:  # a template is a program: whatever it raises, this shape does not suit it
            reason = error
            continue
        if shape.has_system_text and _SYSTEM_SLOT not in probe:
            continue
        if _is_whole(probe) and _is_whole(text):
            structure = probe.replace(_SYSTEM_SLOT, " ")
            return PromptFrame(*_split(text), structure=" ".join(_split(structure)), is_chat=True)
    raise ConfigurationError(
        f"the model's chat template cannot hold a context and a question: {reason}. "
        "Give another one with chat_template=, or its variables with template_arguments=."
    )


def encode_frame(tokenizer: Tokenizer, frame: PromptFrame) -> FrameTokens:
    """Token ids of the frame's parts; special tokens in a chat template's text become their ids."""

    def encode(text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        return list(tokenizer(text, **options)["input_ids"])

    encode_inside = anchored(encode)
    middle = frame.middle.rstrip(" ")
    leading = () if frame.is_chat else _leading_special_ids(tokenizer, encode)
    return FrameTokens(
        head=(*leading, *encode(frame.head)),
        middle=tuple(encode_inside(middle)) if middle else (),
        end=tuple(encode_inside(frame.end)) if frame.end else (),
        question_lead=frame.middle[len(middle) :],
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """One way to hand instructions and user text to a template."""

    has_system_role: bool
    has_system_text: bool
    has_parts: bool


def _shapes(system: str | None) -> Iterator[_Shape]:
    for has_parts in (False, True):
        if system is not None:
            yield _Shape(has_system_role=True, has_system_text=True, has_parts=has_parts)
        yield _Shape(has_system_role=False, has_system_text=bool(system), has_parts=has_parts)


def _render(tokenizer: Tokenizer, shape: _Shape, system: str, user: str, arguments: Mapping[str, Any]) -> str:
    if shape.has_system_text and not shape.has_system_role:
        user = f"{system}\n\n{user}"
    turns = [("system", system)] if shape.has_system_role else []
    turns.append(("user", user))
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if shape.has_parts else text} for role, text in turns
    ]
    return str(tokenizer.apply_chat_template(messages, **arguments, tokenize=False, add_generation_prompt=True))


def _is_whole(text: str) -> bool:
    once = text.count(_CONTEXT_SLOT) == 1 and text.count(_QUESTION_SLOT) == 1
    return once and text.index(_CONTEXT_SLOT) < text.index(_QUESTION_SLOT)


def _split(text: str) -> tuple[str, str, str]:
    head, _, rest = text.partition(_CONTEXT_SLOT)
    middle, _, end = rest.partition(_QUESTION_SLOT)
    return head, middle, end


def _check_texts(tokenizer: Tokenizer, system: str | None, user: str) -> None:
    slots = user.count("{context}"), user.count("{question}")
    if slots != (1, 1) or user.index("{context}") > user.index("{question}"):
        raise ConfigurationError(f"user={user!r:.200} must hold {{context}} once and, behind it, {{question}} once")
    for name, text in (("system", system or ""), ("user", user)):
        for token in special_tokens(tokenizer).values():
            if token and token in text:
                raise ConfigurationError(
                    f"{name}= contains {token!r}, a special token of the model. Take it out: these come from "
                    "the chat template (which chat_template= replaces)."
                )


def _check_reads_special_tokens(tokenizer: Tokenizer) -> None:
    """Refuses tokenizers (mistral-common's) that read no special token in text: a rendered template is text."""
    for token, token_id in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True):
        if list(tokenizer(token, add_special_tokens=False)["input_ids"]) != [token_id]:
            raise ConfigurationError(
                f"{type(tokenizer).__name__} does not read special tokens such as {token!r} in text, so a chat "
                "template cannot be encoded. Load the model's tokenizer.json (PreTrainedTokenizerFast) instead."
            )
        return


def _leading_special_ids(tokenizer: Tokenizer, encode: Any) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text (BOS), as against behind it (EOS)."""
    plain, whole = encode("x"), list(tokenizer("x")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
