"""Optional libraries, loaded where they are needed."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.errors import MissingExtraError

__all__ = ["require_matplotlib", "require_pyarrow", "require_ray"]


def require_pyarrow() -> Any:
    """The module pyarrow.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "traces") from error
    return pyarrow


def require_matplotlib() -> Any:
    """The module matplotlib.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.style
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots") from error
    return matplotlib


def require_ray() -> Any:
    """The module ray, with Ray Data.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray
