"""What a recording's folder says of it: which kind it is, and how it is recorded."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.files import read_json_object, require_own_folder, write_json

__all__ = ["CONFIG_FILE", "begin_config", "check_settings", "prepare_config", "read_config", "writing"]

CONFIG_FILE = "recording.json"

_FORMAT = 1
_SHOWN_DIFFERENCES = 4


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigurationError where a recording's folder `path` cannot be written, and says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}. Make room and go on with the same command"
        ) from error


def prepare_config(path: Path, tag: str, settings: Mapping[str, Any], journal: Path) -> None:
    """Writes the configuration of the folder if nothing has been asked there yet.

    Raises:
        ConfigurationError: the folder holds something else.
        OSError: it cannot be written.
    """
    require_own_folder(path, (CONFIG_FILE,), "recording")
    if not (path / CONFIG_FILE).is_file() or not journal.is_file() or not journal.stat().st_size:
        begin_config(path, tag, settings)


def begin_config(path: Path, tag: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the configuration of a recording that begins, in place of an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    config = {"format": _FORMAT, "release": _release(), "recording_id": uuid.uuid4().hex, "begun_at": now}
    config |= {"tag": tag, "settings": settings}
    write_json(path / CONFIG_FILE, config)
    return config


def check_settings(path: Path, config: Mapping[str, Any], tag: str, settings: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where a recording in `path` was begun in another way, and names what differs."""
    if config["tag"] != tag:
        raise ConfigurationError(f"{path} holds a recording of {config['tag']!r}, not {tag!r}: name another folder")
    begun = config["settings"]
    different = [name for name in sorted({*begun, *settings}) if begun.get(name) != settings.get(name)]
    if different:
        shown = [_difference(name, begun.get(name), settings.get(name)) for name in different[:_SHOWN_DIFFERENCES]]
        if len(different) > len(shown):
            shown.append(f"and {len(different) - len(shown)} more")
        raise ConfigurationError(
            f"{path} was begun {'; '.join(shown)}. A recording goes on with the same settings: give these, or another "
            "folder"
        )


def _difference(name: str, begun: Any, now: Any) -> str:
    """How a setting was and is; one that is None, false or empty is as if it was not given."""
    is_given = [not (value is None or value is False or value in ("", [], {})) for value in (begun, now)]
    was, is_now = (
        f"with {name}={json.dumps(value, ensure_ascii=False):.200}" if given or not any(is_given) else f"without {name}"
        for value, given in zip((begun, now), is_given, strict=True)
    )
    return f"{was}, not {is_now}"


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of a folder.

    Raises:
        ConfigurationError: it cannot be read, or is of another version.
    """
    config = read_json_object(path / CONFIG_FILE, "a recording's settings")
    if config.get("format") != _FORMAT:
        raise ConfigurationError(
            f"{path / CONFIG_FILE} has format={config.get('format')!r}; this release reads {_FORMAT}"
        )
    for name, kind in (("tag", str), ("recording_id", str), ("settings", dict)):
        if not isinstance(config.get(name), kind):
            raise ConfigurationError(f"{path / CONFIG_FILE} has {name}={config.get(name)!r:.80}: it is damaged")
    return config


def _release() -> str:
    from stream2llm_sdk import __version__

    return __version__
