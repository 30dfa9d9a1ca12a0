"""Reports of runs: a page with its figures, and traces for a trace viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stream2llm_sdk.traces.report.write import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    # Reading runs takes numpy, which a program that only names the package need not wait for.
    if name == "write_report":
        from stream2llm_sdk.traces.report.write import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
