from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whippletree import cli
from whippletree.analysis.claims import LEAST, arms, summarised
from whippletree.analysis.measuring import claim_in
from whippletree.claiming import FIRST, names, prepared, stored
from whippletree.report.claims import page, picture
from whippletree.types import Json

DOCS = Path(__file__).parent.parent / "docs"
KEPT = sorted((DOCS / "claims").glob("*.json"))

CLAIM = """
from whippletree.types import Claim

CLAIM = Claim(says="three is more than two", baseline=2, method=3, measure=lambda arm, seed: arm * seed,
              better="higher", seeds=3)
"""


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a claim whose measure is no function that could be pickled."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "claims_three.py").write_text(CLAIM)
    yield "claims_three"
    sys.modules.pop("claims_three", None)


def test_claims_are_kept_with_their_picture_and_the_table_is_written(three: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    [record] = stored([three], docs=docs, jobs=2)
    assert record["seeds"] == [FIRST, FIRST + 2]
    assert record["runs"]["method"]["1002"]["value"] == 3006
    # differences are the seeds themselves: 1000, 1001, 1002
    assert record["differences"]["method"]["value"] == 1001
    assert json.loads((docs / "claims" / f"{three}.json").read_text(encoding="utf-8")) == record
    assert (docs / "claims" / f"{three}.svg").read_text(encoding="utf-8") == picture(record)
    text = (docs / "claims.md").read_text(encoding="utf-8")
    assert "**held**" in text and page(text, [record]) == text
    again = stored([three], docs=docs, jobs=2)
    assert again == [record] and (docs / "claims.md").read_text(encoding="utf-8") == text


def test_the_command_prints_a_claim_with_seeds_of_its_own_and_keeps_nothing(three: str, tmp_path: Path) -> None:
    words = ["claim", three, "--seeds", "2", "--first-seed", "7", "--json"]
    result = CliRunner().invoke(cli.app, words, env={"TERM": "dumb"})
    record = json.loads(result.stdout)
    assert {arm: [run["value"] for run in of.values()] for arm, of in record["runs"].items()} == {
        "baseline": [14, 16],
        "method": [21, 24],
    }
    assert record["verdict"] == "inconclusive"  # of two seeds
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_a_claim_has_its_own_number_of_seeds_from_the_first_on(three: str) -> None:
    assert prepared(three, first=100).seeds == range(100, 103)
    assert prepared(three, first=100, seeds=9).seeds == range(100, 109)


def test_what_has_no_claim_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no method or module 'nope'; claims are in {names()[0]}"):
        prepared("nope", first=0)
    with pytest.raises(ValueError, match=r"whippletree\.methods\.grpo has CLAIM = None"):
        prepared("grpo", first=0)


@pytest.mark.parametrize("name", names())
def test_every_claim_of_the_folder_can_be_run(name: str) -> None:
    claim = claim_in(f"whippletree.methods.{name}")
    assert claim.seeds >= LEAST and claim.better in ("higher", "lower") and claim.says
    assert list(arms(claim))[:2] == ["baseline", "method"]


# ---- the table in the docs --------------------------------------------------------------------------------------


def near(told: Json) -> Json:
    """The same with nine places of each number: the last ones are those of a processor."""
    rounded: Json = json.loads(json.dumps(told), parse_float=lambda text: float(f"{float(text):.9g}"))
    return rounded


def test_the_table_of_claims_is_what_the_kept_numbers_give() -> None:
    text = (DOCS / "claims.md").read_text(encoding="utf-8")
    assert page(text, [json.loads(path.read_text(encoding="utf-8")) for path in KEPT]) == text


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_claim_is_what_its_runs_give(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    found = summarised(record["runs"], better=record["better"])
    assert near(found) == near({key: record[key] for key in found})
    first, last = record["seeds"]
    assert first == FIRST and record["commit"]
    for of in record["runs"].values():
        assert list(of) == [str(seed) for seed in range(first, last + 1)]
    assert path.with_suffix(".svg").read_text(encoding="utf-8") == picture(record)
