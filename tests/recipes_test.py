"""docs/recipes.md lists every setting as it is; `python -m tests.recipes_test` writes its tables anew."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from tests import house
from whippletree import config, methods

PAGE = house.ROOT / "docs" / "recipes.md"
START, END = "<!-- settings: python -m tests.recipes_test writes them -->\n", "<!-- end of settings -->\n"
RECIPES = sorted((house.ROOT / "recipes").glob("*.toml"))
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
WORDS = {bool: "true or false", int: "integer", float: "number", str: "string", dict: "table"}


def kind(annotation: Any) -> str:
    """What a person writes for a setting of this type."""
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin is tuple:
        return f"array of {kind(inner[0])}"
    if origin in WORDS:
        return WORDS[origin]
    if type(None) in inner:
        return kind(inner[0])
    if isinstance(annotation, type):
        return "table"
    return ", ".join(f"`{json.dumps(word)}`" for word in inner)


def row(name: str, field: FieldInfo) -> str:
    """One line of a table: the setting, what may be written, what stands where nothing is written, what it means."""
    limits = [
        f"{sign} {getattr(limit, key):g}"
        for limit in field.metadata
        for key, sign in SIGNS.items()
        if hasattr(limit, key)
    ]
    written = " ".join([kind(field.annotation), " and ".join(limits)]).strip()
    given = field.get_default(call_default_factory=True)
    default = "required" if field.is_required() else f"`{json.dumps(given)}`" if given not in (None, {}, ()) else ""
    return f"| `{name}` | {written} | {default} | {(field.description or '').replace('|', chr(92) + '|')} |"


def tables(section: type[config.Section] = config.Recipe, path: str = "") -> Iterator[str]:
    """A heading and a table for each table of a recipe, outermost first."""
    inside = config.sections(section)
    yield f"### {f'`[{path}]`' if path else 'Top level'}\n"
    yield "| setting | type | default | meaning |\n|---|---|---|---|"
    yield from (row(name, field) for name, field in section.model_fields.items() if name not in inside)
    yield ""
    for name, other in inside.items():
        if other is config.TasksSection and path:
            yield f"### `[{path}.{name}]`\n\n{section.model_fields[name].description}: the settings of `[tasks]`.\n"
        else:
            array = get_origin(section.model_fields[name].annotation) is tuple
            yield from tables(other, f"[{name}]" if array else name)


def test_the_page_lists_every_setting_as_it_is() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    assert rest.partition(END)[0] == "\n".join(tables()), "write them anew with: python -m tests.recipes_test"


def test_a_table_says_what_may_be_written() -> None:
    listed = "\n".join(tables())
    assert "| `steps` | integer ≥ 1 | `100` | updates of the policy |" in listed
    assert "| `beta1` | number ≥ 0 and < 1 | `0.9` |" in listed
    assert '| `dtype` | `"auto"`, `"float32"`, `"bfloat16"` | `"auto"` |' in listed
    assert "| `context` | integer ≥ 2 |  | most tokens" in listed
    assert "| `source` | string | required |" in listed
    assert '| `sinks` | array of `"tensorboard"`, `"wandb"`' in listed
    assert "### `[[rewards]]`" in listed
    assert "### `[evaluation.tasks]`" in listed


@pytest.mark.parametrize("block", [code for _, info, code in house.code_blocks(PAGE.read_text()) if info == "toml"])
def test_each_recipe_of_the_page_is_taken(block: str) -> None:
    assert config.parse(tomllib.loads(block)).method in methods.names()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_of_the_folder_names_a_method_and_says_what_it_is_for(path: Path) -> None:
    assert config.load(path).method in methods.names()
    assert path.read_text().startswith("# ")


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + "\n".join(tables()) + END + rest.partition(END)[2], encoding="utf-8")
