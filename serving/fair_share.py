"""Fair shares between tenants, on top of any policy: who may go next, and how much KV each may hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["BlockShares", "FairShare"]

_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e6
_MAX_AWAY = 1024  # tenants without requests whose counters are kept


class FairShare:
    """Virtual token counters (VTC, Sheng et al., OSDI 2024), weighted.

    Each tenant's counter grows with the tokens that are computed for it, divided by its weight; the tenant with the
    least goes next. One that had nothing to compute for a while starts at the virtual time: what it did not use is not
    saved up.

    Args:
        weights: share of each tenant relative to the others'; 1 for those that are not named.

    Raises:
        ConfigurationError: a weight cannot work.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigurationError(f"tenant_weights must map tenants to numbers, not {type(weights).__name__}")
        for tenant, weight in (weights or {}).items():
            if not isinstance(tenant, str):
                raise ConfigurationError(f"tenant_weights: tenants have names, {tenant!r:.40} is none")
            is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not is_number or not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
                raise ConfigurationError(
                    f"the weight of tenant {tenant!r} is {weight!r:.40}: "
                    f"give a number from {_MIN_WEIGHT} to {_MAX_WEIGHT}"
                )
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._num_requests: Counter[str] = Counter()
        self._total_weight = 0.0
        self._virtual = 0.0
        # Those who are away, the one that left last at the end.
        self._away: OrderedDict[str, None] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        """Tenants that have requests."""
        return len(self._num_requests)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """Weighted tokens that were computed for a tenant."""
        return self._counters.get(tenant, 0.0)

    def share(self, tenant: str) -> float:
        """The part of everything that is due to a tenant among those that have requests."""
        return self.weight(tenant) / self._total_weight if self._total_weight > 0 else 1.0

    def joined(self, tenant: str) -> None:
        """A request has come."""
        if not self._num_requests[tenant]:
            self._total_weight += self.weight(tenant)
            self._away.pop(tenant, None)
            self._counters.setdefault(tenant, 0.0)
        self._num_requests[tenant] += 1

    def left(self, tenant: str) -> None:
        """A request has ended."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        if not self._num_requests:  # nobody is there to be compared with
            self._counters.clear()
            self._away.clear()
            self._total_weight = self._virtual = 0.0
            return
        self._total_weight -= self.weight(tenant)
        self._away[tenant] = None
        while len(self._away) > _MAX_AWAY:
            self._counters.pop(self._away.popitem(last=False)[0], None)

    def has_work_again(self, tenant: str) -> None:
        """A tenant that had nothing to compute has something. What it did not use meanwhile is not saved up: it starts
        at the virtual time at the earliest."""
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._virtual)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for it."""
        if tenant in self._counters:
            self._counters[tenant] += num_tokens / self.weight(tenant)

    def advance(self, num_tokens: int, tenants: Iterable[str]) -> None:
        """So many tokens were computed, while these tenants had work: virtual time passes as fast as each one's counter
        would if they had been served evenly (weighted fair queueing). Whoever comes later starts there, so that those
        who wait are not overtaken by newcomers for ever."""
        self._virtual += num_tokens / max(sum(map(self.weight, tenants)), _MIN_WEIGHT)


class BlockShares:
    """How many KV blocks each tenant holds in one step's plan, against what is due to it.

    Args:
        shares: the tenants.
        num_blocks: blocks there are.
        held: blocks held by tenant; called when it is first asked for.
        first: the request that is first of all tenants' in the policy's order. It alone may take from whoever holds
            less than its share, and is never taken from on another tenant's behalf: so it always gets on.
    """

    def __init__(
        self, shares: FairShare, num_blocks: int, held: Callable[[], Mapping[str, int]], first: str | None
    ) -> None:
        self.first = first
        self._shares = shares
        self._num_blocks = num_blocks
        self._held = held
        self._counts: Counter[str] | None = None

    def moved(self, tenant: str, num_blocks: int) -> None:
        """The plan gives a tenant blocks, or takes some (a negative number)."""
        if self._counts is not None:
            self._counts[tenant] += num_blocks

    def is_over(self, tenant: str, num_more: int = 0) -> bool:
        """Whether a tenant holds more than its share, or would with more blocks."""
        if self._counts is None:
            self._counts = Counter(self._held())
        return self._counts[tenant] + num_more > self._shares.share(tenant) * self._num_blocks
