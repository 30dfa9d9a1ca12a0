"""The order of victims: who loses its KV first when memory is short. It ranks; it never touches KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from stream2llm_sdk.serving.planner import Candidate

__all__ = ["VICTIM_ORDERS", "AdmissionOrder", "IdleFirst", "LatestCompletion", "VictimOrder", "make_victim_order"]

Key = tuple[Any, ...]


class VictimOrder(Protocol):
    """Ranks the holders of KV that a plan leaves out: the smallest key loses its blocks first.

    Attributes:
        name: as on the command line.
    """

    name: str

    def key(self, holder: Candidate) -> Key:
        """`holder.rank` is the place in the policy's order among those that hold KV, `holder.is_idle` whether it is an
        open stream that waits for its next chunk, `holder.completion_s` when its prompt is expected to be complete."""
        ...


class IdleFirst:
    """Idle streams first, then whoever would be served last."""

    name = "IDLE_FIRST"

    def key(self, holder: Candidate) -> Key:
        return (not holder.is_idle, -holder.rank)


class LatestCompletion:
    """Idle streams first, the one that will be complete last before the others; then whoever would be served last."""

    name = "LATEST_COMPLETION"

    def key(self, holder: Candidate) -> Key:
        return (not holder.is_idle, -holder.completion_s if holder.is_idle else 0.0, -holder.rank)


class AdmissionOrder:
    """Idle streams first, the latest admitted before the others (the published artifact's order)."""

    name = "ADMISSION"

    def key(self, holder: Candidate) -> Key:
        return (not holder.is_idle, -holder.admission if holder.is_idle else 0, -holder.rank)


VICTIM_ORDERS: dict[str, type[IdleFirst] | type[LatestCompletion] | type[AdmissionOrder]] = {
    order.name: order for order in (IdleFirst, LatestCompletion, AdmissionOrder)
}


def make_victim_order(name: str) -> VictimOrder:
    """The order of a name, in any case.

    Raises:
        ConfigurationError: no order has this name.
    """
    try:
        return VICTIM_ORDERS[name.strip().upper()]()
    except KeyError:
        raise ConfigurationError(
            f"unknown order of victims {name!r}: choose one of {', '.join(sorted(VICTIM_ORDERS))}"
        ) from None
