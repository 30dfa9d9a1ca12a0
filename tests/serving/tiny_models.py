"""Tiny model folders, made offline: deterministic by seed, each in a second or two.

Random weights are scaled so that the greedy token depends strongly on the whole prompt; a model that forgets
its context would hide every mistake in the KV cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
FIRST_ORDINARY_TOKEN_ID = len(SPECIAL_TOKENS)
SLIDING_WINDOW = 64
MAX_MODEL_LEN = 4096

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_HYBRID_LAYERS = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}


def make_llama_config(folder: Path) -> Path:
    """A two-layer Llama without weights, for an executor that needs none."""
    return _write_config(folder, "LlamaForCausalLM", "llama", {"num_hidden_layers": 2})


def make_hybrid_config(folder: Path) -> Path:
    """The same with four layers, sliding-window and full attention in turn, as in Gemma 3.

    It keeps Llama's name, because vLLM examines every new architecture once, at length; without weights only
    the kinds of layers matter.
    """
    return _write_config(folder, "LlamaForCausalLM", "llama", _HYBRID_LAYERS)


def make_llama(folder: Path, seed: int = 0) -> Path:
    """A six-layer Llama with random float32 weights, about a million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_COMMON,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=6,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    return _write_model(folder, _random_model(LlamaForCausalLM, config, seed))


def make_hybrid(folder: Path, seed: int = 0) -> Path:
    """A four-layer Gemma 3 with random float32 weights and a 64-token sliding window in every other layer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_COMMON,
        **_HYBRID_LAYERS,
        hidden_size=128,
        intermediate_size=256,
        query_pre_attn_scalar=32,
        initializer_range=0.2,
    )
    model = _random_model(Gemma3ForCausalLM, config, seed)
    with torch.no_grad():
        # As initialised it repeats its input: the embedding, which is also the output layer, outweighs the rest.
        model.model.embed_tokens.weight.mul_(0.1)
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.fill_(2.0)
            layer.self_attn.q_norm.weight.fill_(1.0)
            layer.self_attn.k_norm.weight.fill_(1.0)
    return _write_model(folder, model)


def _write_config(folder: Path, architecture: str, model_type: str, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 344,
        **_COMMON,
        **values,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(folder)
    return folder


def _random_model(model_class: Any, config: Any, seed: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).to(torch.float32)


def _write_model(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer: special tokens, the 256 bytes, and made-up merges up to the vocabulary."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    letters = "etaoinshrdlucmfw"
    pairs = [(first, second) for first in letters for second in letters]
    merges = pairs[: VOCAB_SIZE - len(vocab)]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.save_pretrained(folder)
