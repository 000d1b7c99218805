"""The files that describe harnesses: each loads, is tried by a case, and pins what is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness.cases import CASES
from whippletree.harness import load_launcher
from whippletree.harness.launched import read_launcher

FOLDER = Path(__file__).parent.parent.parent / "recipes" / "harness"
LAUNCHERS = {path.stem: read_launcher(path) for path in sorted(FOLDER.glob("*.toml"))}
CONFIGURATIONS = [(name, api) for name, launcher in LAUNCHERS.items() for api in launcher.api]


def test_thirteen_harnesses_are_described_and_each_configuration_is_tried():
    assert len(LAUNCHERS) == 13
    assert {(case.recipe, case.api) for case in CASES} == set(CONFIGURATIONS)


@pytest.mark.parametrize(("name", "api"), CONFIGURATIONS)
def test_a_configuration_loads(name: str, api: str):
    harness = load_launcher(FOLDER / f"{name}.toml", api=api)
    assert (harness.api, harness.recipes) == (api, FOLDER)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_a_file_pins_is_what_is_installed(name: str):
    pinned = set((FOLDER / "requirements.txt").read_text().split())
    package = json.loads((FOLDER / "package.json").read_text())
    installed = {
        f"{n}@{version}" for part in ("dependencies", "optionalDependencies") for n, version in package[part].items()
    }
    wanted = LAUNCHERS[name].packages
    assert {re.sub(r"\[.*\]", "", requirement) for requirement in wanted.pip} <= pinned
    assert set(wanted.npm) <= installed
    assert any(LAUNCHERS[name].version in text for text in (*wanted.pip, *wanted.npm))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_no_file_names_a_place_of_one_machine(name: str):
    # folders, addresses and keys are blanks, which each run fills in
    assert not re.search(r"https?://|localhost|(?<![\w}])/(usr|home|tmp)/", (FOLDER / f"{name}.toml").read_text())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_page_names_every_configuration_and_version(name: str):
    page = (FOLDER.parent.parent / "docs" / "harnesses.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|") and f"| {LAUNCHERS[name].version} |" in line]
    assert any(all(f"`{api}`" in row for api in LAUNCHERS[name].api) for row in rows)
