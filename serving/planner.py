"""Phase 1 of a step: who gets how many tokens, and whose KV has to go for it. Planning changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.serving.kv_blocks import CacheHit, KVBlocks
from stream2llm_sdk.serving.victims import VictimOrder

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stream2llm_sdk.serving.fair_share import BlockShares

__all__ = ["Candidate", "Limits", "Plan", "Planner"]


@dataclass(slots=True)
class Candidate:
    """One request as the planner sees it.

    Attributes:
        request: vLLM's request.
        key: its place in the order: smaller is served first, and no two requests have the same.
        num_wanted: tokens that it could use now, had it no limit and no cache hit; 0 for an idle stream.
        num_held_back: last prompt tokens that must not be computed yet (1 while the prompt is open).
        is_running: whether vLLM runs it.
        is_ready: whether it may be scheduled now.
        needs_slot: whether admitting it takes one of the engine's request slots.
        frees_slot: whether preempting it returns a slot.
        takes_one: whether it decodes and wants one token, as most do.
        is_idle: an open stream that waits for its next chunk.
        is_guarded: it lost its KV before and has not got past that point yet.
        tenant: who it belongs to.
        completion_s: when its prompt is expected to be complete, on the monotonic clock.
        admission: its number in the order of admission.
        rank: its place among those that hold KV, set by the planner when it looks for victims.

    What stands behind `takes_one` is asked of those only whose KV may be taken; the tenant, of all where there are
    several.
    """

    request: Request
    key: tuple[Any, ...]
    num_wanted: int
    num_held_back: int
    is_running: bool
    is_ready: bool
    needs_slot: bool
    frees_slot: bool
    takes_one: bool = False
    is_idle: bool = False
    is_guarded: bool = False
    tenant: str = ""
    completion_s: float = 0.0
    admission: int = 0
    rank: int = 0


@dataclass(slots=True)
class Limits:
    """What one step may use.

    Attributes:
        num_tokens: the step's token budget.
        num_tokens_per_prefill: longest prefill chunk of one request; 0 for no limit.
        num_open_tokens: most tokens of prompts that are open; 0 for no limit.
        defers_open: whether they get none at all where a complete one ends its prefill, whose first token would wait
            for theirs.
        num_slots: free request slots.
        num_running: requests that run.
        watermark_blocks: blocks that stay free when a waiting request is admitted beside running ones.
        lookahead_tokens: slots that speculative decoding wants behind each request.
        shares: the blocks due to each tenant, where there are several.
    """

    num_tokens: int
    num_tokens_per_prefill: int
    num_slots: int
    num_running: int
    watermark_blocks: int
    lookahead_tokens: int
    shares: BlockShares | None = None
    num_open_tokens: int = 0
    defers_open: bool = False


@dataclass(slots=True)
class Plan:
    """The outcome of planning.

    Attributes:
        num_tokens: tokens by request id, in the order of rank.
        admitted: those of them that do not run yet.
        victims: whose KV goes, in the order of eviction.
        is_forced: whether nobody could have been served by the rules, so that one takes what it needs from whoever
            has it.
        num_blocks: blocks that it takes.
        num_blocks_short: those of them beyond the ones that were free.
        nothing_to_compute: requests of which the prefix cache turned out to hold all that may be computed now.
        trimmed: requests that got less than they wanted.
        defers_open: whether open prompts get nothing, because a complete one ends its prefill.
    """

    num_tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    victims: list[Request] = field(default_factory=list)
    nothing_to_compute: list[Request] = field(default_factory=list)
    trimmed: set[str] = field(default_factory=set)
    defers_open: bool = False
    is_forced: bool = False
    num_blocks: int = 0
    num_blocks_short: int = 0

    def limit(self, request_id: str, num_wanted: int) -> int:
        """How many of the tokens that a request wants the plan lets it have. One that got all that it wanted when the
        plan was made is not held to the number: what it wants may have changed with the prefix cache."""
        if request_id in self.num_tokens and request_id not in self.trimmed:
            return num_wanted
        return min(num_wanted, self.num_tokens.get(request_id, 0))

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.plan_view import plan_html

        return plan_html(self)


Holders = Callable[[], Iterable[Candidate]]
"""Gives the requests whose KV may be taken now. Called at most once a plan, and only when memory is short."""


class Planner:
    """Walks the requests once in the policy's order and accounts for tokens, blocks and slots.

    A request that lacks blocks takes them from holders that come later in the order, or that are idle; never from
    one that the plan already serves. What is at the top of the order can take everything else, so it always makes
    progress. A holder that was preempted before and has not got further since loses its KV only where nobody would
    be served otherwise.

    Where the rules serve nobody (what is first waits for the place of one that waits for its memory), the first in the
    order that can gets a place and memory from whoever has them.
    """

    def __init__(self, kv: KVBlocks, victim_order: VictimOrder) -> None:
        self._kv = kv
        self._victim_order = victim_order

    def plan(self, candidates: Iterable[Candidate], holders: Holders, limits: Limits, plan: Plan | None = None) -> Plan:
        """The plan of one step. `candidates` come in the order in which they are to be served; no more of them are
        asked for than can be. `plan`, if given, is filled while they are; it may serve some already, which run, come
        first and need nobody's memory."""
        return _Walk(self._kv, self._victim_order, holders, limits, Plan() if plan is None else plan).run(candidates)


class _Walk:
    """The state of one planning pass."""

    def __init__(self, kv: KVBlocks, victim_order: VictimOrder, holders: Holders, limits: Limits, plan: Plan) -> None:
        self.kv = kv
        self.limits = limits
        self.plan = plan
        self.num_tokens = limits.num_tokens - sum(plan.num_tokens.values())
        self.num_open_tokens = limits.num_open_tokens or limits.num_tokens
        self.num_slots = limits.num_slots
        self.num_free = kv.num_free - plan.num_blocks
        self.num_running = limits.num_running
        self._admits = False
        self._victim_order = victim_order
        self._all_holders = holders
        self._holders: list[Candidate] | None = None
        self._evicted: set[str] = set()

    def run(self, candidates: Iterable[Candidate]) -> Plan:
        served, evicted = self.plan.num_tokens, self._evicted
        tables, block_size = self.kv.plain_tables
        lookahead = self.limits.lookahead_tokens
        stuck: list[Candidate] = []
        num_decoding = 0  # tokens of those that decode, not taken from the budget yet
        budget = self.num_tokens
        takes_blocks = block_size and not lookahead and self.limits.shares is None
        watermark = self.limits.watermark_blocks
        for candidate in candidates:
            request = candidate.request
            request_id = request.request_id
            if candidate.takes_one and request_id not in evicted:  # decodes: most of what there is, and nearly free
                has_room = request.num_computed_tokens + lookahead < len(tables.get(request_id, ())) * block_size
                if not has_room and takes_blocks and self.num_free > (watermark if self._admits else 0):
                    has_room = True
                    self.num_free -= 1
                    self.plan.num_blocks += 1
                if has_room:
                    served[request_id] = 1
                    num_decoding += 1
                    if num_decoding >= budget:
                        break
                    continue
            if candidate.is_ready and request_id not in evicted:
                self.num_tokens -= num_decoding
                num_decoding = 0
                self._consider(candidate)
                budget = self.num_tokens
                if budget <= 0:
                    break
                if not served:
                    stuck.append(candidate)
        if not served:
            self._force(stuck)
        self.plan.num_blocks_short = max(0, self.plan.num_blocks - self.kv.num_free)
        return self.plan

    def _force(self, stuck: list[Candidate]) -> None:
        """Serves the first of these that can be, against the rules."""
        self.plan.is_forced = True
        for candidate in stuck:
            if candidate.request not in self.plan.nothing_to_compute:
                self._consider(candidate)
                if self.plan.num_tokens:
                    return
        self.plan.is_forced = False

    def _consider(self, candidate: Candidate) -> None:
        request = candidate.request
        num_computed = request.num_computed_tokens
        hit, num_new = self.kv.no_hit, candidate.num_wanted
        if not candidate.is_running and num_computed == 0:
            hit = self.kv.cache_hit(request)
            num_computed = hit.num_tokens + hit.num_loaded
            num_new -= num_computed
            if num_new <= 0 and candidate.num_held_back:
                self.plan.nothing_to_compute.append(request)
                return
        num_wanted = num_new
        if self.limits.num_tokens_per_prefill:
            num_new = min(num_new, self.limits.num_tokens_per_prefill)
        num_new = min(num_new, self.num_open_tokens if candidate.num_held_back else self.num_tokens, self.num_tokens)
        if num_new <= 0:
            return
        victims: list[tuple[Candidate, int]] = []
        if candidate.needs_slot and self.num_slots <= 0 and not self._take_slot(candidate, victims):
            return
        num_new, num_blocks = self._fit(candidate, num_computed, num_new, hit, victims)
        if num_new <= 0:
            return
        self._commit(candidate, num_wanted, num_new, num_blocks, victims)

    def _commit(
        self, candidate: Candidate, num_wanted: int, num_new: int, num_blocks: int, victims: list[tuple[Candidate, int]]
    ) -> None:
        for victim, num_reclaimed in victims:
            self._evicted.add(victim.request.request_id)
            self.plan.victims.append(victim.request)
            self.num_free += num_reclaimed
            self.num_slots += victim.frees_slot
            self.num_running -= victim.is_running
            if self.limits.shares is not None:
                self.limits.shares.moved(victim.tenant, -num_reclaimed)
        if self.limits.shares is not None:
            self.limits.shares.moved(candidate.tenant, num_blocks)
        self.num_free -= num_blocks
        self.plan.num_blocks += num_blocks
        self.num_tokens -= num_new
        self.num_open_tokens -= num_new if candidate.num_held_back else 0
        self.num_slots -= candidate.needs_slot
        self.num_running += not candidate.is_running
        self._admits |= not candidate.is_running
        self.plan.num_tokens[candidate.request.request_id] = num_new
        if not candidate.is_running:
            self.plan.admitted.append(candidate.request)
        if num_new < num_wanted:
            self.plan.trimmed.add(candidate.request.request_id)
        elif self.limits.defers_open and _is_in_prefill(candidate):
            self.num_open_tokens = 0
            self.plan.defers_open = True

    def _fit(
        self,
        candidate: Candidate,
        num_computed: int,
        num_new: int,
        hit: CacheHit,
        victims: list[tuple[Candidate, int]],
    ) -> tuple[int, int]:
        """As many of `num_new` tokens as can get blocks, and how many blocks that takes; adds to `victims`."""
        # vLLM serves what runs before it admits what waits, which must find the watermark free then.
        beside_others = self._admits if candidate.is_running else self.num_running > 0
        available = self.num_free - (self.limits.watermark_blocks if beside_others else 0)
        lookahead = self.limits.lookahead_tokens
        needed = self.kv.num_needed(candidate.request, num_computed, num_new, hit, lookahead)
        if needed <= available:
            return num_new, needed
        available += sum(num_reclaimed for _, num_reclaimed in victims)
        if needed > available:
            available += self._evict_for(candidate, needed, needed - available, victims)
        if needed <= available:
            return num_new, needed

        def num_needed(num_tokens: int) -> int:
            return self.kv.num_needed(candidate.request, num_computed, num_tokens, hit, lookahead)

        low, high = 0, num_new - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if num_needed(middle) <= available else (low, middle - 1)
        return (low, num_needed(low)) if low else (0, 0)

    def _take_slot(self, candidate: Candidate, victims: list[tuple[Candidate, int]]) -> bool:
        for victim in self._victims_for(candidate, 0):
            if victim.frees_slot and (victim.is_idle or self.plan.is_forced):
                victims.append((victim, self.kv.num_reclaimable(victim.request.request_id)))
                return True
        return False

    def _evict_for(self, candidate: Candidate, needed: int, shortage: int, victims: list[tuple[Candidate, int]]) -> int:
        """Adds victims until `shortage` of the `needed` blocks come free, and returns how many do."""
        gained = 0
        chosen = {victim.request.request_id for victim, _ in victims}
        for victim in self._victims_for(candidate, needed):
            if gained >= shortage:
                break
            if victim.request.request_id not in chosen:
                num_reclaimed = self.kv.num_reclaimable(victim.request.request_id)
                if num_reclaimed:
                    victims.append((victim, num_reclaimed))
                    gained += num_reclaimed
        return gained

    def _victims_for(self, candidate: Candidate, needed: int) -> list[Candidate]:
        """Holders that may lose their blocks to `candidate`, which needs so many, first victim first."""
        if self._holders is None:
            self._holders = sorted(self._all_holders(), key=lambda holder: holder.key)
            for rank, holder in enumerate(self._holders):
                holder.rank = rank
            self._holders.sort(key=lambda holder: (holder.is_guarded, self._victim_order.key(holder)))
        return [holder for holder in self._holders if self._may_take(candidate, holder, needed)]

    def _may_take(self, candidate: Candidate, holder: Candidate, needed: int) -> bool:
        request_id = holder.request.request_id
        if request_id in self.plan.num_tokens or request_id in self._evicted:
            return False
        if holder.request is candidate.request:
            return False
        if self.plan.is_forced:
            return True
        is_later = holder.is_idle or holder.key > candidate.key
        shares = self.limits.shares
        if shares is not None and holder.tenant != candidate.tenant:
            if request_id == shares.first:
                return False
            if candidate.request.request_id != shares.first:
                if holder.is_guarded:
                    return False  # or two tenants could take each other's KV in turn
                takes_too_much = shares.is_over(candidate.tenant, needed)
                holds_too_much = shares.is_over(holder.tenant)
                if takes_too_much != holds_too_much:
                    return holds_too_much
        if holder.is_guarded and self.plan.num_tokens:
            return False
        return is_later


def _is_in_prefill(candidate: Candidate) -> bool:
    """Whether what it wants is the rest of a complete prompt."""
    request = candidate.request
    return not candidate.num_held_back and bool(request.num_computed_tokens < request.num_prompt_tokens)
