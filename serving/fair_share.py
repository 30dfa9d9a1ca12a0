"""Fair shares between tenants, on top of any policy: who may go next, and how much KV each may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["BlockShares", "FairShare"]


class FairShare:
    """Virtual token counters (VTC, Sheng et al., OSDI 2024), weighted.

    Each tenant's counter grows with the tokens that are computed for it, divided by its weight; the tenant with the
    least goes next. One that comes back after a while starts at the least of those that are there: what it did not
    use is not saved up.

    Args:
        weights: share of each tenant relative to the others'; 1 for those that are not named.

    Raises:
        ConfigurationError: a weight is not positive.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        for tenant, weight in (weights or {}).items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise ConfigurationError(f"the weight of tenant {tenant!r} is {weight!r}: give a number above 0")
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._num_requests: Counter[str] = Counter()

    @property
    def num_tenants(self) -> int:
        """Tenants that have requests."""
        return len(self._num_requests)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def counter(self, tenant: str) -> float:
        """Weighted tokens that were computed for a tenant that has requests."""
        return self._counters[tenant]

    def share(self, tenant: str) -> float:
        """The part of everything that is due to a tenant among those that have requests."""
        return self.weight(tenant) / sum(map(self.weight, self._num_requests))

    def joined(self, tenant: str) -> None:
        """A request has come."""
        if not self._num_requests[tenant]:
            there = [self._counters[other] for other, count in self._num_requests.items() if count]
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), min(there, default=0.0))
        self._num_requests[tenant] += 1

    def left(self, tenant: str) -> None:
        """A request has ended."""
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
            # Those who are away and used no more than anybody who is there would start at the least anyway.
            least = min((self._counters[other] for other in self._num_requests), default=float("inf"))
            self._counters = {
                other: counter
                for other, counter in self._counters.items()
                if other in self._num_requests or counter > least
            }

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for it."""
        if tenant in self._counters:
            self._counters[tenant] += num_tokens / self.weight(tenant)


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
