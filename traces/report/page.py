"""The page of a report: one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2

from stream2llm_sdk.traces.report.figures import Picture
from stream2llm_sdk.traces.report.reported_run import ReportedRun
from stream2llm_sdk.traces.report.tables import Table, configurations, costs, figures, tenants

__all__ = ["page"]


def page(runs: Sequence[ReportedRun], pictures: Sequence[Picture], trace_files: Mapping[str, str]) -> str:
    """The page as HTML. Whatever comes of a run, a query or a tenant is escaped, and the page loads nothing.

    Args:
        runs: what is reported.
        pictures: its figures, in order.
        trace_files: the name of each run's trace beside the page, by the run's label.
    """
    # Strict, so that a value that is missing fails here, and not as a gap in front of a reader.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("page.html").read_text("utf-8"))
    tables = {"ttft": tenants(runs), "costs": costs(runs)}
    return template.render(
        title=f"Run {runs[0].label}" if len(runs) == 1 else f"{len(runs)} runs compared",
        about=_about(runs),
        runs=[{"label": run.label, "warnings": run.warnings, "trace_file": trace_files[run.label]} for run in runs],
        figures=figures(runs),
        pictures=[_shown(picture, tables.get(picture.name)) for picture in pictures],
        configuration=configurations(runs),
    )


def _about(runs: Sequence[ReportedRun]) -> str:
    facts = []
    for run in runs:
        engine = run.config.get("engine") or {}
        words = [str(engine[name]) for name in ("kind", "policy") if engine.get(name)]
        facts.append(f"{run.label}: {', '.join([*words, f'{len(run.run.requests):,} requests', run.state])}")
    return "; ".join(facts)


def _shown(picture: Picture, table: Table | None) -> dict[str, object]:
    data = base64.b64encode(picture.png).decode("ascii")
    return {
        "name": picture.name,
        "title": picture.title,
        "caption": picture.caption,
        "uri": f"data:image/png;base64,{data}",
        "table": table,
    }
