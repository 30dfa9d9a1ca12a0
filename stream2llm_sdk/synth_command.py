"""The command `stream2llm trace synth`: traces drawn from the published statistics."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stream2llm_sdk.console import is_given, option_of, refuse_without, shown_errors
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.option_names import OptionNames, called_by_options
from stream2llm_sdk.trace_options import (
    ArrivalsOption,
    DropOption,
    Numbers,
    NumbersOption,
    ToOption,
    with_trace_options,
    write,
)

if TYPE_CHECKING:
    from stream2llm_sdk.traces.arrivals import Arrivals

__all__ = ["synth"]


class Kind(StrEnum):
    """What synthetic traces are of."""

    CRAWLER = "crawler"
    ANNS = "anns"
    MIXED = "mixed"


class SearchGap(StrEnum):
    """Where the long wait of a vector search is."""

    FIRST = "first"
    LAST = "last"
    SPLIT = "split"


class Durations(StrEnum):
    """Which published durations vector searches have."""

    REPLAYED = "replayed"
    ALL = "all"


_OF_SEARCHES = ("num_documents", "num_shared_documents", "popularity_exponent", "search_gap", "durations")
_KINDS_OF = {"update_share": ("mixed",), **dict.fromkeys(_OF_SEARCHES, ("anns", "mixed"))}
"""Which kinds have what an option is about, where not all have it."""


_NAMES = OptionNames(
    {
        "burst_every_s": "--burst-every",
        "burst_size": "--burst-size",
        "delay_multiplier": "--delay-multiplier",
        "max_prompt_tokens": "--max-prompt-tokens",
        "max_tokens": "--max-tokens",
        "median": "--max-tokens",
        "num_documents": "--num-documents",
        "num_shared_documents": "--num-shared-documents",
        "popularity_exponent": "--popularity-exponent",
        "rate_per_s": "--rate",
        "recorded_s": "--arrivals",
        "spread": "--output-spread",
        "update_share": "--update-share",
        "variation": "--variation",
    },
    (
        (r"\bmost=", ""),
        (r"rate_per_s or recorded_s", "--rate or --arrivals"),
        (r"ask for fewer", "lower --num-queries"),
    ),
)


def synth(
    context: typer.Context,
    kind: Annotated[Kind, typer.Argument(help="Web crawls, vector searches on disk, or both.")],
    out: Annotated[Path, typer.Option(help="A .parquet file, or a new folder for a published format.")],
    num_queries: Annotated[int, typer.Option(min=1, help="How many traces.")] = 1_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same traces.")] = 0,
    arrival_seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the arrivals alone. Left out, --seed.")
    ] = None,
    to: ToOption = None,
    drop: DropOption = False,
    rate: Annotated[
        float | None, typer.Option(metavar="PER_S", help="Arrivals a second on average. Left out, there are none.")
    ] = None,
    variation: Annotated[
        float, typer.Option(help="Of the waits between arrivals, std over mean: 1 Poisson, other values gamma.")
    ] = 1.0,
    arrivals: ArrivalsOption = None,
    arrivals_are: NumbersOption = Numbers.DELAYS,
    burst_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time between bursts, beside the other arrivals.")
    ] = None,
    burst_size: Annotated[int, typer.Option(min=0, help="How many come at once in a burst.")] = 0,
    delay_multiplier: Annotated[
        float, typer.Option(help="Stretches waits, as the published runs under pressure do: 10 and 30.")
    ] = 1.0,
    update_share: Annotated[float, typer.Option(help="Of 'mixed', the share of vector searches.")] = 0.5,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=WEIGHT", help="Whose questions they are, and which share of them; repeat for more."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Output tokens; with --output-spread their median.")
    ] = None,
    output_spread: Annotated[
        float | None, typer.Option(help="Std of the logarithm of the numbers of output tokens, which are cut at 4,096.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longer prompts are halved; 1,000 at least. Left out, 125,000 for crawls, 110,000 for searches."
        ),
    ] = None,
    num_documents: Annotated[int, typer.Option(help="The k of a vector search, 1 to 1,000.")] = 10,
    num_shared_documents: Annotated[
        int,
        typer.Option(
            help="All searches find theirs among so many, 30 times --num-documents at least; 0 gives each its own."
        ),
    ] = 0,
    popularity_exponent: Annotated[float, typer.Option(help="Zipf exponent of shared documents.")] = 1.0,
    search_gap: Annotated[
        SearchGap,
        typer.Option(
            help="The long wait of a vector search: before its first or its last top-k, or split as measured."
        ),
    ] = SearchGap.SPLIT,
    durations: Annotated[
        Durations, typer.Option(help="Durations of vector searches: of the 500 that were replayed, or of all.")
    ] = Durations.REPLAYED,
    texts: Annotated[bool, typer.Option("--texts", help="Fill in text, for real engines.")] = False,
) -> None:
    """Draw traces with the statistics of the published ones."""
    with shown_errors():
        from stream2llm_sdk.traces.synthesis import OutputLength, SynthesisOptions, synthesize
        from stream2llm_sdk.traces.trace_set import check_target

        with called_by_options(with_trace_options):
            check_target(out, to and to.value)
        _check_options(context, kind)
        if output_spread is not None and max_tokens is None:
            raise ConfigurationError("--output-spread needs --max-tokens, the median")
        with called_by_options(_NAMES):
            length: int | OutputLength | None = max_tokens
            if output_spread is not None and max_tokens is not None:
                length = OutputLength(median=max_tokens, spread=output_spread)
            options = SynthesisOptions(
                delay_multiplier=delay_multiplier,
                search_gap=search_gap.value,
                durations=durations.value,
                num_documents=num_documents,
                num_shared_documents=num_shared_documents,
                popularity_exponent=popularity_exponent,
                update_share=update_share,
                max_prompt_tokens=max_prompt_tokens,
                arrivals=_arrivals(rate, variation, arrivals, arrivals_are, burst_every, burst_size),
                tenants=_tenants(tenant or ()),
                max_tokens=length,
                texts=texts,
            )
            traces = synthesize(kind.value, num_queries, seed=seed, arrival_seed=arrival_seed, options=options)
        write(Console(), traces, out, to, drop)


def _check_options(context: typer.Context, kind: Kind) -> None:
    """Refuses options that would have no effect."""
    for name, kinds in _KINDS_OF.items():
        if is_given(context, name) and kind.value not in kinds:
            own = " and ".join(kinds)
            raise ConfigurationError(f"{option_of(name)} is for {own}: leave it out, it has no effect on {kind.value}")
    given = context.params
    refuse_without(context, "--rate", given["rate"] is not None, ("variation", "arrival_seed"))
    refuse_without(context, "--arrivals", given["arrivals"] is not None, ("arrivals_are",))
    has_shared = bool(given["num_shared_documents"])
    refuse_without(context, "--num-shared-documents", has_shared, ("popularity_exponent",))


def _arrivals(
    rate_per_s: float | None,
    variation: float,
    file: Path | None,
    numbers: Numbers,
    burst_every_s: float | None,
    burst_size: int,
) -> Arrivals | None:
    if rate_per_s is None and file is None and burst_every_s is None and not burst_size:
        return None
    from stream2llm_sdk.traces.arrivals import Arrivals
    from stream2llm_sdk.traces.arrivals_file import read_arrival_times

    times_s = read_arrival_times(file, delays=numbers is Numbers.DELAYS) if file is not None else None
    return Arrivals(
        rate_per_s=rate_per_s,
        variation=variation,
        recorded_s=tuple(times_s) if times_s is not None else None,
        burst_every_s=burst_every_s,
        burst_size=burst_size,
    )


def _tenants(items: Iterable[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in items:
        name, _, weight = item.rpartition("=")
        if name in weights:
            raise ConfigurationError(f"--tenant {item!r}: {name} has a weight already, {weights[name]:g}: give one")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if not name:
            raise ConfigurationError(f"--tenant {item!r}: give a name and a weight, such as 'research=2'")
    return weights
