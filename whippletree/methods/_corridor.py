"""The corridor of nine cells on which claims about turns are checked: how many updates until it is walked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from whippletree.evidence import Judge, Scripted
from whippletree.toys.corridors import corridor
from whippletree.toys.learning import learn, reached
from whippletree.toys.table import Table
from whippletree.types import Asker, Json, Method
from whippletree.update.averages import constant

Guess = Callable[[list[float], bool, Random], list[float]]
CELLS = 9
SUMMED = partial(constant, tokens=1)  # the gradients of turns are summed over a rollout and averaged over rollouts


def updates(method: Method, seed: int, *, most: int = 150, askers: Mapping[str, Asker] | None = None) -> float:
    """Updates, of two groups of 8 at rate 0.3, until the mean success of the last ten is 0.9; `most` if it never is."""
    world = corridor(cells=CELLS)
    curve = learn(method, world, Table.of(world), seed=seed, updates=most, until=reached(0.9), askers=askers)
    return min(curve.updates_to(0.9), float(most))


def critic(guess: Guess, seed: int) -> Judge:
    """A judge that guesses chances (0 to 1) from the shares of the way before each turn, and whether it succeeded.

    It reads them off the cells that a question shows, and says the last of them again for after the last turn.
    """
    return Judge(Scripted(partial(_answer, guess=guess, seed=seed)), ticketed=False)


def _answer(question: str, *, guess: Guess, seed: int) -> Json:
    ways = [int(cell) / (CELLS - 1) for cell in re.findall(r"cell (\d+)", question)]
    chances = guess(ways, "reward of 1" in question, Random(f"{seed}/{question}"))
    numbers = [100 * min(max(x, 0.0), 1.0) for x in chances]
    return {"chances": numbers + numbers[-1:] if "finished" in question else numbers[-1:]}


# ---- what a critic may say of a run: ways and success -> chances ------------------------------------------------


def noisy(ways: list[float], won: bool, random: Random, *, noise: float = 0.1) -> list[float]:
    """The share of the way, with Gaussian noise."""
    return [way + random.gauss(0, noise) for way in ways]


def shuffled(ways: list[float], won: bool, random: Random) -> list[float]:
    """The same, dealt to the turns at random."""
    return random.sample(noisy(ways, won, random), len(ways))


def at_random(ways: list[float], won: bool, random: Random) -> list[float]:
    """Anything."""
    return [random.random() for _ in ways]


def all_along(ways: list[float], won: bool, random: Random) -> list[float]:
    """How it ended, from the first turn on, with the noise of `noisy`."""
    return noisy([0.9 if won else 0.1] * len(ways), won, random)
