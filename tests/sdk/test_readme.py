"""What the README shows runs: its Python blocks in order, on an engine without a model and without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from .doc_blocks import ROOT, Blocks, take_offline

README = Blocks(ROOT / "README.md")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_offline(monkeypatch, tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("script", README.scripts)
def test_a_script_runs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    README.run_script(script)
    assert "In May." in capsys.readouterr().out


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # parts that are only made there are not closed
def test_the_fragments_run_one_after_another(tmp_path: Path) -> None:
    README.run_fragments(str(tmp_path))
