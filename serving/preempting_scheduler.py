"""How victims lose their KV: recomputed later or swapped to host memory, by what each way costs for the victim."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from stream2llm_sdk.serving.adaptive import Adaptive
from stream2llm_sdk.serving.calibration import hardware_name
from stream2llm_sdk.serving.cost_correction import CostTerm, OnlineCorrection
from stream2llm_sdk.serving.cost_model import (
    UNMEASURED_CPU,
    UNMEASURED_GPU,
    CostModel,
    default_cost_model,
    load_cost_model,
    model_flops,
)
from stream2llm_sdk.serving.lcp import TokenArray
from stream2llm_sdk.serving.ordered_scheduler import OrderedScheduler
from stream2llm_sdk.serving.preemption import (
    InvalidationHistory,
    PreemptionDecision,
    PreemptionMode,
    VictimFacts,
    decide,
)
from stream2llm_sdk.serving.streaming_prompt import Resumption, StreamingPrompt
from stream2llm_sdk.serving.swap import Stream2LLMSwapConnector
from stream2llm_sdk.trail import EventType

__all__ = ["PreemptingScheduler"]

_MIN_MEASURED_TOKENS = 64  # shorter steps tell little about prefill


class PreemptingScheduler(OrderedScheduler):
    """Preempts by recompute or swap. Swap needs the connector of `stream2llm_sdk.serving.swap`; without it every
    victim is recomputed."""

    connector: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.preemption_mode = PreemptionMode.parse(self.options.get("preemption_mode") or "cost")
        self.swap: Stream2LLMSwapConnector | None = None
        if isinstance(self.connector, Stream2LLMSwapConnector):
            self.swap = self.connector
            self.swap.num_held_back = self._num_held_back
        self.kv.swap = self.swap
        self.costs = OnlineCorrection(self._cost_model(vllm_config), frozen=bool(self.options.get("frozen_costs")))
        self.invalidations = InvalidationHistory()
        self._may_swap = True
        # Of requests that did not come through the SDK: the tokens that they had when they lost their KV.
        self._lost: dict[str, int] = {}
        # Blocks that the plan in force needs beyond the free ones: they are taken from what victims give back.
        self._num_blocks_short = 0
        self._decision: PreemptionDecision | None = None
        self._steps_under_way: deque[tuple[float, list[tuple[int, int]]]] = deque()
        self._step_ended_s = 0.0
        self._num_copies_seen = 0

    def _cost_model(self, vllm_config: Any) -> CostModel:
        if path := self.options.get("cost_model"):
            measured = load_cost_model(path)
            hardware = hardware_name(vllm_config.parallel_config.world_size)
            if mismatch := measured.mismatch(hardware, str(vllm_config.model_config.model)):
                logging.getLogger("stream2llm_sdk").warning("%s", mismatch)
            return measured
        config = vllm_config.model_config.hf_text_config
        per_token, per_pair = model_flops(config)
        page_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) / group.kv_cache_spec.block_size
            for group in self.kv_cache_config.kv_cache_groups
        )
        is_cpu = vllm_config.device_config.device_type == "cpu"
        return default_cost_model(
            page_bytes,
            flops_per_token=per_token,
            flops_per_pair=per_pair,
            device=UNMEASURED_CPU if is_cpu else UNMEASURED_GPU,
            model=str(vllm_config.model_config.model),
        )

    def snapshot(self) -> dict[str, Any]:
        policy = self.scheduling_policy
        host = {}
        if self.swap is not None:
            pool = self.swap.pool
            host = {"num_host_blocks": pool.num_blocks, "num_host_blocks_used": pool.num_blocks - pool.num_free}
        switches = {}
        if isinstance(policy, Adaptive):
            switches = {"policy": policy.current.name, "num_policy_switches": policy.num_switches}
            if policy.last_switch is not None:
                switches["last_switch_reason"] = policy.last_switch.reason
        return {
            **super().snapshot(),
            "policy": policy.name,
            **switches,
            **host,
            "cost_factors": {str(term): self.costs.factor(term) for term in CostTerm},
        }

    def _num_held_back(self, request_id: str) -> int:
        prompt = self.prompts.get(request_id)
        return 1 if prompt is not None and prompt.is_open else 0

    # ---- a preemption -------------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        facts = self._victim_facts(request)
        decision = decide(self.costs, facts, self.preemption_mode, fits_host_pool=self.swap is not None)
        if decision.mode is PreemptionMode.SWAP and not self._swap_out(request):
            decision = PreemptionDecision(PreemptionMode.RECOMPUTE, decision.recompute_s, decision.swap_s)
        self._num_blocks_short = max(0, self._num_blocks_short - self.kv.num_reclaimable(request.request_id))
        self._decision = decision
        if request.request_id not in self.prompts:
            self._lost[request.request_id] = max(facts.num_tokens, self._lost.get(request.request_id, 0))
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._decision = None

    def _is_guarded(self, request: Request, prompt: StreamingPrompt | None) -> bool:
        """Whether it lost its KV before and has not got further since."""
        if prompt is not None:
            return prompt.is_guarded(request.num_computed_tokens)
        return self._lost.get(request.request_id, 0) > request.num_computed_tokens

    def _swap_out(self, request: Request) -> bool:
        return self._may_swap and self.swap is not None and self.swap.swap_out(request)

    @contextmanager
    def _kept_on_host(self, request_ids: Collection[str]) -> Iterator[None]:
        """Victims meanwhile take no host memory from the copies of these requests: a plan counts on them."""
        if self.swap is None:
            yield
            return
        self.swap.pool.kept = request_ids
        try:
            yield
        finally:
            self.swap.pool.kept = ()

    def _victim_facts(self, request: Request) -> VictimFacts:
        request_id, num_tokens = request.request_id, min(request.num_computed_tokens, request.num_tokens)
        prompt = self.prompts.get(request_id)
        survival = 1.0
        if prompt is not None and prompt.is_prompt_update and prompt.is_open:
            survival = self.invalidations.survival(request_id, prompt.group, 1.0)
        num_taken = self._num_blocks_short * self.block_size
        num_cached = max(0, self.kv.num_findable(request_id) - num_taken)
        return VictimFacts(
            num_tokens=num_tokens,
            num_tokens_cached_again=min(num_cached, num_tokens),
            survival=survival,
            num_tokens_copied=min(num_tokens, self.kv.num_on_host(request)),
        )

    def _record_preemption(self, request: Request, num_tokens: int, num_blocks: int) -> None:
        decision = self._decision
        assert decision is not None
        swapped = decision.mode is PreemptionMode.SWAP
        self.trail.state(
            request.request_id,
            EventType.PREEMPTED_SWAP if swapped else EventType.PREEMPTED_RECOMPUTE,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            predicted_s=decision.swap_s if swapped else decision.recompute_s,
        )

    # ---- what changes what a copy is worth ----------------------------------------------------------------------

    def _apply(self, request: Request, prompt: StreamingPrompt, new: TokenArray, lcp: int, final: bool) -> int:
        if self.swap is not None:
            self.swap.truncate(request.request_id, lcp)
        if prompt.is_prompt_update:
            num_computed = request.num_computed_tokens or self.kv.num_loadable(request)
            self.invalidations.record(request.request_id, prompt.group, lcp=lcp, num_computed=num_computed)
        return super()._apply(request, prompt, new, lcp, final)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.invalidations.forget(request.request_id)
        self._lost.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    # ---- coming back --------------------------------------------------------------------------------------------

    def _record_admission(self, request: Request, num_computed: int) -> None:
        prompt = self.prompts.get(request.request_id)
        num_loaded = 0 if self.swap is None else self.swap.num_loaded.get(request.request_id, 0)
        if prompt is not None:
            prompt.num_tokens_loaded += num_loaded
            if prompt.num_tokens_lost:
                prompt.resumption = Resumption(
                    began_s=self.now_s(),
                    target=prompt.num_tokens_lost,
                    num_loaded=num_loaded,
                    num_found=num_computed - num_loaded,
                )
                prompt.num_tokens_lost = 0
        super()._record_admission(request, num_computed - num_loaded)

    def _record_step(self, output: SchedulerOutput) -> None:
        super()._record_step(output)
        self._num_blocks_short = 0
        if self.swap is not None:
            self.swap.num_loaded.clear()
            self._observe_copies(self.swap)
            if self.preemption_mode is PreemptionMode.COST:
                self._note_step(output)

    # ---- what things really cost --------------------------------------------------------------------------------

    def _note_step(self, output: SchedulerOutput) -> None:
        if not output.total_num_scheduled_tokens:
            return
        parts = [
            (num_tokens, self.requests[request_id].num_computed_tokens - num_tokens)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        self._steps_under_way.append((self.now_s(), parts))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._steps_under_way and scheduler_output.total_num_scheduled_tokens:
            began_s, parts = self._steps_under_way.popleft()
            now_s = self.now_s()
            # With two steps in flight the second one begins when the first has ended.
            measured_s = now_s - max(began_s, self._step_ended_s)
            self._step_ended_s = now_s
            if scheduler_output.total_num_scheduled_tokens >= _MIN_MEASURED_TOKENS:
                self.costs.observe(CostTerm.RECOMPUTE, self.costs.model.step_s(parts), measured_s)
        return result

    def _observe_copies(self, swap: Stream2LLMSwapConnector) -> None:
        for sample in swap.take_samples():
            self._num_copies_seen += 1
            if self._num_copies_seen == 1:
                continue  # the first copy also sets up what copies need
            out = sample.direction == "out"
            predicted = self.costs.model.swap_out_s if out else self.costs.model.swap_in_s
            term = CostTerm.SWAP_OUT if out else CostTerm.SWAP_IN
            self.costs.observe(term, predicted(sample.num_tokens), sample.elapsed_s)
