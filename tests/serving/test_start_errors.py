"""Why an engine did not start, from what its processes logged."""

from __future__ import annotations

import logging
import logging.config
import os
from pathlib import Path

import pytest

from stream2llm_sdk.serving import start_errors
from stream2llm_sdk.serving.start_errors import noted_errors


def test_the_first_error_of_a_chain_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "errors.log"
    config = start_errors._logging_config(log)
    # vLLM's logger itself is left to the other tests.
    config["loggers"] = {"vllm_of_a_core": config["loggers"]["vllm"]}
    assert config["loggers"]["vllm_of_a_core"]["handlers"] == ["vllm", "errors"]
    logging.config.dictConfig(config)
    logger = logging.getLogger("vllm_of_a_core")
    try:
        try:
            try:
                raise ValueError("no room: 8 blocks\nare too few")
            except ValueError as error:
                raise RuntimeError("the core did not start") from error
        except RuntimeError:
            logger.exception("EngineCore failed to start.")
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
    assert start_errors._first_error(log) == "no room: 8 blocks"


def test_nothing_was_logged(tmp_path: Path) -> None:
    assert start_errors._first_error(tmp_path / "absent.log") == ""
    (tmp_path / "other.log").write_text("something went on\n")
    assert start_errors._first_error(tmp_path / "other.log") == ""


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH", raising=False)
    with noted_errors() as reason:
        assert Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).is_file()
        assert reason() == ""
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ


def test_somebodys_own_configuration_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "mine.json")
    with noted_errors() as reason:
        assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "mine.json"
        assert reason() == ""
    assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "mine.json"
