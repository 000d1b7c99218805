from __future__ import annotations

import math
import tomllib
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whippletree import toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # all but half surrogates, which UTF-8 cannot write
PLAIN = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=12)


@given(st.dictionaries(TEXT, VALUES))
def test_any_table_reads_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dump(table)) == table


def test_a_table_reads_as_a_person_would_write_it() -> None:
    table = {"b": {"d": {"e": []}, "c": 1e-6}, "a": "x", "l": [{"m": True, "n": {"o": 1}}, {"m": False}]}
    assert toml.dump(table) == (
        'a = "x"\n\n[b]\nc = 1e-06\n\n[b.d]\ne = []\n\n[[l]]\nm = true\n\n[l.n]\no = 1\n\n[[l]]\nm = false\n'
    )


@pytest.mark.parametrize(
    "table",
    [
        {"quotes": 'say "no", it\'s \\ all'},
        {"lines": "one\ntwo\ttabbed\r\x00\x1f\x7f\x85\u2028"},
        {"unicode": "Δ 漢 🦌", "ключ": 1, "two words": 2, "a.b": {"c.d": 3}, "": 4},
        {"empty": [], "table": {}, "nested": {"empty": {}}},
        {"mixed": [1, {"a": [{"b": 1}, 2]}, [{"c": {}}]]},
        {"deep": {"list": [{"inner": [{"x": 1}, {"x": 2}]}, {"inner": []}]}},
        {"day": date(2026, 1, 2), "moment": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)},
        {"small": 1e-6, "large": 1e300, "whole": 2.0, "minus": -0.0, "endless": [math.inf, -math.inf]},
    ],
)
def test_awkward_tables_read_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml.dump(table)) == table


def test_no_number_reads_back_as_no_number() -> None:
    assert math.isnan(tomllib.loads(toml.dump({"x": math.nan}))["x"])


def test_a_type_that_toml_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="no type for None"):
        toml.dump({"x": None})


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("a=3", {"a": 3}),
        ("a=1e-5", {"a": 1e-5}),
        ("a=true", {"a": True}),
        ("a=yes", {"a": "yes"}),
        ("a=two words", {"a": "two words"}),
        ("a=x=y", {"a": "x=y"}),
        ("a=", {"a": ""}),
        ('a="3"', {"a": "3"}),
        ("a=file.py:agent", {"a": "file.py:agent"}),
        ("a=1\nb=2", {"a": "1\nb=2"}),  # one setting sets one key
        ('a=["x", "y"]', {"a": ["x", "y"]}),
        ('a=[{b = 1}, {b = 2, c = "d"}]', {"a": [{"b": 1}, {"b": 2, "c": "d"}]}),
        (" a . b = 3 ", {"a": {"b": 3}}),
        ("a.b.c={d = 1}", {"a": {"b": {"c": {"d": 1}}}}),
    ],
)
def test_a_setting_is_read_as_toml_else_as_text(setting: str, expected: dict[str, Any]) -> None:
    table: dict[str, Any] = {}
    toml.change(table, setting)
    assert table == expected


def test_a_setting_leaves_its_neighbours() -> None:
    table = {"a": {"b": 1, "c": 2}, "d": 3}
    toml.change(table, "a.b=9")
    assert table == {"a": {"b": 9, "c": 2}, "d": 3}


def test_a_setting_reaches_into_an_array_of_tables_by_number() -> None:
    table = {"a": [{"b": 1}, {"b": {"c": 2}}]}
    toml.change(table, "a.0.b=9")
    toml.change(table, "a.1.b.c=8")
    assert table == {"a": [{"b": 9}, {"b": {"c": 8}}]}


@pytest.mark.parametrize("setting", ["a.2.b=1", "a.x.b=1", "a.-1.b=1"])
def test_a_table_that_an_array_does_not_have_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="which is not a table"):
        toml.change({"a": [{"b": 1}, {"b": 2}]}, setting)


@pytest.mark.parametrize("setting", ["steps", "=3", "", "a.=3", ".a=3", "a..b=3"])
def test_a_setting_without_path_or_value_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"must look like update\.learning_rate=1e-5"):
        toml.change({}, setting)


@pytest.mark.parametrize("setting", ["a=[tensorboard]", 'a="open', "a={b: 1}", "a=[1, 2"])
def test_broken_toml_is_refused_and_not_taken_as_text(setting: str) -> None:
    with pytest.raises(ValueError, match="is not valid TOML"):
        toml.change({}, setting)


@pytest.mark.parametrize("table", [{"a": 1}, {"a": [{"b": 1}]}])
def test_a_setting_inside_a_value_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="inside a, which is not a table"):
        toml.change(table, "a.b=2")
