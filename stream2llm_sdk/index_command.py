"""The commands `stream2llm index …`: building an index of documents, and what it is like."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from stream2llm_sdk.console import json_object, shown_errors, write_report
from stream2llm_sdk.files import require_writable
from stream2llm_sdk.index_build_command import build

if TYPE_CHECKING:
    from stream2llm_sdk.context import Chunk
    from stream2llm_sdk.retrievers.diskann.evaluation import Evaluation
    from stream2llm_sdk.retrievers.diskann.manifest import Manifest
    from stream2llm_sdk.retrievers.embedding import Embedder

__all__ = ["app"]

app = typer.Typer(
    name="index",
    help="DiskANN indexes: building, searching and judging them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

IndexArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the index.")]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it to this file.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="How many documents.")]
EmbedderOption = Annotated[
    str | None,
    typer.Option(
        help="The index's embedder, as for `index build`. Needed where it is an endpoint, or one of your own."
    ),
]
BeamOption = Annotated[int, typer.Option(min=1, help="W: nodes read from disk at once.")]


@app.command(short_help="Print what an index holds and how it was built.")
def info(directory: IndexArgument, json_file: JsonOption = None) -> None:
    """Print what an index holds and how it was built, after checking its files."""
    console = Console()
    with shown_errors():
        if json_file is not None:
            require_writable(json_file, "--json")
        from stream2llm_sdk.retrievers.diskann.manifest import MANIFEST_FILE, Manifest

        manifest = Manifest.read(directory)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(manifest):
        table.add_row(name, value)
    console.print(table)
    write_report(json_file, lambda: json.loads((directory / MANIFEST_FILE).read_text("utf-8")))


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    pieces = "documents" if manifest.splitter is None else "passages"
    facts = [(pieces, f"{manifest.num_documents:,}")]
    if manifest.num_sources is not None:
        facts.append(("documents read", f"{manifest.num_sources:,}"))
    facts += [
        ("left out", f"{manifest.num_skipped:,}"),
        ("embedder", f"{manifest.embedder}, {manifest.dim} dimensions"),
        ("metric", manifest.metric),
    ]
    if manifest.splitter is not None:
        facts.append(("splitter", ", ".join(f"{name} {value}" for name, value in manifest.splitter.items())))
    facts += [
        ("filterable", ", ".join(manifest.filterable) or "nothing"),
        ("graph", ", ".join(f"{name} {value}" for name, value in manifest.graph.items()) or "unknown"),
        ("built with", ", ".join(f"{name} {value}" for name, value in manifest.libraries.items()) or "unknown"),
        ("size", _size(manifest.size_bytes)),
    ]
    facts += [(f"  {name}", _size(record.size_bytes)) for name, record in manifest.files.items()]
    return facts


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"


@app.command()
def search(
    directory: IndexArgument,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: KOption = 5,
    search_list_size: Annotated[int, typer.Option(min=1, help="L: larger finds more and takes longer.")] = 100,
    beam_width: BeamOption = 4,
    embedder: EmbedderOption = None,
    filter_json: Annotated[
        str | None,
        typer.Option("--filter", metavar="JSON", help='Only documents like this: \'{"source": {"$in": ["a", "b"]}}\'.'),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Search an index and print what it finds, best first."""
    console = Console()
    with shown_errors():
        if json_file is not None:
            require_writable(json_file, "--json")
        from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
        from stream2llm_sdk.retrievers.diskann.search import SearchOptions

        wanted = json_object("--filter", filter_json)
        options = SearchOptions(k, max(k, search_list_size), beam_width, gate=None)
        with DiskANNIndex.open(directory, embedder=_embedder(embedder, directory)) as index:
            index.warm_up(options)
            start = time.perf_counter()
            found = index.search(query, options, wanted)
            elapsed_ms = 1000 * (time.perf_counter() - start)
    for rank, chunk in enumerate(found, 1):
        _show(console, rank, chunk)
    console.print(f"{len(found)} of {len(index)} in {elapsed_ms:.1f} ms", style="dim")
    rows = [
        {"text": c.text, "source": c.source, "title": c.title, "score": c.score, "metadata": dict(c.metadata)}
        for c in found
    ]
    write_report(json_file, lambda: {"query": query, "elapsed_ms": elapsed_ms, "documents": rows})


def _embedder(spec: str | None, directory: Path) -> Embedder | None:
    from stream2llm_sdk.retrievers.embedding import embedder_of

    return None if spec is None else embedder_of(spec, directory)


def _show(console: Console, rank: int, chunk: Chunk) -> None:
    heading = " · ".join(part for part in (chunk.title, chunk.source) if part)
    score = "" if chunk.score is None else f"{chunk.score:.4f}  "
    text = " ".join(chunk.text.split())
    width = 3 * max(40, console.width - 4)
    console.print(f"{rank:>2}. {score}{heading}", markup=False, highlight=False, style="bold")
    console.print(f"    {text if len(text) <= width else text[: width - 1] + '…'}\n", markup=False, highlight=False)


@app.command("eval", short_help="Measure recall and latency.")
def evaluate_index(
    directory: IndexArgument,
    queries: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions, one a line, or JSON Lines with 'query'. Left out, first sentences of documents at random.",
        ),
    ] = None,
    num_queries: Annotated[int, typer.Option(min=1, help="Most questions.")] = 200,
    k: KOption = 10,
    search_list_size: Annotated[
        list[int] | None, typer.Option(min=1, help="L; repeat for more. Left out, 10, 20, 40, 80, 160 and 320.")
    ] = None,
    beam_width: BeamOption = 4,
    embedder: EmbedderOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the documents that stand for questions.")] = 0,
    json_file: JsonOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw recall against latency to this .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure recall against exact search, and latency, for several sizes of the search list."""
    console = Console()
    with shown_errors():
        for file, name in ((json_file, "--json"), (plot, "--plot")):
            if file is not None:
                require_writable(file, name)
        from stream2llm_sdk.retrievers.diskann.evaluation import (
            DEFAULT_LIST_SIZES,
            evaluate,
            plot_evaluation,
            read_queries,
            sample_queries,
        )
        from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex

        chosen = _embedder(embedder, directory)
        if queries is not None:
            questions = read_queries(queries, num_queries)
        else:
            with DiskANNIndex.open(directory, embedder=chosen) as index:
                questions = sample_queries(index, num_queries, seed)
        sizes = search_list_size or DEFAULT_LIST_SIZES
        with console.status("measuring …") as status:
            found = evaluate(
                directory,
                questions,
                k=k,
                list_sizes=sizes,
                beam_width=beam_width,
                embedder=chosen,
                on_progress=lambda what: status.update(f"{what} …"),
            )
        _show_evaluation(console, found)
        if plot is not None:
            plot_evaluation(found, plot)
    write_report(json_file, found.to_dict)


def _show_evaluation(console: Console, found: Evaluation) -> None:
    table = Table("L", f"recall@{found.k}", "p50 ms", "p99 ms", "nodes read", box=None)
    for column in table.columns:
        column.justify = "right"
    for point in found.points:
        table.add_row(
            str(point.search_list_size),
            f"{point.recall:.4f}",
            f"{point.p50_ms:.2f}",
            f"{point.p99_ms:.2f}",
            f"{point.expansions:.0f}",
        )
    console.print(table)
    console.print(
        f"{found.num_queries} queries against {found.num_documents} vectors, beam width {found.beam_width}", style="dim"
    )


app.command(short_help="Build an index, or go on with a build.")(build)
