from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whippletree.analysis.measuring import Experiment, commit, digest, measure_all, sources
from whippletree.types import Json

Written = Callable[..., str]

CLAIMED = """
import os
from functools import partial
from pathlib import Path
from {package} import toy
from whippletree.types import Claim

def measure(arm, seed, *, log):
    with open(log, "a") as file:
        print(arm, seed, file=file)
    print("this is no answer", flush=True)
    if arm == "dies" and seed == 3:
        os._exit(9)
    if arm == "threads":
        return float(os.environ["OMP_NUM_THREADS"])
    return toy.paid(arm, seed)

CLAIM = Claim(says="b pays", baseline="a", method="b", measure=partial(measure, log=Path({log!r})), better="higher",
              seeds=3, arms={arms!r})
"""
TOY = "def paid(arm, seed):\n    return seed + (arm == 'b')\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Written]:
    """Writes a package with a claim and its toy; the name of the claim's module."""
    monkeypatch.syspath_prepend(tmp_path)
    package = f"claimed_by_{request.node.name}"

    def write(**arms: str) -> str:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "toy.py").write_text(TOY)
        (folder / "claim.py").write_text(
            CLAIMED.format(package=package, log=str(tmp_path / "log"), arms=arms),
        )
        return f"{package}.claim"

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def ran(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(lines)


def measure(module: str, seeds: range, stored: Json | None = None, *, jobs: int = 1) -> Json:
    experiment = Experiment("it", module, seeds, stored or {})
    asyncio.run(measure_all([experiment], jobs=jobs, told=lambda *told: None))
    return experiment.record()


# ---- processes --------------------------------------------------------------------------------------------------


def test_all_arms_have_the_same_seeds_in_processes_of_one_thread(written: Written, tmp_path: Path) -> None:
    found = measure(written(single="threads"), range(1000, 1003), jobs=2)
    assert ran(tmp_path) == [f"{arm} {seed}" for arm in ("a", "b", "threads") for seed in (1000, 1001, 1002)]
    values = {arm: [run["value"] for run in of.values()] for arm, of in found["runs"].items()}
    assert values == {"baseline": [1000, 1001, 1002], "method": [1001, 1002, 1003], "single": [1, 1, 1]}
    assert all(list(of) == ["1000", "1001", "1002"] for of in found["runs"].values())
    assert (found["verdict"], found["differences"]["method"]["value"], found["seeds"]) == ("held", 1.0, [1000, 1002])


def test_what_was_measured_is_not_measured_again(written: Written, tmp_path: Path) -> None:
    module = written()
    first = measure(module, range(2))
    ran(tmp_path)
    more = measure(module, range(3), first)
    assert ran(tmp_path) == ["a 2", "b 2"]
    again = measure(module, range(3), {**more, "commit": "as it was"})
    assert ran(tmp_path) == []
    assert again == {**more, "commit": "as it was"}  # nothing new, so its origin stays
    assert measure(module, range(1, 3), more)["runs"]["method"].keys() == {"1", "2"}


def test_changed_code_of_the_toy_is_measured_anew_and_a_changed_comment_is_not(
    written: Written, tmp_path: Path
) -> None:
    module = written()
    toy = tmp_path / module.partition(".")[0] / "toy.py"
    first = measure(module, range(1))
    ran(tmp_path)
    toy.write_text('"""A toy."""  # of two arms\n' + TOY)
    assert Experiment("it", module, range(1), first).missing() == []
    toy.write_text(TOY.replace("'b'", "'c'"))
    assert Experiment("it", module, range(1), first).missing() == [("baseline", 0), ("method", 0)]


def test_a_process_that_dies_leaves_its_seed_missing_and_it_is_tried_again(written: Written, tmp_path: Path) -> None:
    module = written(frail="dies")
    found = measure(module, range(2, 5))
    assert found["arms"]["frail"]["missing"] == {"3": "its process ended with status 9"}
    assert (found["arms"]["frail"]["seeds"], found["arms"]["method"]["seeds"]) == (2, 3)
    ran(tmp_path)
    assert Experiment("it", module, range(2, 5), found).missing() == [("frail", 3)]


def test_code_that_changes_while_it_is_measured_is_refused(written: Written, tmp_path: Path) -> None:
    module = written()
    experiment = Experiment("it", module, range(1))
    (tmp_path / module.partition(".")[0] / "toy.py").write_text(TOY + "paid = None\n")
    with pytest.raises(ExceptionGroup) as refused:
        asyncio.run(measure_all([experiment], jobs=1, told=lambda *told: None))
    assert "the code of it is to stay as it is" in str(refused.value.exceptions[0])
    assert experiment.missing() == [("baseline", 0), ("method", 0)]


# ---- what a number depends on -----------------------------------------------------------------------------------


def test_the_sources_of_a_module_are_all_that_it_imports_from_its_package_and_ours(written: Written) -> None:
    module = written()
    package = module.partition(".")[0]
    found = sources(module)
    assert {package, module, f"{package}.toy", "whippletree.types", "whippletree.batch"} <= found.keys()
    assert not any(name.partition(".")[0] in ("os", "functools", "torch") for name in found)
    assert "whippletree.analysis.measuring" not in found
    assert sources("there.is.none") == {}


def test_a_digest_is_of_code_alone(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "x.py").write_text(text)
        return digest({"x": tmp_path / "x.py"})

    plain = of("def f(a):\n    return a\n")
    assert of('"""Doc."""\n\n\ndef f(a):  # why\n    """Doc."""\n    return (a)\n') == plain
    assert of("def f(a):\n    return -a\n") != plain
    assert of('def f(a):\n    return a\n\n\nx = "no docstring"\n') != plain


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, env=dict(os.environ))


def test_the_commit_is_marked_where_a_file_differs_from_it(tmp_path: Path) -> None:
    files = {"x": tmp_path / "x.py"}
    files["x"].write_text("x = 1\n")
    assert commit(files) == ""
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "x.py")
    git(tmp_path, "commit", "-q", "-m", "x")
    (tmp_path / "other.py").touch()
    assert len(commit(files)) == 40
    files["x"].write_text("x = 2\n")
    assert (len(commit(files)), commit(files)[-1]) == (41, "+")
