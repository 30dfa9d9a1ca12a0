"""Which sampling parameters a streaming prompt can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

__all__ = ["make_sampling_params", "verify_for_model"]

DEFAULT_MAX_TOKENS = 256

# Parameter, the value that means "off", and why it is refused.
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("n", (1, None), "one request gives one answer; open one stream for each answer"),
    ("prompt_logprobs", (None,), "a prompt that still changes has no final log-probabilities"),
    ("prompt_logprob_token_ids", (None,), "a prompt that still changes has no final log-probabilities"),
    ("structured_outputs", (None,), "a grammar is not carried over when a prompt changes"),
    ("skip_reading_prefix_cache", (None, False), "set enable_prefix_caching=False on the engine instead"),
)

_CHECKED = ("max_tokens", "seed", *(name for name, *_ in _UNSUPPORTED))


def make_sampling_params(sampling: Mapping[str, Any] | SamplingParams | None, *, on_cpu: bool) -> SamplingParams:
    """vLLM's `SamplingParams` of a mapping of its fields, or a checked copy of one.

    Left out, the answer is greedy and at most 256 tokens long.

    Raises:
        ConfigurationError: an unknown field, or a value that vLLM refuses.
        UnsupportedFeatureError: a parameter that streaming prompts cannot have.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if sampling is None or isinstance(sampling, Mapping):
        fields = {"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS, **(sampling or {})}
        _check(fields, on_cpu=on_cpu)
        try:
            params = SamplingParams(**fields)
        except Exception as error:  # vLLM's own validation errors have no common base with Python's
            raise ConfigurationError(f"sampling={dict(sampling or {})!r}: {error}") from error
    elif isinstance(sampling, SamplingParams):
        _check({name: getattr(sampling, name) for name in _CHECKED}, on_cpu=on_cpu)
        params = sampling.clone()
    else:
        raise ConfigurationError(f"sampling must be a mapping or SamplingParams, not {type(sampling).__name__}")
    params.output_kind = RequestOutputKind.DELTA
    _check_types(params)
    return params


def verify_for_model(params: SamplingParams, processor: InputProcessor) -> None:
    """vLLM's own checks that need the model: token ids in its vocabulary, as many log-probabilities as it gives.

    Raises:
        ConfigurationError: a value that this model cannot have.
    """
    try:
        params.verify(
            processor.model_config,
            processor.speculative_config,
            processor.structured_outputs_config,
            processor.tokenizer,
        )
    except Exception as error:  # vLLM's own validation errors have no common base with Python's
        raise ConfigurationError(f"sampling parameters: {error}") from error


def _check_types(params: SamplingParams) -> None:
    """vLLM sends the parameters to its core as they are; a field of another type would end the core's input thread,
    and with it every request."""
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    try:
        MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    except Exception as error:
        raise ConfigurationError(f"sampling parameters: {error}") from error


def _check(fields: Mapping[str, Any], *, on_cpu: bool) -> None:
    for name, off, why in _UNSUPPORTED:
        value = fields.get(name)
        if value not in off:
            raise UnsupportedFeatureError(f"{name}={value!r} is not supported for streaming prompts: {why}")
    if on_cpu and (seed := fields.get("seed")) is not None:
        raise UnsupportedFeatureError(
            f"seed={seed!r} is not supported on the CPU: vLLM's CPU generator cannot skip the draws of a "
            "chunked prefill. Leave the seed out, or use temperature=0"
        )
    max_tokens = fields["max_tokens"]
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigurationError(f"max_tokens={max_tokens!r}: give a number of tokens, at least 1")
