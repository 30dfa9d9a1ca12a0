"""An executor for vLLM's real engine core that has no model but checks everything a model would rely on.

`CheckedExecutor` takes the place of the workers (`distributed_executor_backend=CheckedExecutor`). The
scheduler, the KV cache manager and the engine core's loop are vLLM's own; the executor keeps the state that
the model runner would keep, holds KV memory whose slots know their content, and samples tokens that depend on
the whole prefix. Whatever the scheduler gets wrong, a block too early freed, a stale token, a missing message
to the runner, shows as an error that names request, position and block, or as a wrong output token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from stream2llm_sdk.errors import MissingExtraError, UnsupportedFeatureError
from stream2llm_sdk.serving.simulator.clock import LatencyModel, StepFacts, VirtualClock
from stream2llm_sdk.serving.simulator.content import SamplingRule
from stream2llm_sdk.serving.simulator.kv_layout import group_layouts, kv_cache_specs
from stream2llm_sdk.serving.simulator.kv_memory import KVMemory, RunnerStateError
from stream2llm_sdk.serving.simulator.runner_state import (
    RunnerRequest,
    RunnerState,
    V1RunnerState,
    V2RunnerState,
)

try:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
except ImportError as error:
    raise MissingExtraError("vLLM", "cpu") from error

__all__ = ["CheckedExecutor", "KVTransfer"]

_DEFAULT_KV_MEMORY_BYTES = 1 << 30

_Computed = tuple[RunnerRequest, int, int | None]


class KVTransfer(Protocol):
    """The worker side of a KV connector, on checked KV memory.

    The three calls come where the model runner calls its connector: before the step changes anything, before
    the forward pass reads, and when the step is over.
    """

    def handle_preemptions(self, metadata: Any, memory: KVMemory) -> None:
        """Save what the coming step may overwrite."""

    def start_load(self, metadata: Any, memory: KVMemory) -> None:
        """Put back what the coming step reads."""

    def finish(self, metadata: Any, finished_request_ids: set[str]) -> Any:
        """The step's `KVConnectorOutput`, or None."""


class CheckedExecutor(Executor):  # type: ignore[misc]
    """Runs the steps of a real engine core without a model, checking them.

    Attributes that a test or a simulator may set after the engine was built:

    - `latency_model`: seconds per step; `clock` then advances by them.
    - `held_requests`: ids that must not be sampled for now; a token sampled for one of them is recorded in
      `sampled_while_held`.
    - `sampling_rule`: how tokens are sampled.
    - `kv_transfer`: the worker side of a KV connector.

    Raises a subclass of `KVCheckError` out of the engine's step when the scheduler does something wrong.
    """

    supports_pp = False

    memory: KVMemory
    runner: RunnerState

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """True: results come one step late, as from a device."""
        return True

    def _init_executor(self) -> None:
        if self.speculative_config is not None:
            raise UnsupportedFeatureError("the checked executor does not emulate speculative decoding")
        if self.parallel_config.world_size > 1:
            raise UnsupportedFeatureError(
                f"the checked executor stands for one device, not for {self.parallel_config.world_size}"
            )
        text_config = self.model_config.hf_text_config
        special = _special_token_ids(text_config)
        self.sampling_rule = SamplingRule(
            self.model_config.get_vocab_size(),
            special_token_ids=frozenset(special.values()),
            eos_token_id=special.get("eos_token_id"),
        )
        self.clock = VirtualClock()
        self.latency_model: LatencyModel | None = None
        self.kv_transfer: KVTransfer | None = None
        self.held_requests: set[str] = set()
        self.sampled_while_held: list[str] = []
        self.tokens_computed: Counter[str] = Counter()
        self.num_steps = 0
        self._pending: ModelRunnerOutput | None = None
        self._pending_tokens: list[_Computed] = []

    def expected_output(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """What a correct engine answers to `prompt_ids` with `num_tokens` tokens, greedily; see `SamplingRule`."""
        return self.sampling_rule.expected_output(prompt_ids, num_tokens)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One KV cache spec per attention layer of the model's configuration."""
        return [kv_cache_specs(self.vllm_config)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Any layout would do; this is the one that a GPU prefers."""
        return [["LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """Accepted and ignored: slots have no layout here."""

    def determine_available_memory(self) -> list[int]:
        """`kv_cache_memory_bytes` if given, else 1 GiB; `num_gpu_blocks_override` wins over both."""
        return [self.cache_config.kv_cache_memory_bytes or _DEFAULT_KV_MEMORY_BYTES]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Build the KV memory and the runner's state for the groups that vLLM decided on."""
        config = kv_cache_configs[0]
        self.memory = KVMemory(config.num_blocks, group_layouts(config))
        limits = (self.memory, self.scheduler_config.max_num_seqs, self.model_config.max_model_len)
        if self.vllm_config.use_v2_model_runner:
            self.runner = V2RunnerState(*limits)
        else:
            self.runner = V1RunnerState(*limits, async_scheduling=bool(self.scheduler_config.async_scheduling))

    def compile_or_warm_up_model(self) -> None:
        """Nothing to compile."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer for the one worker there is not: nothing but the supported tasks has an answer."""
        reply = [("generate",) if method == "get_supported_tasks" else None]
        return _done(reply) if non_block else reply

    def check_health(self) -> None:
        """Always healthy."""

    def shutdown(self) -> None:
        """Nothing to stop."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Compute and check one step; like a runner, returns None when tokens are to be sampled after it."""
        output = self._execute(scheduler_output)
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The output of the step that `execute_model` has just computed."""
        if grammar_output is not None:
            raise UnsupportedFeatureError("the checked executor does not emulate structured output")
        output, self._pending = self._pending, None
        if output is not None:
            self.runner.finish_step(self._pending_tokens)
        return _done(output) if non_block else output

    def _execute(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        if self._pending is not None:
            raise RunnerStateError("a step was started before the tokens of the one before were sampled")
        metadata, transfer = scheduler_output.kv_connector_metadata, self._transfer_for(scheduler_output)
        if transfer is not None:
            transfer.handle_preemptions(metadata, self.memory)
        self.runner.update(scheduler_output)
        if scheduler_output.new_block_ids_to_zero:
            self.memory.zero_blocks(scheduler_output.new_block_ids_to_zero)
        if scheduler_output.kv_cache_block_copies:
            self.memory.copy_blocks(scheduler_output.kv_cache_block_copies)
        if transfer is not None:
            transfer.start_load(metadata, self.memory)
        computed = self._forward(scheduler_output)
        transferred = transfer.finish(metadata, scheduler_output.finished_req_ids) if transfer else None
        if not computed:
            return ModelRunnerOutput.with_kv_conn_output_only(transferred) if transfer else EMPTY_MODEL_RUNNER_OUTPUT
        self._pending_tokens = computed
        self._pending = _model_runner_output(computed, transferred)
        return None

    def _forward(self, scheduler_output: Any) -> list[_Computed]:
        """Write, then check, then sample the whole batch: a layer writes all its KV before it attends."""
        if scheduler_output.scheduled_spec_decode_tokens:
            raise UnsupportedFeatureError("the checked executor does not emulate speculative decoding")
        spans = [
            self.runner.span(request_id, num_tokens)
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        ]
        for request, start, stop in spans:
            self.memory.write(request.table, request.row, start, stop)
        computed: list[_Computed] = []
        for request, start, stop in spans:
            self.memory.check(request.table, request.row, start, stop)
            self.tokens_computed[request.request_id] += stop - start
            computed.append((request, stop, self._sample(request, stop)))
        if spans:
            self._count_step(computed, spans)
        return computed

    def _sample(self, request: RunnerRequest, stop: int) -> int | None:
        if not self.runner.samples(request, stop):
            return None
        if request.request_id in self.held_requests:
            self.sampled_while_held.append(request.request_id)
        return self.sampling_rule.next_token(request.row.hash_of(stop))

    def _count_step(self, computed: list[_Computed], spans: list[tuple[RunnerRequest, int, int]]) -> None:
        self.num_steps += 1
        if self.latency_model is not None:
            num_sampled = sum(token_id is not None for _, _, token_id in computed)
            facts = StepFacts(self.num_steps, tuple((start, stop) for _, start, stop in spans), num_sampled)
            self.clock.advance(self.latency_model(facts))

    def _transfer_for(self, scheduler_output: Any) -> KVTransfer | None:
        if scheduler_output.kv_connector_metadata is None:
            return None
        if self.kv_transfer is None:
            raise UnsupportedFeatureError(
                "the engine has a KV connector, but the checked executor has no worker side for it; set its "
                "kv_transfer attribute"
            )
        return self.kv_transfer


def _special_token_ids(text_config: Any) -> dict[str, int]:
    """The configuration's BOS, EOS and padding ids; of several EOS ids the first counts."""
    special: dict[str, int] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(text_config, name, None)
        if isinstance(value, (list, tuple)):
            special.update({f"{name}[{index}]": int(token_id) for index, token_id in enumerate(value)})
            value = value[0] if value else None
        if value is not None:
            special[name] = int(value)
    return special


def _model_runner_output(computed: list[_Computed], transferred: Any) -> ModelRunnerOutput:
    request_ids = [request.request_id for request, _, _ in computed]
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[] if token_id is None else [token_id] for _, _, token_id in computed],
        kv_connector_output=transferred,
    )


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
