"""Tokenizers: what the prompt layer asks of one, and how one is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["Tokenizer", "load_tokenizer", "locate_model", "special_tokens"]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer (fast or slow) that the prompt layer uses."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def all_special_tokens(self) -> Sequence[str]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def load_tokenizer(model: str | Path, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer of `model`: a folder, a GGUF file, or a model's name on the Hugging Face Hub.

    Names are looked up in the local cache when the Hub cannot be reached. Code that comes with a model is
    never run.

    Args:
        model: which.
        revision: a branch, a tag or a commit on the Hub; left out, the default one.

    Raises:
        ConfigurationError: there is no such folder, or no tokenizer can be made of what is there.
        MissingExtraError: transformers is not installed.
    """
    location, options = locate_model(str(model))
    if revision is not None:
        options["revision"] = revision
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "cpu") from error
    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(location, **options))
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        cause = " ".join(str(error).split())
        raise ConfigurationError(
            f"no tokenizer could be loaded for model={str(model)!r}: {cause:.400}. Give a folder that holds "
            "tokenizer.json and tokenizer_config.json, or a model's name on the Hugging Face Hub while that "
            "can be reached (or once the model is in the local cache)."
        ) from error


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Id and text of every token that the tokenizer itself calls special."""
    tokens = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    tokens.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return tokens


def locate_model(model: str) -> tuple[str, dict[str, Any]]:
    """What transformers is asked for: a folder or a Hub name, and the options that belong to it.

    Raises:
        ConfigurationError: the model is meant to be on this machine, and is not.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {}
    if model.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.exists() or not model.strip():
        raise ConfigurationError(
            f"model={model!r} is neither a folder nor a GGUF file on this machine. Give one that exists, "
            "or a model's name on the Hugging Face Hub, like 'HuggingFaceTB/SmolLM2-135M-Instruct'."
        )
    return model, {}
