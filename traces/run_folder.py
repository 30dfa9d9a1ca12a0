"""The folder that a replay leaves behind: its files, their columns, and how to read them.

All times named `run_s` or `*_s` without another remark are seconds since the run began, on the clock of the replay (the
host's monotonic clock, or virtual time in a simulation). A run that was stopped and continued has several segments; the
times of a later segment go on where the segment before ended. Unknown values are null.

`config.json`: what was replayed, and how. Written first; a run is only continued with the same.
    schema_version, versions (package to version), engine (kind 'real' or 'simulated', model, policy, limits; a
    simulation's options), options (`ReplayOptions`), traces (count and fingerprint), prompts (how they were made).

`requests.parquet`: one row a request, in the order in which they ended (`REQUEST_COLUMNS`).
    request_id, query_id: its name in the engine; its trace's name.
    segment: number of the segment, from 0.
    tenant, tag, mode: whose it is; what kind of retrieval; 'append' or 'update'.
    is_streaming: whether its prompt was sent as it came, or whole when the last chunk was there.
    arrival_due_s, arrival_s: when the question should have come, and when it did.
    held_s: how long it then waited, because as many requests as `concurrency` allows were under way.
    context_complete_due_s, context_complete_s: when the last chunk should have been sent, and when it was.
    first_token_s, finished_s: when the client had the first and the last output token.
    ttft_from_context_complete_s: first_token_s - context_complete_s (the published definition: without the retrieval).
    ttft_from_request_s: first_token_s - arrival_s (what a person waits).
    e2e_latency_s: finished_s - arrival_s.
    send_due_s, send_s, send_taken_s, send_tokens: for each message when it was due, was sent, and had been taken by the
        engine; and how many new tokens it carried. Its lag is send_s - send_due_s.
    max_lag_s: the largest lag of its messages.
    num_prompt_tokens, num_output_tokens: the final prompt's length; tokens generated.
    num_tokens_computed, num_tokens_recomputed, num_tokens_invalidated, num_tokens_cached, num_tokens_loaded: run
        through the model; of these computed before and lost to others; made void by updates; found in the prefix cache;
        copied back from host memory.
    num_tokens_swapped: tokens whose KV was moved to host memory.
    num_recompute_preemptions, num_swap_preemptions: how often its KV was dropped, and moved to host memory.
    finish_reason: 'stop' or 'length'; 'abort' where the run was stopped; 'error'.
    error: type and message of the error that ended it.

`events.parquet`: what happened, one row an event (`EVENT_COLUMNS`). The rows of a request are next to each other and in
the order of time; requests follow each other in the order in which they ended.
    request_id, query_id: of the request; "" for events of the run.
    source: 'driver' (the replay's own, the published names: replay_start, query_delay, query_start, query_sleep,
        pipeline_pool_update, query_ttft, query_e2e_latency, replay_end, error) or 'engine' (a trail's: `EventType`).
    event: its name.
    run_s, monotonic_s, wall_s: when; on the run's clock, on the clock it was recorded with, and since the epoch. In a
        simulation all three are virtual time.
    duration_s: how long an engine's state lasted that began here (null for marks and ends), or what a driver event
        measured.
    segment: as above.
    data: a JSON object with the event's figures, "{}" for none.

`samples.parquet`: how the engine stood, one row about every `sample_every_s` (`SAMPLE_COLUMNS`).
    run_s, segment.
    num_requests: requests that had arrived and not ended.
    num_open_streams: those of them in the engine whose prompt was not complete.
    num_queued, num_scheduled, num_kv_on_gpu, num_preempted_recompute, num_preempted_swap: requests by their trail's
        state at this time. (Of requests whose trail is unknown nothing is counted.)
    kv_usage: share of the KV blocks in use, 0 to 1.
    num_free_blocks, num_host_blocks_used, num_parked: free KV blocks; blocks in host memory; open streams with nothing
        to compute.

`run_metrics.csv`: the same in the published form, see `run_metrics`.

`summary.json`: `state` ('complete', 'stopped' or 'failed'), `warnings` (what the run could not keep up with),
`figures` (`ReplayRun.summary`) and `num_segments`.

`journal.jsonl`: what the tables are made of, a line as each request ends. It is there until the run is complete; a
folder whose run was killed has nothing else beside `config.json`, and is read from it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import read_json_object
from stream2llm_sdk.traces.extras import require_pyarrow

if TYPE_CHECKING:
    import pyarrow

    from stream2llm_sdk.display.plots import Plot

__all__ = [
    "EVENT_COLUMNS",
    "REQUEST_COLUMNS",
    "SAMPLE_COLUMNS",
    "SCHEMA_VERSION",
    "TABLES",
    "WAY_OUT",
    "RunFolder",
]

SCHEMA_VERSION = 1
WAY_OUT = "Restore the folder, or replay into a new one"
"""What can be done about a folder that lost something, for errors."""
TABLES = ("requests", "events", "samples")

REQUEST_COLUMNS: Mapping[str, str] = {
    "request_id": "string",
    "query_id": "string",
    "segment": "int64",
    "tenant": "string",
    "tag": "string",
    "mode": "string",
    "is_streaming": "bool",
    "arrival_due_s": "double",
    "arrival_s": "double",
    "held_s": "double",
    "context_complete_due_s": "double",
    "context_complete_s": "double",
    "first_token_s": "double",
    "finished_s": "double",
    "ttft_from_context_complete_s": "double",
    "ttft_from_request_s": "double",
    "e2e_latency_s": "double",
    "send_due_s": "list<double>",
    "send_s": "list<double>",
    "send_taken_s": "list<double>",
    "send_tokens": "list<int64>",
    "max_lag_s": "double",
    "num_prompt_tokens": "int64",
    "num_output_tokens": "int64",
    "num_tokens_computed": "int64",
    "num_tokens_recomputed": "int64",
    "num_tokens_invalidated": "int64",
    "num_tokens_cached": "int64",
    "num_tokens_loaded": "int64",
    "num_tokens_swapped": "int64",
    "num_recompute_preemptions": "int64",
    "num_swap_preemptions": "int64",
    "finish_reason": "string",
    "error": "string",
}
"""Columns of `requests.parquet` and their Arrow types."""

EVENT_COLUMNS: Mapping[str, str] = {
    "request_id": "string",
    "query_id": "string",
    "source": "string",
    "event": "string",
    "run_s": "double",
    "monotonic_s": "double",
    "wall_s": "double",
    "duration_s": "double",
    "segment": "int64",
    "data": "string",
}
"""Columns of `events.parquet` and their Arrow types."""

SAMPLE_COLUMNS: Mapping[str, str] = {
    "run_s": "double",
    "segment": "int64",
    "num_requests": "int64",
    "num_open_streams": "int64",
    "num_queued": "int64",
    "num_scheduled": "int64",
    "num_kv_on_gpu": "int64",
    "num_preempted_recompute": "int64",
    "num_preempted_swap": "int64",
    "kv_usage": "double",
    "num_free_blocks": "int64",
    "num_host_blocks_used": "int64",
    "num_parked": "int64",
}
"""Columns of `samples.parquet` and their Arrow types."""


def to_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> pyarrow.Table:
    """Rows as an Arrow table of these columns; what a row lacks is null."""
    pa = require_pyarrow()
    lists = {"list<double>": pa.list_(pa.float64()), "list<int64>": pa.list_(pa.int64())}
    schema = pa.schema([(name, lists.get(kind) or pa.type_for_alias(kind)) for name, kind in columns.items()])
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, for reading. Nothing is read before it is asked for.

    Attributes:
        path: where it is.
    """

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The folder at `path`.

        Raises:
            ConfigurationError: it is no run's folder, or of a schema that this version does not know.
        """
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise ConfigurationError(f"there is no folder {folder.path}: give the folder that a replay wrote")
        if not folder.config_file.is_file():
            raise ConfigurationError(f"{folder.path} holds no config.json: give the folder that a replay wrote")
        version = folder.config().get("schema_version")
        if version != SCHEMA_VERSION:
            raise ConfigurationError(
                f"{folder.config_file} has schema_version={version!r}; this version reads {SCHEMA_VERSION}"
            )
        return folder

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def journal_file(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def metrics_file(self) -> Path:
        """The published form, `run_metrics.csv`."""
        return self.path / "run_metrics.csv"

    def table_file(self, name: str) -> Path:
        """The Parquet file of the table `name`: 'requests', 'events' or 'samples'."""
        return self.path / f"{name}.parquet"

    def config(self) -> dict[str, Any]:
        """What was replayed, and how."""
        return read_json_object(self.config_file, "a run's configuration")

    def summary(self) -> dict[str, Any]:
        """How the run went; `state` is 'interrupted' for one that was killed."""
        if self.summary_file.is_file():
            found = read_json_object(self.summary_file, "a run's summary")
            if not isinstance(found.get("state"), str):
                raise ConfigurationError(f"{self.summary_file} has state={found.get('state')!r}. {WAY_OUT}")
            return found
        return {
            "state": "interrupted",
            "warnings": ["the run was killed: continue it, or take these figures as those of a part"],
            "figures": {},
        }

    @property
    def state(self) -> str:
        """'complete', 'stopped', 'failed' or 'interrupted'."""
        return str(self.summary()["state"])

    def requests(self) -> pyarrow.Table:
        """One row a request."""
        return self._table("requests")

    def events(self) -> pyarrow.Table:
        """One row an event."""
        return self._table("events")

    def samples(self) -> pyarrow.Table:
        """One row a sample."""
        return self._table("samples")

    def plot(self, *, most: int = 40) -> Plot:
        """The timeline of the run: a row a request, coloured by what it was doing.

        Args:
            most: so many requests at most: those in a row, by arrival, that together waited longest for the engine.

        Raises:
            ConfigurationError: `most` is not at least 1, no request has ended yet, or the folder is damaged.
            MissingExtraError: pyarrow is not installed.
        """
        if most < 1:
            raise ConfigurationError(f"most must be at least 1, got {most}")
        from stream2llm_sdk.display.timeline_view import timeline_plot

        return timeline_plot(self, most)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.run_view import folder_html

        return folder_html(self)

    def _table(self, name: str) -> pyarrow.Table:
        pa = require_pyarrow()
        file = self.table_file(name)
        if file.is_file():
            try:
                return pa.parquet.read_table(file)
            except pa.ArrowException as error:
                raise ConfigurationError(f"{file} cannot be read: {error}. Replay again, or restore it") from error
        # A summary is written last. Without the journal that tables are made of, they would read as empty ones.
        if self.summary_file.is_file() and not self.journal_file.is_file():
            raise ConfigurationError(f"{file} is missing. {WAY_OUT}")
        from stream2llm_sdk.traces.run_journal import read_journal
        from stream2llm_sdk.traces.run_tables import tables_of

        return tables_of(list(read_journal(self.journal_file)), self.config())[name]
