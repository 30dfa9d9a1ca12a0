"""The command `stream2llm trace record anns`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stream2llm_sdk.console import is_given, json_object, refuse_without
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.record_ray_options import RayActorsOption, RayOption, outcome_source
from stream2llm_sdk.record_run import (
    QUESTIONS_HELP,
    ColumnOption,
    LimitOption,
    OutOption,
    PublishedOption,
    RetryOption,
    SampleOption,
    SeedOption,
    record,
    shown_record_errors,
)

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.diskann.search_options import SearchOptions
    from stream2llm_sdk.traces.recording.anns import SearchSpec
    from stream2llm_sdk.traces.recording.recording import RecordingFolder

__all__ = ["anns"]

# Searches are short: a batch of them is still soon done again when its actor is lost.
_BATCH = 32

_CORPUS_HELP = (
    "Build the index from this first, if DIR holds none: a .parquet, .jsonl, .csv (.gz, .zst), .txt or .md; a folder "
    "of those; or hub:NAME[:CONFIG[:SPLIT]], such as hub:HuggingFaceFW/fineweb-edu:sample-10BT."
)
_CONCURRENCY_HELP = (
    "Searches at once, each in a process with a CPU for itself; no more than there are CPUs. Left out, one for each "
    "core but one. On a Ray cluster, in each recorder, and 1 if left out."
)


def anns(
    context: typer.Context,
    questions: Annotated[str, typer.Argument(help=QUESTIONS_HELP)],
    out: OutOption,
    index: Annotated[Path, typer.Option("--index", metavar="DIR", help="The folder of the index that is searched.")],
    corpus: Annotated[str | None, typer.Option(help=_CORPUS_HELP)] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="As for `index build`. Left out, the index's own; WordLlama for one that is built."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variable with an endpoint's key. Left out, OPENAI_API_KEY.")
    ] = None,
    passage_tokens: Annotated[
        int, typer.Option(min=0, help="With --corpus: most tokens of a passage; 0 keeps documents whole.")
    ] = 256,
    corpus_limit: Annotated[int | None, typer.Option(min=1, help="With --corpus: most documents.")] = None,
    filterable: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="With --corpus: searches may filter by this; repeat for more."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="With --corpus: leave out what cannot be indexed, instead of stopping.")
    ] = False,
    column: ColumnOption = None,
    limit: LimitOption = None,
    sample: SampleOption = None,
    seed: SeedOption = 0,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Documents in the context.")] = 10,
    search_list_size: Annotated[
        int, typer.Option("--search-list-size", "-L", min=1, help="L, at least k: larger finds more and takes longer.")
    ] = 100,
    beam_width: Annotated[int, typer.Option(min=1, help="W: nodes read from disk at once.")] = 4,
    gate: Annotated[
        bool,
        typer.Option("--gate/--no-gate", help="Only pools that a gate lets out early, or every change of the pool."),
    ] = False,
    gate_expansions: Annotated[
        int, typer.Option(min=0, help="With --gate: node expansions that a pool must have survived.")
    ] = 16,
    gate_rank: Annotated[
        float, typer.Option(min=0.0, help="With --gate: the best unexpanded candidate's rank, as a multiple of k.")
    ] = 2.0,
    early_stop: Annotated[
        bool, typer.Option("--early-stop", help="End a search once the pool has been still, as `EarlyStop` says.")
    ] = False,
    filter_json: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="JSON", help='Only documents like this: \'{"language_score": {"$gte": 0.9}}\'.'
        ),
    ] = None,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Drop the graph from the page cache before each search, as if it were too large."),
    ] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help=_CONCURRENCY_HELP)] = None,
    published: PublishedOption = None,
    retry_failed: RetryOption = False,
    ray: RayOption = None,
    ray_actors: RayActorsOption = None,
) -> None:
    """Record vector searches: every pool of each question's search, with its iterations and times.

    Times count from the question, whose embedding is part of the first window, and are taken in the thread that
    searches, right behind the iterations; documents are read once the search has ended. The windows of a search follow
    one another without a gap, and the last ends with the search.

    Searches do not disturb each other's times: each runs in a process with one thread and a CPU for itself, of a
    physical core of its own where there are enough, which no other recording of this user on the machine takes; and the
    process that writes everything down keeps off these CPUs. The disk, the last cache and the memory's bandwidth stay
    common to all. So at the end some questions are searched again, alone and among others: `disturbance` in the summary
    is how many times longer a search took among others, 1 being not at all (not on Ray, nor for fewer than 5).

    A recording that ends early, by Ctrl-C, an error or kill -9, goes on with the same command; the building of the
    index too. --limit may be raised, and --concurrency, --ray and the index's place changed, when it goes on.

    DIR holds traces.parquet, failures.csv and summary.json at the end, and the journal that they are made of, in which
    each document's text stands once. In the published form documents are called by their row in the index.
    """
    with shown_record_errors():
        from stream2llm_sdk.retrievers.diskann.search_options import EarlyStop, EmissionGate, SearchOptions
        from stream2llm_sdk.traces.recording.questions import read_questions

        refuse_without(context, "--gate", gate, ("gate_expansions", "gate_rank"))
        refuse_without(
            context, "--corpus", corpus is not None, ("passage_tokens", "corpus_limit", "filterable", "skip_bad")
        )
        if search_list_size < k and is_given(context, "search_list_size"):
            raise ConfigurationError(f"-L {search_list_size} is less than -k {k}: L is at least k")
        if cold and (concurrency or 1) > 1:
            raise ConfigurationError(
                f"--concurrency {concurrency} with --cold: each would drop what the others have read; leave one out"
            )
        options = SearchOptions(
            k=k,
            search_list_size=max(k, search_list_size),
            beam_width=beam_width,
            gate=EmissionGate(gate_expansions, gate_rank) if gate else None,
            early_stop=EarlyStop() if early_stop else None,
        )
        wanted = json_object("--filter", filter_json)
        asked = read_questions(questions, column=column, limit=limit, sample=sample, seed=seed)
        outcomes = outcome_source(
            ray, ray_actors, cpus_per_actor=float(concurrency or 1), batch_size=_BATCH * (concurrency or 1)
        )
        spec = _spec(index, options, wanted, embedder, api_key_env, cold, concurrency or (1 if ray or cold else None))
        if ray is None:
            spec.check_cpus()
        if corpus is not None:
            _check_out(out, index)
            _build(corpus, index, embedder, api_key_env, passage_tokens, corpus_limit, filterable, skip_bad)
        record(
            spec,
            asked,
            out,
            updates="pools",
            published=published,
            retry_failed=retry_failed,
            outcomes=outcomes,
            measure=None if ray else partial(_measured, spec),
        )


def _check_out(out: Path, index: Path) -> None:
    """Says before hours of building that the recording could not be written."""
    from stream2llm_sdk.files import require_makeable, require_own_folder
    from stream2llm_sdk.traces.recording.recording import CONFIG_FILE

    if out.resolve() == index.resolve():
        raise ConfigurationError(f"--out {out} is the folder of the index too: name another one")
    require_own_folder(out, (CONFIG_FILE,), "recording")
    require_makeable(out, f"--out {out}")


def _spec(
    index: Path,
    options: SearchOptions,
    wanted: dict[str, Any] | None,
    embedder: str | None,
    api_key_env: str | None,
    cold: bool,
    concurrency: int | None,
) -> SearchSpec:
    from stream2llm_sdk.retrievers.embedding import EndpointEmbedder
    from stream2llm_sdk.traces.recording.anns import SearchSpec, default_concurrency

    maker: Any = embedder
    kind, _, rest = (embedder or "").partition(":")
    if kind == "endpoint" and "@" in rest:
        model, _, url = rest.rpartition("@")
        maker = partial(EndpointEmbedder, model, url, api_key_env=api_key_env)
    elif api_key_env is not None:
        raise ConfigurationError("--api-key-env is for endpoints: give --embedder endpoint:MODEL@URL, or leave it out")
    return SearchSpec(index, options, wanted, maker, cold, concurrency or default_concurrency())


def _build(
    corpus: str,
    index: Path,
    embedder: str | None,
    api_key_env: str | None,
    passage_tokens: int,
    corpus_limit: int | None,
    filterable: list[str] | None,
    skip_bad: bool,
) -> None:
    """Builds the index, or goes on with its build; one that is there is used as it is."""
    from stream2llm_sdk.index_build_command import build
    from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE

    if (index / MANIFEST_FILE).is_file():
        says = f"{index} holds an index already: it is searched as it is, and {corpus} is not read"
        Console(stderr=True).print(says, markup=False, highlight=False, soft_wrap=True)
        return
    build(
        corpus,
        index,
        embedder=embedder or "wordllama",
        api_key_env=api_key_env,
        passage_tokens=passage_tokens,
        limit=corpus_limit,
        filterable=filterable,
        skip_bad=skip_bad,
    )


async def _measured(spec: SearchSpec, recording: RecordingFolder) -> dict[str, float]:
    from stream2llm_sdk.traces.recording.anns import MAX_DISTURBANCE, measured_disturbance

    figures = await measured_disturbance(spec, recording)
    if figures.get("disturbance", 0.0) > MAX_DISTURBANCE:
        says = (
            f"Searches took {figures['disturbance']:.2f} times as long among others as alone: their times are not "
            "those of a machine that has nothing else to do. Record again when it is idle, or with --concurrency "
            f"{max(1, spec.concurrency // 2)}."
        )
        Console(stderr=True).print(says, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return figures
