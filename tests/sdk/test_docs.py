"""The documentation's pages: what they show runs, what they link to is there, and every command is explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stream2llm_sdk.serving import POLICIES, SchedulerMetrics

from .doc_blocks import ROOT, Blocks, load_reference, take_offline

DOCS = ROOT / "docs"
PAGES = {page.stem: Blocks(page) for page in sorted(DOCS.glob("*.md")) if page.stem != "command-line"}
SLOW = {"traces-and-simulation"}  # imports vLLM


reference = load_reference()
COMMANDS = dict(reference.commands())


def pages() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name, page in PAGES.items()
        if page.fragments
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_offline(monkeypatch, tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("script", [(name, script) for name, page in PAGES.items() for script in page.scripts])
def test_a_script_runs(script: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name, text = script
    PAGES[name].run_script(text)
    assert "In May." in capsys.readouterr().out


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # parts that are only made there are not closed
@pytest.mark.parametrize("name", pages())
def test_the_fragments_of_a_page_run_one_after_another(name: str, tmp_path: Path) -> None:
    PAGES[name].run_fragments(str(tmp_path))


def anchor_of(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    without_code = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)}


@pytest.mark.parametrize("page", [ROOT / "README.md", *(blocks.page for blocks in PAGES.values())], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    generated = {f"reference/{name}.rst" for name in reference.REFERENCE} | {reference.COMMAND_LINE}
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if target.exists() and target.is_relative_to(DOCS) and str(target.relative_to(DOCS)) in generated:
            continue
        if str(target).removeprefix(f"{DOCS}/") in generated:
            continue
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    listed = set(re.findall(r"^([\w\-/]+)$", "\n".join(re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL)), re.M))
    generated = {f"reference/{name}" for name in reference.REFERENCE} | {"command-line"}
    assert listed == (set(PAGES) - {"index"}) | generated


def test_every_notebook_is_named() -> None:
    assert set(re.findall(r"`(\d\d_\w+)`", PAGES["index"].text)) == {
        notebook.stem for notebook in (ROOT / "notebooks").glob("*.ipynb")
    }


def test_every_extra_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    table = PAGES["index"].text.partition("## Install")[2].partition("## ")[0]
    shown = {
        name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert set(extras) <= shown


def test_every_policy_is_explained() -> None:
    text = PAGES["engine-and-policies"].text
    assert set(re.findall(r"^\| `([A-Z_0-9]+)` \|", text, re.MULTILINE)) == set(POLICIES)


def test_every_metric_is_explained() -> None:
    pytest.importorskip("prometheus_client")
    rendered = re.findall(r"^# TYPE stream2llm_(\w+) ", SchedulerMetrics().render(), re.MULTILINE)
    shown = set(re.findall(r"`([a-z_]+)`", PAGES["deployment"].text))
    assert {name for name in rendered if not name.endswith("_created")} <= shown


@pytest.mark.parametrize("path", COMMANDS)
def test_a_command_says_what_it_and_all_its_options_do(path: str) -> None:
    command = COMMANDS[path]
    assert command.help
    for parameter in command.params:
        assert parameter.name == "help" or (parameter.help or "").strip().endswith((".", "?")), parameter.name


@pytest.mark.parametrize("path", [path for path in COMMANDS if " " in path])
def test_a_list_of_commands_says_each_one_whole_in_eighty_columns(path: str) -> None:
    assert not COMMANDS[path].get_short_help_str(limit=62).endswith("...")


def shown_commands() -> set[str]:
    """What is typed in the pages, from `stream2llm` to the first argument."""
    text = "\n".join([*(page.text for page in PAGES.values()), (ROOT / "README.md").read_text("utf-8")])
    found = set()
    for typed in re.findall(r"\bstream2llm((?: [a-z]+)+)", text):
        words = ["stream2llm", *typed.split()]
        while len(words) > 1 and " ".join(words) not in COMMANDS:
            words.pop()
        found.add(" ".join(words))
    return found


def test_every_command_is_shown_in_the_pages() -> None:
    groups = {path for path, command in COMMANDS.items() if getattr(command, "commands", None)}
    assert shown_commands() - groups == set(COMMANDS) - groups


def test_options_that_are_shown_exist() -> None:
    options = [each for command in COMMANDS.values() for each in command.params]
    known = {"--help", *(flag for each in options for flag in (*each.opts, *each.secondary_opts))}
    for page in [*PAGES.values(), Blocks(ROOT / "README.md")]:
        for line in re.findall(r"stream2llm [a-z].*", page.text):
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", line):
                assert option in known, line


@pytest.mark.slow  # imports every part
def test_the_reference_is_made_of_what_is_there() -> None:
    page = reference.command_line_page()
    assert all(f"\n## {path}\n" in page for path in COMMANDS)
    text = "\n".join(reference.reference_page(packages) for packages in reference.REFERENCE.values())
    assert ".. autoclass:: stream2llm_sdk.StreamingRAG" in text
    assert ".. py:data:: stream2llm_sdk.ContextUpdate" in text
