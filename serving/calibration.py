"""Measures a cost model on the machine it runs on: prefills on a real engine core, and copies of its real KV blocks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError, EngineError, EngineStartError
from stream2llm_sdk.files import require_writable
from stream2llm_sdk.main_guard import require_main_guard
from stream2llm_sdk.serving import vllm_start
from stream2llm_sdk.serving.cost_curve import (
    CostCurve,
    FitQuality,
    Sample,
    fit_curve,
    fit_quality,
    fit_recompute,
    num_pairs,
)
from stream2llm_sdk.serving.cost_model import CostModel

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = ["CalibrationReport", "Progress", "calibrate", "hardware_name"]

# (share of the time that has passed, 0 to 1; what is being done)
Progress = Callable[[float, str], None]

_MIN_BUDGET_S = 5.0
_PREFILL_SHARE = 0.8
_SHORTEST_PREFILL = 16
_ALWAYS_MEASURED = 3
_MIN_REPEATS, _MAX_REPEATS = 2, 5
_MAX_HOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """A measured cost model and how far it can be trusted.

    Attributes:
        model: the cost model, as written to the file.
        fit: the quality of the fit for `recompute`, `swap_out` and `swap_in`.
        longest_prefill: tokens of the longest prompt measured; beyond it the model extrapolates.
        longest_copy: tokens of the largest copy measured.
        max_model_len: the longest prompt and answer that the engine was started for.
        elapsed_s: seconds that all of it took.
        samples: what was measured, by the names of `fit`: whole prompts, and copies each way.
    """

    model: CostModel
    fit: Mapping[str, FitQuality]
    longest_prefill: int
    longest_copy: int
    max_model_len: int
    elapsed_s: float
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict, repr=False)

    @property
    def is_good(self) -> bool:
        """Whether every part of it fits."""
        return all(quality.is_good for quality in self.fit.values())

    def plot(self) -> Plot:
        """The fitted curves with what was measured, up to the longest prompt of the engine.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.display.cost_plots import cost_plot

        return cost_plot(self.model, max(2, self.max_model_len), self.samples)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.cost_view import calibration_html

        return calibration_html(self)


def calibrate(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    budget_s: float = 240.0,
    progress: Progress | None = None,
    **engine_args: Any,
) -> CalibrationReport:
    """Measures the costs of `model` on this machine and writes them to the JSON file `out`.

    The engine core runs in this process, with the settings of `Stream2LLMEngine` but without prefix caching. Prompt
    lengths grow in powers of two up to the model's length, or until the time for them is used up; then every length is
    repeated. Each step of a long prompt is a measurement of its own, of a chunk behind a context: these tell what
    attention to the context costs. Then blocks of the KV cache are copied to the host and back, more and more.

    Args:
        model: a folder or a hub name, as vLLM takes it.
        out: the file to write.
        budget_s: seconds for everything, the engine's start included. The start is not cut short, and a quarter of
            them is left to measure in any case.
        progress: called often with the share of the time used and a line that says what is being done.
        engine_args: of vLLM's `EngineArgs`, as the engine to be modelled gets them. Left out, `max_model_len` is the
            longest that fits this machine.

    Raises:
        ConfigurationError: the file could not be written, the time is too short, or vLLM refuses an argument.
        UnsupportedFeatureError: the model's KV cannot be swapped.
        MissingExtraError: vLLM is not installed.
        EngineStartError: the engine did not start.
        EngineError: it failed later, for instance for lack of memory.
    """
    if not budget_s >= _MIN_BUDGET_S:
        raise ConfigurationError(f"budget_s must be {_MIN_BUDGET_S:.0f} or more, got {budget_s}")
    require_writable(Path(out), "out")
    require_main_guard("calibrate")
    clock = _Clock(budget_s, progress)
    clock.report("starting the engine")
    with _Core(os.fspath(model), engine_args) as core:
        core.check_supported()
        try:
            prefills, chunks = _measure_prefills(core, clock, clock.until(_PREFILL_SHARE))
            outs, ins = _measure_copies(core, clock)
        except RuntimeError as error:
            raise EngineError(f"the engine failed while it was measured: {error}") from error
        hardware, max_model_len = hardware_name(core.num_devices), core.max_model_len
    clock.report("fitting")
    cost_model, fit = _fit(prefills, chunks, outs, ins)
    cost_model = replace(cost_model, hardware=hardware, model=os.fspath(model))
    cost_model.save(out, fit=fit)
    clock.finish()
    return CalibrationReport(
        model=cost_model,
        fit=fit,
        longest_prefill=max(sample.num_tokens for sample in prefills),
        longest_copy=max(sample.num_tokens for sample in outs),
        max_model_len=max_model_len,
        elapsed_s=clock.elapsed_s,
        samples={"recompute": tuple(prefills), "swap_out": tuple(outs), "swap_in": tuple(ins)},
    )


def hardware_name(num_devices: int = 1) -> str:
    """The name of the GPUs that vLLM would use here, with their number if there are several, or of the processor."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _processor_name()
    name = str(current_platform.get_device_name())
    return name if num_devices == 1 else f"{num_devices}x {name}"


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine() or "unknown processor"


class _Clock:
    """The time that calibration may take, and who is told of it."""

    def __init__(self, budget_s: float, progress: Progress | None) -> None:
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        self._progress = progress

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def left_s(self) -> float:
        return self._budget_s - self.elapsed_s

    def until(self, share: float) -> float:
        """Seconds since the start at which `share` of what is left now, a quarter at least, will have passed."""
        return self.elapsed_s + max(self.left_s, self._budget_s / 4) * share

    def report(self, line: str) -> None:
        if self._progress is not None:
            self._progress(min(0.99, self.elapsed_s / self._budget_s), line)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(1.0, "done")


# ---- what is measured ---------------------------------------------------------------------------------------------


def _lengths(longest: int) -> list[int]:
    lengths = [1 << power for power in range(_SHORTEST_PREFILL.bit_length() - 1, longest.bit_length() + 1)]
    return [length for length in lengths if length < longest] + [longest]


def _measure_prefills(core: _Core, clock: _Clock, deadline_s: float) -> tuple[list[Sample], list[Sample]]:
    """Whole prompts from position 0, and single steps of them.

    The first prompt of each length only warms up. A length is begun only if there is time for it and its repeats, and
    as much for those of the shorter ones. What it will take is foreseen from the two before it: they grow between
    linearly and with the square of the tokens.
    """
    lengths = _lengths(core.max_model_len - 1)
    took_s: dict[int, float] = {}
    for length in lengths:
        if len(took_s) >= _ALWAYS_MEASURED:
            *_, earlier, before = took_s
            ratio = length / before
            expected_s = took_s[before] * min(max(took_s[before] / took_s[earlier], ratio), ratio**2)
            if clock.elapsed_s + 2 * (1 + _MIN_REPEATS) * expected_s > deadline_s:
                break
        clock.report(f"prefill of {length} tokens, to warm up")
        took_s[length] = core.prefill(length)[0].seconds
    prefills: list[Sample] = []
    chunks: list[Sample] = []
    for repeat in range(_MAX_REPEATS):
        for length in took_s:
            if repeat >= _MIN_REPEATS and clock.elapsed_s + took_s[length] > deadline_s:
                continue
            clock.report(f"prefill of {length} tokens, {repeat + 1} of {_MAX_REPEATS}")
            prefill, steps = core.prefill(length)
            prefills.append(prefill)
            chunks += steps
    return prefills, chunks


def _measure_copies(core: _Core, clock: _Clock) -> tuple[list[Sample], list[Sample]]:
    """Copies out and in, of numbers of blocks in powers of two; the first round only warms up."""
    most = core.num_blocks_to_copy
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    outs: list[Sample] = []
    ins: list[Sample] = []
    for repeat in range(-1, _MAX_REPEATS):
        clock.report(f"copies of 1 to {most} KV blocks, {repeat + 1} of {_MAX_REPEATS}")
        if repeat >= _MIN_REPEATS and clock.left_s <= 0:
            break
        for count, out_s, in_s in core.copy(counts, seed=repeat):
            if repeat >= 0:
                num_tokens = core.num_tokens_of(count)
                outs.append(Sample(num_tokens, out_s))
                ins.append(Sample(num_tokens, in_s))
    core.end_copies()
    return outs, ins


def _fit(
    prefills: Sequence[Sample], chunks: Sequence[Sample], outs: Sequence[Sample], ins: Sequence[Sample]
) -> tuple[CostModel, dict[str, FitQuality]]:
    """A cost model without names, and how well it holds."""
    recompute, seconds_per_pair = fit_recompute(prefills, chunks)
    model = CostModel("", "", recompute, fit_curve(outs), fit_curve(ins), seconds_per_pair)

    def fit_prefills(samples: Sequence[Sample]) -> Callable[[Sample], float]:
        curve, per_pair = fit_recompute(samples, chunks)
        return lambda sample: curve(sample.num_tokens) + per_pair * num_pairs(sample.num_tokens, sample.start)

    def fit_copies(samples: Sequence[Sample]) -> Callable[[Sample], float]:
        curve: CostCurve = fit_curve(samples)
        return lambda sample: curve(sample.num_tokens)

    return model, {
        "recompute": fit_quality(fit_prefills, prefills),
        "swap_out": fit_quality(fit_copies, outs),
        "swap_in": fit_quality(fit_copies, ins),
    }


# ---- the engine core ----------------------------------------------------------------------------------------------


class _Core:
    """vLLM's engine core in this process, one request at a time. Use as a context manager."""

    def __init__(self, model: str, engine_args: Mapping[str, Any]) -> None:
        vllm_start.quieten()
        vllm_start.require_vllm()
        from vllm import envs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        # A core that ran in this process before leaves its view of the environment behind.
        envs.disable_envs_cache()
        try:
            config = vllm_start.vllm_arguments(model, "FCFS", _core_arguments(engine_args)).create_engine_config()
            self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        except (ValueError, TypeError, OSError) as error:
            raise ConfigurationError(f"vLLM cannot serve {model!r}: {error}") from error
        except Exception as error:
            raise EngineStartError(
                f"the engine did not start: {error}. Set VLLM_LOGGING_LEVEL=INFO to see its logs"
            ) from error
        self._config = self._core.vllm_config
        self._kv = self._core.scheduler.kv_cache_config
        self._num_prefills = 0
        self._rng = random.Random(0)

    def __enter__(self) -> _Core:
        return self

    def __exit__(self, *exc_info: object) -> None:
        from vllm import envs

        self._core.shutdown()
        envs.disable_envs_cache()

    def check_supported(self) -> None:
        """Raises `UnsupportedFeatureError` for a model whose KV cannot be swapped: there is no choice to be made."""
        from stream2llm_sdk.serving.swap.kv_regions import check_supported

        check_supported(self._config, self._kv)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def num_devices(self) -> int:
        return int(self._config.parallel_config.world_size)

    @property
    def num_blocks_to_copy(self) -> int:
        """As many blocks as the longest request holds, where the machine has them and the host memory for them."""
        from stream2llm_sdk.serving.swap.kv_regions import block_bytes

        longest = self.max_model_len * self._num_groups // self._block_size
        most = min(self._kv.num_blocks - 1, longest, _MAX_HOST_BYTES // block_bytes(self._kv))
        return max(1, int(most))

    def num_tokens_of(self, num_blocks: int) -> int:
        """Tokens whose KV so many blocks hold, over all groups of layers."""
        return max(1, num_blocks * self._block_size // self._num_groups)

    def prefill(self, num_tokens: int) -> tuple[Sample, list[Sample]]:
        """Prefills a random prompt; returns the whole and its steps."""
        scheduler, request_id = self._core.scheduler, f"prefill-{self._num_prefills}"
        self._num_prefills += 1
        self._core.add_request(*self._core.preprocess_add_request(self._request(request_id, num_tokens)))
        steps: list[Sample] = []
        start, total_s = 0, 0.0
        while (request := scheduler.requests.get(request_id)) is not None:
            began_s = time.perf_counter()
            _, executed = self._core.step_fn()
            self._core.post_step(executed)
            took_s = time.perf_counter() - began_s
            total_s += took_s
            end = num_tokens if request_id not in scheduler.requests else int(request.num_computed_tokens)
            if end > start:
                steps.append(Sample(end - start, took_s, start))
            start = end
        while scheduler.has_requests():  # the workers are told of the end in a step of its own
            self._core.step_fn()
        return Sample(num_tokens, total_s), steps

    def copy(self, counts: Sequence[int], seed: int) -> list[tuple[int, float, float]]:
        """(blocks, seconds out, seconds in) for each of the counts; of several devices, the slowest."""
        by_device = self._on_workers(_time_copies, (list(counts), seed))
        return [
            (count, max(device[index][0] for device in by_device), max(device[index][1] for device in by_device))
            for index, count in enumerate(counts)
        ]

    def end_copies(self) -> None:
        self._on_workers(_end_copies)

    @property
    def _block_size(self) -> int:
        return int(self._config.cache_config.block_size)

    @property
    def _num_groups(self) -> int:
        return len(self._kv.kv_cache_groups)

    def _on_workers(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        return list(self._core.model_executor.collective_rpc(function, args=args))

    def _request(self, request_id: str, num_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        vocabulary = self._config.model_config.get_vocab_size()
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[self._rng.randrange(vocabulary) for _ in range(num_tokens)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def _core_arguments(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Steps one after another, so that each can be timed, and nothing found in a cache."""
    return {
        "max_model_len": -1,  # the longest that fits
        **{name: value for name, value in engine_args.items() if value is not None},
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "scheduler_cls": None,
    }


# ---- in the workers: the functions are sent to them -----------------------------------------------------------------


def _time_copies(worker: Any, counts: Sequence[int], seed: int) -> list[tuple[float, float]]:
    """(seconds out, seconds in) for each number of blocks, taken at random as in a KV cache that has been in use."""
    copier = getattr(worker, "_stream2llm_copier", None)
    if copier is None:
        copier = worker._stream2llm_copier = _copier(worker, max(counts))
    num_blocks = worker.model_runner.kv_cache_config.num_blocks
    rng = random.Random(seed)
    timings = []
    for count in counts:
        blocks = rng.sample(range(1, num_blocks), count)
        seconds = []
        for copy, pairs in (
            (copier.copy_out, [(block, host) for host, block in enumerate(blocks)]),
            (copier.copy_in, list(enumerate(blocks))),
        ):
            timer = copy(pairs)
            copier.synchronize()
            seconds.append(float(timer.elapsed_s()))
        timings.append((seconds[0], seconds[1]))
    return timings


def _end_copies(worker: Any) -> None:
    copier = worker.__dict__.pop("_stream2llm_copier", None)
    if copier is not None:
        copier.close()


def _copier(worker: Any, num_host_blocks: int) -> Any:
    from stream2llm_sdk.serving.swap.block_copies import BlockCopier
    from stream2llm_sdk.serving.swap.kv_regions import region_tensors, regions

    config = worker.model_runner.kv_cache_config
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {region.layer: layers[region.layer].kv_cache for region in regions(config)}
    return BlockCopier(region_tensors(config, caches), config.num_blocks, num_host_blocks, block_dims=0)
