from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from whippletree import doctor

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=<]", text)[0] for text in requirements}


def test_everything_that_an_extra_brings_is_looked_for() -> None:
    extras = {extra: names(wanted) for extra, wanted in PROJECT["optional-dependencies"].items() if extra != "dev"}
    assert set().union(*extras.values()) - {"whippletree"} == set(doctor.OPTIONAL)
    for name, (_, advice) in doctor.OPTIONAL.items():
        extra = re.search(r"whippletree\[(.+)\]", advice)
        assert name in (extras[extra[1]] if extra else advice), "the advice gets what is missing"


def test_what_is_needed_is_what_the_package_declares() -> None:
    needed = doctor.requirements()
    assert needed == {
        name: text.partition(">=")[2]
        for text in metadata.requires("whippletree") or ()
        if ";" not in text and (name := text.partition(">=")[0])
    }
    assert doctor.requirements(extras=True)["peft"] == "0.21"


@pytest.mark.parametrize(
    ("version", "least", "expected"),
    [
        ("2.7.0", "2.7", False),
        ("2.7", "2.7", False),
        ("2.13.0+cpu", "2.7", False),
        ("2.6.9", "2.7", True),
        ("0.9", "0.21", True),
        ("3", "2.99.1", False),
        ("1.0", "", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, expected: bool) -> None:
    assert doctor.older(version, least) == expected


def test_what_is_missing_or_too_old_is_named_with_the_remedy() -> None:
    found = list(doctor.libraries({"pytest": "1", "no-such-library": "3", "typer": "999"}))
    assert [(f.good, f.what) for f in found] == [(True, "libraries"), (False, "no-such-library"), (False, "typer")]
    assert found[0].found == f"pytest {metadata.version('pytest')}"
    assert found[1].found == "not installed: pip install 'no-such-library>=3'"
    assert found[2].found == f"{metadata.version('typer')} is too old: pip install 'typer>=999'"


def test_optional_things_are_never_needed_and_say_what_for() -> None:
    found = list(doctor.optional_libraries())
    assert not any(finding.needed for finding in found)
    for finding in found:
        assert finding.good or (doctor.OPTIONAL[finding.what][1] in finding.found and "; for " in finding.found)


def test_the_store_and_the_gateway_are_tried_and_not_assumed() -> None:
    assert [finding.good for finding in (*doctor.store(), *doctor.loopback())] == [True, True]


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken_library() -> list[doctor.Finding]:
        raise ImportError("libcudart.so is not there")

    assert doctor.examined(broken_library) == [
        doctor.Finding(False, "broken library", "ImportError: libcudart.so is not there", needed=True)
    ]
