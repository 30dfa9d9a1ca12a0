"""The options by which a recording runs on a Ray cluster, for the commands `stream2llm trace record …`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from stream2llm_sdk.traces.recording.recorder import OutcomeSource

__all__ = ["RayActorsOption", "RayOption", "outcome_source"]

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Record on a Ray cluster: its address (auto, ray://HOST:10001, HOST:6379), or local to start one here.",
    ),
]
RayActorsOption = Annotated[
    int | None,
    typer.Option(
        "--ray-actors", min=1, help="Recorders on the cluster. Left out, as many as it has CPUs for, but one."
    ),
]


def outcome_source(
    ray: str | None, ray_actors: int | None, *, cpus_per_actor: float, batch_size: int | None = None
) -> OutcomeSource:
    """Where the questions are asked: here, or on the cluster.

    Raises:
        ConfigurationError: `--ray-actors` without `--ray`.
        MissingExtraError: Ray is not installed.
    """
    from stream2llm_sdk.traces.recording.run import record_here

    if ray is None:
        if ray_actors is not None:
            raise ConfigurationError("--ray-actors is for recordings on Ray: give --ray ADDRESS too, or leave it out")
        return record_here
    from stream2llm_sdk.traces.recording.ray_run import record_on_ray

    return record_on_ray(ray, num_actors=ray_actors, cpus_per_actor=cpus_per_actor, batch_size=batch_size)
