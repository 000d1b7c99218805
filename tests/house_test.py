"""Every rule of the house holds for every file, and every rule catches a file that breaks it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import pytest

from tests import house

Rule = Callable[[str, str], list[str]]

FILES = house.files()
PYTHON = {path: text for path, text in FILES.items() if path.endswith(".py")}
PAGES = {path: text for path, text in FILES.items() if path.endswith(".md")}
METHODS = {name for path in PYTHON if (name := house.method_name(path))}
RULES = {"tests/house.py", "tests/house_test.py"}  # they spell out what others may not say
LOOP, CREDIT, METHOD = "whippletree/loop.py", "whippletree/credit/group.py", "whippletree/methods/draco.py"


PROJECT = tomllib.loads(FILES["pyproject.toml"])["project"]

# imports all of the package but its tests, where the modules named as arguments are not installed
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import whippletree
for module in pkgutil.walk_packages(whippletree.__path__, "whippletree."):
    if not module.name.endswith(("_test", "conftest")):
        importlib.import_module(module.name)
"""


def modules(requirements: Iterable[str]) -> set[str]:
    """The names under which these requirements are imported."""
    return {re.split(r"[\[>=<]", requirement)[0].replace("-", "_") for requirement in requirements}


def declared() -> set[str]:
    """What may be imported: the standard library, this project, and each dependency."""
    wanted = modules([*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())])
    return {*sys.stdlib_module_names, "whippletree", "tests", "benchmarks", *wanted}


# ---- every rule holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [house.upward_imports, house.borrowed_from_methods, house.too_long, house.pickles])
def test_every_file_obeys(rule: Rule) -> None:
    assert [broken for path, text in PYTHON.items() for broken in rule(path, text)] == []


def test_every_import_is_declared() -> None:
    elsewhere = ("benchmarks/trl/", "recipes/harness/")  # these run in environments of their own
    files = {path: text for path, text in PYTHON.items() if not path.startswith(elsewhere)}
    assert [broken for path, text in files.items() for broken in house.undeclared_imports(path, text, declared())] == []


def test_the_package_is_imported_without_any_extra() -> None:
    extras = modules(chain(*PROJECT["optional-dependencies"].values())) - {"whippletree"}
    result = subprocess.run([sys.executable, "-c", IMPORT_ALL, *extras], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-1000:]


def test_the_core_is_small() -> None:
    assert house.core_size(PYTHON) < house.CORE_CODE


def test_no_method_is_named_outside_its_file() -> None:
    assert [broken for path, text in PYTHON.items() for broken in house.named_methods(path, text, METHODS)] == []


def test_every_method_has_its_test_beside_it() -> None:
    assert house.untested_methods(PYTHON) == []


def test_nothing_is_left_unfinished() -> None:
    files = {path: text for path, text in FILES.items() if path.endswith((".py", ".toml", "Makefile"))}
    broken = [hit for p, text in files.items() if p not in RULES for hit in house.matches(p, text, house.UNFINISHED)]
    assert broken == []


def test_no_file_names_a_registry_or_a_place_on_one_machine() -> None:
    files = {path: text for path, text in FILES.items() if path not in RULES}
    patterns = (house.HOSTS, house.MACHINE_PATHS)
    assert [hit for p, text in files.items() for pattern in patterns for hit in house.matches(p, text, pattern)] == []


def test_every_code_block_of_a_page_is_run_or_says_that_it_is_not() -> None:
    assert [broken for path, text in PAGES.items() for broken in house.unrun_blocks(path, text)] == []


@pytest.mark.parametrize("path", PAGES)
def test_the_code_blocks_of_a_page_run(path: str, tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "page"}
    with contextlib.chdir(tmp_path):
        for line, info, code in house.code_blocks(FILES[path]):
            if info == "python":
                exec(compile("\n" * line + code, str(house.ROOT / path), "exec"), names)
            if info == "toml":
                tomllib.loads(code)


# ---- every rule catches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("whippletree/types.py", "from whippletree.credit import group"),
        ("whippletree/types.py", "import whippletree.codec"),
        (CREDIT, "from whippletree.tree import pack"),
        (CREDIT, "from whippletree import tree"),
        (CREDIT, "from ..tree import pack"),
        (CREDIT, "from whippletree.codec import to_json"),
        (CREDIT, "def late():\n    from whippletree.methods.draco import METHOD"),
        (METHOD, "from whippletree.loop import train"),
    ],
)
def test_an_import_that_points_up_or_across_is_caught(path: str, text: str) -> None:
    assert len(house.upward_imports(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (LOOP, "from whippletree import codec, methods, types\nfrom whippletree.config import load"),
        (METHOD, "from whippletree import __version__, codec, credit, types"),
        (METHOD, "from whippletree.methods.rloo import METHOD"),
        (CREDIT, "from . import other\nfrom .other import mean\nfrom whippletree.credit.other import mean"),
        ("whippletree/credit/group_test.py", "from whippletree.models.tiny import tiny"),
        (CREDIT, "import torch\nfrom whippletree.types import Batch"),
    ],
)
def test_an_import_that_points_down_is_let_through(path: str, text: str) -> None:
    assert house.upward_imports(path, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "from whippletree.methods.rloo import loss",
        "from whippletree.methods import rloo\nx = rloo.loss(1)",
        "from whippletree.methods import rloo as base\nx = base.loss",
    ],
)
def test_a_method_that_borrows_a_function_is_caught(text: str) -> None:
    assert len(house.borrowed_from_methods(METHOD, text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from whippletree.methods import rloo\nx = rloo.METHOD.but()",
        "from whippletree.methods.grpo import METHOD as GRPO",
        "from whippletree.methods import _toy\nfrom whippletree.methods._tables import row\nx = _toy.chain",
    ],
)
def test_a_method_may_start_from_another_and_use_what_all_share(text: str) -> None:
    assert house.borrowed_from_methods(METHOD, text) == []


def test_an_undeclared_import_is_caught() -> None:
    text = "import json\nimport torch.nn\nfrom leftpad import pad"
    assert house.undeclared_imports(LOOP, text, declared()) == [f"{LOOP}:3 imports leftpad.pad"]


def test_code_is_counted_without_blanks_comments_and_docstrings() -> None:
    # lines 3, 7, 8 and 9 hold code: the definition, and one string over three lines
    assert (
        house.code_lines('"""Two\nlines."""\ndef f():\n    """Doc."""\n\n    # why\n    return """a\n\n    b"""\n') == 4
    )


def test_what_is_too_long_is_caught() -> None:
    lines = "\n".join(f"x{n} = {n}" for n in range(120))
    function = "def f():\n" + "\n".join(["    pass"] * 60)  # 61 lines
    assert len(house.too_long(METHOD, lines)) == 1
    assert house.too_long(LOOP, lines) == []
    assert len(house.too_long(LOOP, "\n" * 401)) == 1
    assert len(house.too_long(LOOP, function)) == 1
    assert house.too_long(LOOP, function.removesuffix("\n    pass")) == []


def test_the_core_is_counted_without_tests_and_without_methods() -> None:
    sources = dict.fromkeys([LOOP, METHOD, "whippletree/loop_test.py", "tests/a_test.py"], "x = 1\n")
    assert house.core_size(sources) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import whippletree.methods.draco",
        "from whippletree.methods.draco import METHOD",
        "if method == 'draco': pass",
        "find('whippletree.methods.draco:METHOD')",
        "sets = ['method=draco']",
        "def draco_mask(): pass",
        "def f(draco): pass",
        "f(draco=1)",
    ],
)
@pytest.mark.parametrize(
    "path", [LOOP, CREDIT, "whippletree/methods/contract_test.py", "whippletree/methods/__init__.py"]
)
def test_a_method_named_outside_its_file_is_caught(path: str, text: str) -> None:
    assert house.named_methods(path, text, {"draco", "rloo"}) != []


def test_prose_tests_and_methods_may_name_a_method() -> None:
    prose = '"""As draco does."""\n# draco\nraise ValueError("as draco does it")\ndraconian = 1'
    assert house.named_methods(CREDIT, prose, {"draco"}) == []
    for path in (METHOD, "whippletree/methods/rloo.py", "whippletree/loop_test.py", "benchmarks/step.py"):
        assert house.named_methods(path, "from whippletree.methods import draco", {"draco"}) == []


def test_a_method_without_a_test_is_caught() -> None:
    assert house.untested_methods([METHOD, "whippletree/methods/__init__.py"]) == [METHOD]
    assert house.untested_methods([METHOD, "whippletree/methods/draco_test.py"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.save(state, path)",
        "numpy.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
    ],
)
def test_a_pickle_is_caught(text: str) -> None:
    assert len(house.pickles(LOOP, text)) == 1


def test_weights_alone_may_be_loaded() -> None:
    assert house.pickles(LOOP, "torch.load(path, weights_only=True)\nnumpy.load(path)\njson.load(file)") == []


@pytest.mark.parametrize("text", ["# TODO: later", "raise NotImplementedError", "x = 0  # a placeholder"])
def test_unfinished_work_is_caught(text: str) -> None:
    assert len(house.matches(LOOP, text, house.UNFINISHED)) == 1


@pytest.mark.parametrize("text", ["x = '/home/me/model'", "cd /work/project", "open('/tmp/x')", "--dir=/root/cache"])
def test_a_place_on_one_machine_is_caught(text: str) -> None:
    assert len(house.matches(LOOP, text, house.MACHINE_PATHS)) == 1


@pytest.mark.parametrize("text", ["$HOME/work/x", "~/tmp/x", "http://host/home/x", "a/work/b", "/v1/models", "/tmp"])
def test_other_paths_are_let_through(text: str) -> None:
    assert house.matches(LOOP, text, house.MACHINE_PATHS) == []


def test_a_registry_host_is_caught() -> None:
    assert len(house.matches("Makefile", "pip install -i https://pypi.org/simple x", house.HOSTS)) == 1


def test_a_code_block_that_no_test_runs_is_caught() -> None:
    kinds = ("python", "sh", "", "sh not-run", "text")
    page = "".join(f"```{kind}\nmake\n```\n\n" for kind in kinds)  # four lines each: they start on 1, 5, 9, 13, 17
    assert [broken.split()[0] for broken in house.unrun_blocks("docs/a.md", page)] == ["docs/a.md:5", "docs/a.md:9"]
    assert [info for _, info, _ in house.code_blocks(page)] == list(kinds)


def test_a_file_is_a_method_only_in_the_folder_of_methods() -> None:
    names = {p: house.method_name(p) for p in (METHOD, "whippletree/methods/__init__.py", CREDIT, "docs/methods/a.py")}
    assert list(names.values()) == ["draco", None, None, None]
    assert house.method_name("whippletree/methods/draco_test.py") is None
