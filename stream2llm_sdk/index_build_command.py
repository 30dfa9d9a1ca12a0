"""The command `stream2llm index build`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stream2llm_sdk.console import STOPPED, shown_errors
from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.diskann.corpus import Corpus
    from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter
    from stream2llm_sdk.retrievers.embedding import Embedder

__all__ = ["build"]

_SPARSE_SAMPLE = 50_000
_SPLIT_AT_ONCE = 256


class MetricName(StrEnum):
    """The metrics, for the command line."""

    COSINE = "cosine"
    L2 = "l2"
    IP = "ip"


def build(
    corpus: Annotated[
        str,
        typer.Argument(
            help="A .parquet, .jsonl, .csv (.gz, .zst), .txt or .md; a folder of those; or hub:NAME[:CONFIG[:SPLIT]]."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of the index.")],
    embedder: Annotated[
        str,
        typer.Option(help="wordllama, sentence-transformers:MODEL, endpoint:MODEL@URL, or sparse[:DIMENSIONS]."),
    ] = "wordllama",
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The variable with an endpoint's key. Left out, OPENAI_API_KEY.")
    ] = None,
    metric: Annotated[MetricName, typer.Option(help="How vectors are compared.")] = MetricName.COSINE,
    passage_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a passage; 0 keeps documents whole.")
    ] = 256,
    overlap_tokens: Annotated[int, typer.Option(min=0, help="Tokens that a passage may repeat of the last one.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Counts tokens: a tokenizer.json, a folder or a name. Left out, WordLlama's.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column with the documents.")] = "text",
    source_column: Annotated[
        str | None, typer.Option(help="Where a document comes from. Left out, the first of url, source and id.")
    ] = None,
    title_column: Annotated[str, typer.Option(help="The column with titles, if there is one.")] = "title",
    keep: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Keep this as metadata; repeat. Left out, all.")
    ] = None,
    filterable: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Searches may filter by this; repeat for more.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents.")] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out, and count, what cannot be indexed, instead of stopping.")
    ] = False,
    graph_degree: Annotated[int, typer.Option(min=1, help="R: most neighbours of a node.")] = 48,
    complexity: Annotated[int, typer.Option(min=1, help="Candidates while building; more is better and slower.")] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of DiskANN. Left out, every CPU.")] = None,
    memory_gb: Annotated[float, typer.Option(help="Above this DiskANN builds the graph in shards.")] = 4.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages embedded and written at once.")] = 1024,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the index that is in DIR.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what an unfinished build has done.")] = False,
) -> None:
    """Build an index: cut documents into passages, embed them, and let DiskANN build its graph.

    A build that ends early, by Ctrl-C, an error or kill -9, is kept beside DIR; the same command goes on from there.
    """
    console = Console(stderr=True)
    with shown_errors():
        from stream2llm_sdk.retrievers.diskann.build import BuildOptions, build_index, unfinished_build
        from stream2llm_sdk.retrievers.diskann.build_folder import check_target, discard_unfinished_build
        from stream2llm_sdk.retrievers.diskann.corpus import CorpusColumns, open_corpus
        from stream2llm_sdk.retrievers.diskann.manifest import check_metric
        from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter

        check_target(out.resolve(), overwrite)
        work = unfinished_build(out)
        if restart:
            discard_unfinished_build(out)
        columns = CorpusColumns(text_column, source_column, title_column, tuple(keep) if keep else None)
        documents = open_corpus(corpus, columns=columns, skip_bad=skip_bad, limit=limit)
        splitter = None
        if passage_tokens:
            splitter = PassageSplitter(passage_tokens, overlap_tokens=overlap_tokens, tokenizer=tokenizer)
        options = BuildOptions(graph_degree, complexity, threads, memory_gb, batch_size)
        start = time.perf_counter()
        with _Bar(console, documents) as bar:
            try:
                chosen = _embedder(embedder, api_key_env, documents, splitter, work, bar)
                index = build_index(
                    documents,
                    out,
                    embedder=chosen,
                    metric=check_metric(metric.value),
                    splitter=splitter,
                    filterable=tuple(filterable or ()),
                    options=options,
                    overwrite=overwrite,
                    resume=True,
                    skip_bad=skip_bad,
                    on_progress=bar.advance,
                    on_stage=bar.begin,
                )
            except KeyboardInterrupt:
                bar.stop()
                kept = f"What is done is kept in {work}; the same command goes on from there." if work.exists() else ""
                console.print(f"Stopped. {kept}", markup=False, highlight=False)
                raise typer.Exit(STOPPED) from None
        index.close()
        _show_done(out, time.perf_counter() - start)


def _show_done(directory: Path, elapsed_s: float) -> None:
    from stream2llm_sdk.retrievers.diskann.manifest import Manifest

    manifest = Manifest.read(directory)
    pieces = "documents" if manifest.splitter is None else f"passages of {manifest.num_sources:,} documents"
    left_out = f", {manifest.num_skipped:,} left out" if manifest.num_skipped else ""
    done = f"{directory}: {manifest.num_documents:,} {pieces}{left_out} in {elapsed_s:.1f} s"
    Console().print(done, markup=False, highlight=False, soft_wrap=True)


def _embedder(
    spec: str,
    api_key_env: str | None,
    documents: Corpus,
    splitter: PassageSplitter | None,
    work: Path,
    bar: _Bar,
) -> Embedder:
    from stream2llm_sdk.retrievers.embedding import EndpointEmbedder, SparseEmbedder, embedder_of
    from stream2llm_sdk.retrievers.embedding.sparse_embedder import SPARSE_FILE

    kind, _, rest = spec.partition(":")
    if kind != "endpoint" and api_key_env is not None:
        raise ConfigurationError("--api-key-env is for endpoints: give --embedder endpoint:MODEL@URL, or leave it out")
    if kind == "endpoint" and "@" in rest:
        model, _, url = rest.rpartition("@")
        return EndpointEmbedder(model, url, api_key_env=api_key_env)
    if kind != "sparse":
        return embedder_of(spec)
    if (work / SPARSE_FILE).is_file():
        return SparseEmbedder.load(work)
    try:
        dim = int(rest or 512)
    except ValueError:
        raise ConfigurationError(f"--embedder {spec!r}: give sparse, or sparse:512 for 512 dimensions") from None
    bar.say("fitting the sparse embedder")
    return SparseEmbedder.fit(_texts(documents, splitter), dim=dim, max_texts=_SPARSE_SAMPLE)


def _texts(documents: Iterable[Any], splitter: PassageSplitter | None) -> Iterator[str]:
    remaining = iter(documents)
    while batch := list(islice(remaining, _SPLIT_AT_ONCE)):
        for passages in splitter.split(batch) if splitter else [[document] for document in batch]:
            for passage in passages:
                yield passage.text


class _Bar:
    """The progress of a build: how much of the corpus is read, passages a second, and the time left."""

    def __init__(self, console: Console, documents: Corpus) -> None:
        self._documents = documents
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%" if documents.size_bytes else ""),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=documents.size_bytes, count="")
        self._embedded_before = 0
        self._began_s = time.monotonic()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stop(self) -> None:
        self._progress.stop()

    def say(self, what: str) -> None:
        """What is going on, of no known length."""
        self._progress.reset(self._task, total=None, description=what, count="")

    def begin(self, stage: str, num_embedded: int) -> None:
        """A stage of the build."""
        if stage == "embed":
            self._embedded_before, self._began_s = num_embedded, time.monotonic()
            what = "embedding" if num_embedded == 0 else f"going on after {num_embedded:,} passages"
            self._progress.reset(self._task, total=self._documents.size_bytes, description=what, count="")
        else:
            self.say(f"building the graph of {num_embedded:,} passages" if stage == "graph" else "finishing")

    def advance(self, num_embedded: int) -> None:
        """So many passages are embedded."""
        rate = (num_embedded - self._embedded_before) / max(time.monotonic() - self._began_s, 1e-9)
        count = f"{num_embedded:,} passages, {rate:,.0f}/s"
        self._progress.update(self._task, completed=self._documents.bytes_read, count=count)
