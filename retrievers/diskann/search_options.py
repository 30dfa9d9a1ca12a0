"""How one search runs: its size, when a pool is emitted early, and when it may end early.

When a pool is worth emitting: the exact top-k of the expanded nodes (the *pool*) usually holds most of the final
result long before the search ends, but also changes often at its beginning, and every change costs the model a
prefill. The gate therefore opens when the pool's set survived a number of node expansions and the best candidate
still unexpanded lies well behind rank k: what is left to expand is then unlikely to enter the pool.

When a search may end: candidates are expanded in the order of their estimated distance, so once the best one left
is estimated to be farther than the pool's last document, only an estimate that is wrong by more than a margin, or a
neighbour that is much closer than its parent, can still change the pool. `EarlyStop` asks for that, and for a pool
that has been still for a while.

What the settings trade, measured by `tests/benchmarks/ann_search.py --gate-curve` over 24,843 passages of real
documentation (WordLlama, 256 dimensions), 300 questions, k 10, L 320, W 8, warm. "At" is where the first pool comes, as
a share of the iterations and of the time; "prefilled again" counts documents in a prompt in stable order, "in vain" the
tokens of earlier prompts that they push out; all are means for a question.

| gate (expansions, rank)      | iterations | at iterations | at time | recall | pools | prefilled again | in vain |
|------------------------------|------------|---------------|---------|--------|-------|-----------------|---------|
| every change of a full pool  |        3.0 |          .069 |     .13 |   .039 |  4.88 |            30.7 |  10,773 |
| 8, k                         |        7.8 |          .179 |     .26 |   .983 |  1.11 |             .16 |      56 |
| 16, 2k (`EmissionGate()`)    |        9.0 |          .207 |     .29 |   .990 |  1.05 |             .09 |      33 |
| 48, 4k                       |       13.2 |          .305 |     .38 |   .995 |  1.01 |             .04 |      12 |

| early stop (expansions, margin) | time | nodes read | recall |
|---------------------------------|------|------------|--------|
| none                            |    1 |        336 |   .999 |
| 128, 0.2                        |  .72 |        211 |   .999 |
| 64, 0.1 (`EarlyStop()`)         |  .52 |        121 |   .996 |
| 32, 0.05                        |  .40 |         83 |   .994 |
| 16, 0                           |  .35 |         65 |   .990 |
"""

from __future__ import annotations

from dataclasses import dataclass

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["EarlyStop", "EmissionGate", "SearchOptions"]


def _check_expansions(owner: object, value: object) -> None:
    if not isinstance(value, int) or not 0 <= value < 2**31:
        name = type(owner).__name__
        raise ConfigurationError(f"{name}.min_stable_expansions={value!r}: give an integer from 0 up")


@dataclass(frozen=True, slots=True)
class EmissionGate:
    """When the pool of an unfinished search is emitted.

    Attributes:
        min_stable_expansions: node expansions that the pool's set must have survived. Smaller emits earlier
            and more often.
        min_rank_factor: the best unexpanded candidate must be at rank `min_rank_factor * k` or behind it. With
            a search list shorter than that the gate never opens and only the final pool is emitted.

    Raises:
        ConfigurationError: a value is negative, or the number of expansions is no integer.
    """

    min_stable_expansions: int = 16
    min_rank_factor: float = 2.0

    def __post_init__(self) -> None:
        _check_expansions(self, self.min_stable_expansions)
        if not 0 <= self.min_rank_factor <= 1e6:
            raise ConfigurationError(f"EmissionGate.min_rank_factor={self.min_rank_factor!r}: give 0 or more")


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """When a search ends before its candidate list is worked off.

    It ends when the pool's set survived `min_stable_expansions` node expansions and the best unexpanded candidate's
    estimated distance exceeds `d + margin * |d|`, d being the exact distance of the pool's last document (squared L2,
    or minus the inner product).

    Attributes:
        min_stable_expansions: larger loses less recall and saves less time.
        margin: larger loses less recall and saves less time; it covers the error of the quantiser's estimates.

    Raises:
        ConfigurationError: a value is negative, or the number of expansions is no integer.
    """

    min_stable_expansions: int = 64
    margin: float = 0.1

    def __post_init__(self) -> None:
        _check_expansions(self, self.min_stable_expansions)
        if not 0 <= self.margin <= 1e6:
            raise ConfigurationError(f"EarlyStop.margin={self.margin!r}: give 0 or more")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How one search runs.

    Attributes:
        k: size of the result. An index with fewer documents gives all of them.
        search_list_size: `L`, candidates kept; larger finds more of the true neighbours and takes longer.
        beam_width: `W`, nodes read from disk at once.
        gate: when an intermediate pool is emitted; None never emits one.
        early_stop: when the search may end before its candidate list is worked off; None works it off.

    Raises:
        ConfigurationError: a value is not positive, or `search_list_size` is below `k`.
    """

    k: int = 10
    search_list_size: int = 100
    beam_width: int = 4
    gate: EmissionGate | None = EmissionGate()
    early_stop: EarlyStop | None = None

    def __post_init__(self) -> None:
        for name, most in (("k", 10_000), ("search_list_size", 1_000_000), ("beam_width", 512)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name}={value!r}: give an integer from 1 to {most}")
        if self.search_list_size < self.k:
            raise ConfigurationError(f"search_list_size={self.search_list_size} is below k={self.k}: give at least k")
        for name, kind in (("gate", EmissionGate), ("early_stop", EarlyStop)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(f"{name}={value!r:.80}: give {kind.__name__}(…) or None")
