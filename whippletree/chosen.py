"""The method of a recipe: its file, with the recipe's settings of its parts, and whether it can work there at all."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from whippletree import config, methods
from whippletree.objective.addons import with_entropy
from whippletree.types import Batch, Method, Rollout, Task, Turn

PROVIDED = {"reference", "value_head", "trainer_logps", "judge"}  # what a method may need and a run gives
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def chosen_method(recipe: config.Recipe) -> Method:
    """The recipe's method by name, fitted to the recipe."""
    return fitted(methods.load(recipe.method), recipe)


def fitted(method: Method, recipe: config.Recipe) -> Method:
    """A method with the recipe's settings of its parts.

    Raises:
        ValueError: it needs what is not there, a part has no such setting, or it would learn nothing at these sizes.
    """
    if "judge" in method.needs and recipe.judge is None:
        raise ValueError(f"method {recipe.method} asks a judge: say whom in [judge], see docs/judges.md")
    if "judge" not in method.needs and recipe.judge is not None:
        raise ValueError(f"judge has no effect, as method {recipe.method} asks none: remove it")
    if missing := sorted(set(method.needs) - PROVIDED):
        raise ValueError(f"method {recipe.method} needs {', '.join(missing)}, which a recipe cannot give it yet")
    if method.train is not None:
        raise ValueError(f"method {recipe.method} brings its own training: run its file")
    if method.keep is not None and recipe.threads.changed("train"):
        raise ValueError(f"threads.train has no effect, as {recipe.method} says which turns train: remove it")
    changes: dict[str, Any] = {}
    for slot, settings in recipe.method_settings.items():
        part = getattr(method, slot) if slot in {field.name for field in fields(method)} else None
        if not callable(part):
            raise ValueError(f"method_settings.{slot}: method {recipe.method} has no such part")
        changes[slot] = with_settings(part, settings, where=f"method_settings.{slot}")
    if recipe.update.entropy_bonus:
        objective = changes.get("objective", method.objective)
        changes["objective"] = partial(with_entropy, objective=objective, bonus=recipe.update.entropy_bonus)
    method = method.but(**changes) if changes else method
    if not method.evidence:
        teaches(method, recipe)
    return method


def with_settings(part: Any, settings: dict[str, Any], *, where: str) -> Any:
    """A part with some of its keywords set.

    Raises:
        ValueError: it has no such keyword, or the value is not of the keyword's type.
    """
    known = [n for n, p in inspect.signature(part).parameters.items() if p.kind == inspect.Parameter.KEYWORD_ONLY]
    if odd := sorted(set(settings) - set(known)):
        raise ValueError(f"{where}: unknown {', '.join(odd)}; it has {', '.join(known) or 'none'}")
    function = part
    while isinstance(function, partial):
        function = function.func
    kinds = get_type_hints(function)
    for name, value in settings.items():
        try:
            TypeAdapter(kinds.get(name, Any), config=STRICT).validate_python(value)
        except ValidationError as error:
            rule = error.errors()[0]["msg"].removeprefix("Input should ")
            raise ValueError(f"{where}.{name} must {rule}, but got {value!r}") from None
    return partial(part, **settings)


def teaches(method: Method, recipe: config.Recipe) -> None:
    """Ask the credit about made-up groups of the recipe's size with unequal rewards, none of them 0.

    Raises:
        ValueError: it refuses them, or gives no token any advantage, so that nothing would be learned.
    """
    sampling = recipe.sampling
    turn = Turn("", (0,), (0,), (-1.0,), 0, "stop")
    channel = recipe.rewards[0].name if recipe.rewards else "reward"
    made_up = [
        Rollout(f"{g}/{i}", Task(str(g)), str(g), (turn,), {channel: 1.0 + g + i})
        for g in range(sampling.tasks_per_step)
        for i in range(sampling.rollouts_per_task)
    ]
    if not bool(method.credit(Batch.of(made_up)).any()):
        raise ValueError(
            f"with sampling.rollouts_per_task = {sampling.rollouts_per_task} and tasks_per_step = "
            f"{sampling.tasks_per_step}, the credit of {recipe.method} gives every token an advantage of 0 whatever "
            f"the rewards, so nothing would be learned: sample more rollouts for each task"
        )
