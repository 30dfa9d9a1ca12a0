"""Converts a GGUF file of a Llama model to a Hugging Face folder, in a process of its own.

Run as `python conversion.py GGUF FOLDER`. Prints "step: ..." lines; a failure is a traceback and a non-zero exit
status. Imports nothing of this package, so that it runs by its path.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

__all__ = ["convert"]


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes the model in bfloat16 with its tokenizer and chat template into `folder`.

    Raises:
        ValueError: the file is not a complete Llama model.
    """
    _say("importing transformers")
    import gguf
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # transformers parses the file, a hundred thousand strings, anew for the tokenizer, for the configuration and
    # for the weights, and builds the map of tensor names for every module. Once each is enough.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    _split_digits(tokenizer)
    _say("reading the weights")
    model = _load_model(gguf_file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    _say("writing the model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_model(gguf_file: Path) -> Any:
    import torch
    from transformers import GgufConfig, LlamaForCausalLM

    model, loaded = LlamaForCausalLM.from_pretrained(
        str(gguf_file.parent),
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[kind]:
            raise ValueError(f"{gguf_file.name} does not fit its model: {kind} {sorted(loaded[kind])[:5]}")
    # The weights are plain now; saved as quantized, they would not load without gguf.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _split_digits(tokenizer: Any) -> None:
    """Restores SmolLM's own pre-tokenizer, which the file names ("smollm") and transformers does not apply: digits
    are single, and white space before them is not split off."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def _say(step: str) -> None:
    print(f"step: {step}", flush=True)  # noqa: T201 - read by the parent process


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
