"""Methods, papers and claims as JSON and back."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from whippletree import types
from whippletree.codec import from_json, to_json
from whippletree.types import Batch, Claim, Method, Paper, Task, shape_letters


def there_and_back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))


# functions of the package stand in for the parts of a method: only where they live matters here
def method(**changes: Any) -> Method:
    bounded = partial(Batch.of, channels=("a",), weights={"a": math.inf})
    paper = Paper("A title", "Kool et al.", 2019, arxiv="1903.00001", source="summary", also_called=("x", "y"))
    parts: dict[str, Any] = {"credit": shape_letters, "objective": bounded, "average": Task.to_json}
    return Method(paper=paper, **{**parts, **changes})


def test_a_paper_comes_back_equal() -> None:
    paper = method().paper
    assert there_and_back(paper) == paper


def test_a_method_comes_back_with_the_same_functions() -> None:
    back = there_and_back(method())
    assert back.credit is shape_letters
    assert back.average is Task.to_json
    assert back.objective.func == Batch.of
    assert back.objective.keywords == {"channels": ("a",), "weights": {"a": math.inf}}
    assert back.but(objective=None) == method(objective=None)


def test_a_claim_comes_back_with_its_arms() -> None:
    measure: Any = shape_letters
    arms = {"half": method(objective=shape_letters), "none": None}
    claim = Claim(says="more", baseline=arms["half"], method=None, measure=measure, better="lower", arms=arms)
    assert there_and_back(claim) == claim


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        "x",
        1.5,
        -math.inf,
        (),
        [],
        {},
        (1, (2, [3.0])),
        {"function": "a:b"},
        {"float": {"map": 1}},
        {"a": ()},
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(there_and_back([math.nan])[0])


def test_a_partial_keeps_its_places() -> None:
    back = there_and_back(partial(Task, "x", ({"role": "user"},)))
    assert (back.func, back.args, back.keywords) == (Task, ("x", ({"role": "user"},)), {})


class Callee:
    def bound(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.tokens)

    def __call__(self, batch: Batch) -> Tensor:
        return torch.zeros(batch.tokens)


@pytest.mark.parametrize("value", [lambda batch: batch, Callee(), Callee().bound], ids=["lambda", "object", "bound"])
def test_a_function_that_could_not_be_found_again_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="only importable functions"):
        to_json([value])


def test_a_map_whose_keys_json_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="1"):
        to_json({1: "x"})


@pytest.mark.parametrize(
    "row", [{"function": "os:system"}, {"subprocess:Popen": {}}, {"partial": {"function": "os:abort"}}]
)
def test_names_outside_the_package_are_never_loaded(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="only names of whippletree"):
        from_json(row)


def test_what_a_module_of_the_package_merely_imported_is_not_loaded() -> None:
    assert hasattr(types, "math")
    with pytest.raises(ValueError, match="only names of whippletree"):
        from_json({"function": "whippletree.types:math.exp"})


def test_a_function_is_never_called_by_loading() -> None:
    with pytest.raises(ValueError, match="only nouns"):
        from_json({"whippletree.types:shape_letters": {"name": "x_N"}})
