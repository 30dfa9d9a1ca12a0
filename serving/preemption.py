"""Recompute or swap: how one victim's KV is taken away, decided by what the victim itself would cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["Costs", "InvalidationHistory", "PreemptionDecision", "PreemptionMode", "VictimFacts", "decide"]


class PreemptionMode(StrEnum):
    """How victims are preempted: by cost, or always in one way (for ablations)."""

    COST = "cost"
    RECOMPUTE = "recompute"
    SWAP = "swap"

    @classmethod
    def parse(cls, name: str) -> PreemptionMode:
        """The mode of this name, in any case.

        Raises:
            ConfigurationError: there is none.
        """
        try:
            return cls(name.strip().lower())
        except ValueError:
            raise ConfigurationError(f"preemption_mode must be one of {', '.join(cls)}, got {name!r}") from None


class Costs(Protocol):
    """Predictions in seconds: a `CostModel`, or an `OnlineCorrection` of one."""

    def recompute_s(self, num_tokens: int, start: int = 0) -> float: ...

    def swap_out_s(self, num_tokens: int) -> float: ...

    def swap_in_s(self, num_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class VictimFacts:
    """What is known of a victim when its KV is taken away.

    Attributes:
        num_tokens: its computed tokens.
        num_tokens_cached_again: leading ones whose blocks would stay in the prefix cache if it were freed now: not
            those that the step needs at once.
        survival: share of its computed tokens that is expected to be valid still when it resumes, 0 to 1; see
            `InvalidationHistory.survival`.
        num_tokens_copied: those whose copies the host already holds, from an earlier swap.
        expected_away_s: seconds until it is expected to be scheduled again; None if nobody knows.
        cache_lifetime_s: seconds in which all free blocks are taken anew at the present rate, after which the prefix
            cache has forgotten what is freed now; None if they are not being taken.
    """

    num_tokens: int
    num_tokens_cached_again: int = 0
    survival: float = 1.0
    num_tokens_copied: int = 0
    expected_away_s: float | None = None
    cache_lifetime_s: float | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.num_tokens_cached_again <= self.num_tokens, self
        assert 0 <= self.num_tokens_copied <= self.num_tokens, self
        assert 0.0 <= self.survival <= 1.0, self

    @property
    def num_tokens_found_again(self) -> int:
        """Leading tokens that the prefix cache is expected to give back when the victim resumes.

        It forgets the least recently freed blocks first, so what is freed now is gone after `cache_lifetime_s`. How
        exactly is not known in advance; a straight line between now and then is taken. With an unknown return or
        lifetime nothing is discounted.
        """
        if self.expected_away_s is None or self.cache_lifetime_s is None:
            return self.num_tokens_cached_again
        if self.cache_lifetime_s <= self.expected_away_s:
            return 0
        left = 1.0 - max(0.0, self.expected_away_s) / self.cache_lifetime_s
        return int(left * self.num_tokens_cached_again)


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """How to preempt (`RECOMPUTE` or `SWAP`), and the seconds that each way was expected to cost."""

    mode: PreemptionMode
    recompute_s: float
    swap_s: float


def decide(costs: Costs, facts: VictimFacts, mode: PreemptionMode, *, fits_host_pool: bool) -> PreemptionDecision:
    """Compares what both ways cost for this victim, and chooses the cheaper one; recompute if they are equal.

    Of the victim's n computed tokens, those from f on will not be found in the prefix cache, and a share p of them
    will still be valid:

        recompute = p · recompute_s(n − f, start=f)
        swap      = swap_out_s(n − copied) + p · swap_in_s(n − f)

    Tokens that an update makes void are lost in either way: nobody recomputes or loads them again, so both terms that
    lie in the future carry p. The copy out is paid now and in full, whatever happens later: for a victim that is
    likely to change, swap is a payment for something that is thrown away. How soon the victim is back works through
    f (at once: what the step left in the prefix cache is still there, and recompute may cost nothing; late: it is
    gone) and through p (the longer away, the more updates). A victim that is evicted again and again pays its
    recompute each time, but its copy only for tokens that the host does not hold yet.

    p is a mean over the tokens. Updates void a suffix, so the tokens behind f survive a little less than that:
    recompute is charged a little more than is right, and so is the copy back.

    Without room in the host pool, or with nothing to copy, the answer is recompute in every mode.
    """
    num_found = facts.num_tokens_found_again
    num_lost = facts.num_tokens - num_found
    recompute_s = facts.survival * costs.recompute_s(num_lost, num_found)
    swap_s = costs.swap_out_s(facts.num_tokens - facts.num_tokens_copied)
    swap_s += facts.survival * costs.swap_in_s(num_lost)
    swaps = mode is PreemptionMode.SWAP or (mode is PreemptionMode.COST and swap_s < recompute_s)
    possible = fits_host_pool and facts.num_tokens > 0
    return PreemptionDecision(
        PreemptionMode.SWAP if swaps and possible else PreemptionMode.RECOMPUTE, recompute_s, swap_s
    )


@dataclass(slots=True)
class _Shares:
    """A fading sum of shares and its weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, share: float, keep: float = 1.0) -> None:
        self.total = self.total * keep + share
        self.weight = self.weight * keep + 1.0

    def mean(self, prior: float, prior_weight: float) -> float:
        return (prior * prior_weight + self.total) / (prior_weight + self.weight)


class InvalidationHistory:
    """What share of its computed tokens a prompt keeps through an update, learned from updates seen.

    The estimate for a stream is a mean of its own updates and `prior_weight` imaginary ones, which keep as much as
    its group's do (a group is a retriever and tenant: streams that behave alike); a group starts from `prior_share` in
    the same way. With the defaults that is the posterior mean of a uniform prior. Groups fade with a memory of about
    `group_memory` updates, so they follow a change of the load; the groups not updated for longest are forgotten
    beyond `max_groups`.

    Only prompts in update mode are recorded. In append mode nothing is ever invalidated: ask for no expected updates,
    or do not ask.
    """

    def __init__(
        self, *, prior_share: float = 0.5, prior_weight: float = 2.0, group_memory: int = 256, max_groups: int = 1024
    ) -> None:
        if not 0.0 <= prior_share <= 1.0:
            raise ConfigurationError(f"prior_share must be between 0 and 1, got {prior_share}")
        if prior_weight <= 0:
            raise ConfigurationError(f"prior_weight must be positive, got {prior_weight}")
        if group_memory < 1 or max_groups < 1:
            raise ConfigurationError(f"group_memory and max_groups must be 1 or more, got {group_memory}, {max_groups}")
        self._prior_share, self._prior_weight = prior_share, prior_weight
        self._keep = 1.0 - 1.0 / group_memory
        self._max_groups = max_groups
        self._streams: dict[str, _Shares] = {}
        self._groups: dict[str, _Shares] = {}

    def record(self, stream_id: str, group: str, *, lcp: int, num_computed: int) -> None:
        """Counts an update with this longest common prefix, of a prompt with `num_computed` computed tokens.

        One of which nothing was computed yet tells nothing, and is not counted.
        """
        if num_computed <= 0:
            return
        share = min(max(lcp, 0), num_computed) / num_computed
        self._streams.setdefault(stream_id, _Shares()).add(share)
        shares = self._groups.pop(group, None) or _Shares()
        shares.add(share, self._keep)
        self._groups[group] = shares  # last, as the latest
        if len(self._groups) > self._max_groups:
            del self._groups[next(iter(self._groups))]

    def kept_share(self, stream_id: str, group: str) -> float:
        """Expected share, 0 to 1, of the computed tokens that the stream keeps through its next update."""
        prior = self._groups.get(group, _Shares()).mean(self._prior_share, self._prior_weight)
        return self._streams.get(stream_id, _Shares()).mean(prior, self._prior_weight)

    def survival(self, stream_id: str, group: str, expected_updates: float) -> float:
        """Expected share of the computed tokens that survives `expected_updates` more updates.

        Each keeps the same share of what the ones before it kept. A finished prompt, and one in append mode, expects
        none, which gives 1; one that waits for its next update and resumes with it expects one.
        """
        return float(self.kept_share(stream_id, group) ** max(0.0, expected_updates))

    def forget(self, stream_id: str) -> None:
        """Drops a stream that ended. Its group keeps what it taught."""
        self._streams.pop(stream_id, None)

    @property
    def num_streams(self) -> int:
        """Streams that are remembered."""
        return len(self._streams)
