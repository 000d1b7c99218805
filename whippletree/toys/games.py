"""Text games with a known answer: reach a cell and try again, and sums that are written down step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from whippletree.toys.letters import Ask, Game, Letters, Script
from whippletree.toys.transformer import Pair


def reach(*, cells: int = 4, tries: int = 3) -> Game:
    """Go from one cell to another in a row: "1>3" is answered by moves, "rr".

    Who fails is told where it stands, "no 2>3", and tries again from there. The reward is 1 for standing in the right
    cell at the end of a reply; the measure "first" counts the first try.
    """
    pairs = [(a, b) for a in range(cells) for b in range(cells) if a != b]

    def script(task: int) -> Script:
        place, goal = pairs[task]
        for attempt in range(tries):
            moves = yield Ask(f"{'no ' if attempt else ''}{place}>{goal}")
            for move in moves:
                place = min(max(place + {"l": -1, "r": 1}.get(move, 0), 0), cells - 1)
            if place == goal:
                return {"reward": 1.0, "first": float(attempt == 0)}
        return {"reward": 0.0, "first": 0.0}

    letters = Letters("lrno >" + "0123456789"[:cells])
    return Game(letters, script, len(pairs), cells, ("first",))


def running_totals(numbers: Sequence[int], base: int) -> str:
    """What is right to write down while adding these digits modulo the base: "314" in base 5 gives "343"."""
    totals = np.cumsum(numbers) % base
    return "".join(str(total) for total in totals)


def sums(*, terms: int = 3, base: int = 5) -> Game:
    """Add digits modulo a base, writing down each running total: "3+1+4" is answered "343" in base 5.

    The reward is 1 if the last digit is the sum and there is one digit a term; the measure "steps" is the share of the
    running totals before the first wrong one. Task n has the digits of n.
    """

    def script(task: int) -> Script:
        numbers = digits(task, terms, base)
        reply = yield Ask("+".join(map(str, numbers)))
        right = running_totals(numbers, base)
        return {
            "reward": float(len(reply) == terms and reply[-1] == right[-1]),
            "steps": first_difference(reply, right) / terms,
        }

    return Game(Letters("0123456789"[:base] + "+"), script, base**terms, terms + 1, ("steps",))


RULES: dict[str, Callable[[str], str]] = {  # by the letter that names them in a note
    "c": lambda word: word,
    "r": lambda word: word[::-1],
    "f": lambda word: word[:1] * len(word),
}


def rules(*, length: int = 2, symbols: str = "012") -> Game:
    """Say a word after a rule that is not told: "A012" is answered by itself, "B012" backwards, "C012" by "000".

    A note of one letter can tell the rule: c, r, f. Reward 1 if right.
    """

    def script(task: int) -> Script:
        kind, number = divmod(task, len(symbols) ** length)
        word = spelled(number, length, symbols)
        reply = yield Ask("ABC"[kind] + word)
        return {"reward": float(reply == list(RULES.values())[kind](word))}

    return Game(Letters(symbols + "ABC" + "".join(RULES)), script, 3 * len(symbols) ** length, length + 1)


def relay(*, length: int = 1, symbols: str = "0123") -> Game:
    """Say a word that is no longer seen, but for what one noted of it: "12" is answered by a summary, and then the
    summary and "?" is all that is asked. The reward is 1 if the word is said then.

    The first turn is of the thread "summary/1"; the measure "noted" tells whether the summary holds the word itself.
    From random weights nobody learns it, as neither turn is of use without the other: `relay_examples` comes first.
    """

    def script(task: int) -> Script:
        word = spelled(task, length, symbols)
        summary = yield Ask(word, thread="summary/1")
        reply = yield Ask(summary + "?", fresh=True)
        return {"reward": float(reply == word), "noted": float(word in summary)}

    return Game(Letters(symbols + "?"), script, len(symbols) ** length, length + 1, ("noted",))


# ---- examples for `pretrain` ------------------------------------------------------------------------------------

Examples = Callable[[np.random.Generator], Sequence[Pair]]


def sum_examples(game: Game, *, terms: int = 3, base: int = 5, size: int = 64) -> Examples:
    """Right answers to random tasks of `sums` of these sizes."""

    def drawn(random: np.random.Generator) -> list[Pair]:
        tasks = [digits(int(n), terms, base) for n in random.integers(game.tasks, size=size)]
        return [example(game, "+".join(map(str, numbers)), running_totals(numbers, base)) for numbers in tasks]

    return drawn


def rule_examples(
    game: Game, *, noted: float, length: int = 2, symbols: str = "012", size: int = 64, heeded: bool = True
) -> Examples:
    """Answers to random tasks of `rules` after a random rule; so often a note tells it, or any rule if not `heeded`."""

    def drawn(random: np.random.Generator) -> list[Pair]:
        found = []
        for _ in range(size):
            word = spelled(int(random.integers(len(symbols) ** length)), length, symbols)
            rule, told = ("crf"[i] for i in random.integers(3, size=2))
            note = (rule if heeded else told) if random.random() < noted else ""
            found.append(example(game, "ABC"[random.integers(3)] + word, RULES[rule](word), note=note))
        return found

    return drawn


def relay_examples(game: Game, *, length: int = 1, symbols: str = "0123", size: int = 64) -> Examples:
    """How a reader of summaries says what it reads, and a writer of summaries says anything at all."""

    def drawn(random: np.random.Generator) -> list[Pair]:
        numbers = random.integers(len(symbols) ** length, size=(size, 2))
        words = [[spelled(int(n), length, symbols) for n in pair] for pair in numbers]
        return [example(game, a + "?", a) if n % 2 else example(game, a, b) for n, (a, b) in enumerate(words)]

    return drawn


def example(game: Game, asked: str, answer: str, *, note: str = "") -> Pair:
    """(prompt ids, reply ids) of this answer to the first question, with a note before it or without."""
    letters = game.letters
    prompt = letters.ask(asked)
    return letters.noted(prompt, note) if note else prompt, (*letters.encode(answer), letters.end)


# ---- words ------------------------------------------------------------------------------------------------------


def spelled(number: int, length: int, symbols: str) -> str:
    """The word of this number, of `len(symbols) ** length` words."""
    return "".join(symbols[i] for i in digits(number, length, len(symbols)))


def digits(number: int, places: int, base: int) -> list[int]:
    """The digits of a number, the first one first."""
    return [number // base**place % base for place in reversed(range(places))]


def first_difference(text: str, right: str) -> int:
    """How many characters agree before the first that does not: the index of the first wrong step."""
    return next((n for n, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
