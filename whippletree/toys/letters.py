"""Text games: harnesses in a few lines that talk with a tiny language model, one character a token.

A script is a generator: it yields what the user says, gets the reply, and returns what each channel counts. All
episodes run at once, one reply each a round. Replies are at most a few characters, so a game is learned in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whippletree.toys.played import Array
from whippletree.toys.transformer import Ids, Language, Transformer
from whippletree.types import Json, Rollout, Task, Turn


@dataclass(frozen=True)
class Letters:
    """A tokenizer: one token a character, then the end of a reply, which may be sampled; then roles, which may not."""

    alphabet: str

    @property
    def end(self) -> int:
        return len(self.alphabet)

    @property
    def user(self) -> int:
        return self.end + 1

    @property
    def assistant(self) -> int:
        return self.end + 2

    @property
    def note(self) -> int:
        return self.end + 3

    def encode(self, text: str) -> Ids:
        unknown = set(text) - set(self.alphabet)
        if unknown:
            raise ValueError(f"these letters have {self.alphabet!r}, but the text {text!r} also has {sorted(unknown)}")
        return tuple(self.alphabet.index(letter) for letter in text)

    def decode(self, ids: Sequence[int]) -> str:
        """The characters; ends and roles are left out."""
        return "".join(self.alphabet[i] for i in ids if i < self.end)

    def ask(self, text: str, before: Ids = ()) -> Ids:
        """The prompt that asks this after what was said before."""
        closed = before if not before or before[-1] == self.end else (*before, self.end)
        return (*closed, self.user, *self.encode(text), self.assistant)

    def noted(self, prompt_ids: Sequence[int], note: str) -> Ids:
        """The same prompt with a note before it."""
        return (self.note, *self.encode(note), *prompt_ids)

    def policy(self, **sizes: int) -> Language:
        """A transformer of these tokens."""
        return Language(Transformer(self.note + 1, self.end + 1, **sizes))


@dataclass(frozen=True)
class Ask:
    """What the user says; `fresh` forgets what was said before."""

    text: str
    thread: str = "main"
    fresh: bool = False


Script = Generator[Ask, str, Mapping[str, float]]


@dataclass(frozen=True)
class Game:
    """A task for each number below `tasks`; a script returns the rewards, and measures that are not rewarded."""

    letters: Letters
    script: Callable[[int], Script]
    tasks: int
    reply: int  # most tokens of a reply, its end included
    measures: tuple[str, ...] = ()  # of what a script returns, those that are no rewards

    def play(
        self,
        policy: Language,
        groups: Sequence[int] | Array,
        random: np.random.Generator,
        *,
        version: int = 0,
        notes: Sequence[str] | None = None,
    ) -> list[Rollout]:
        """One rollout for each entry of `groups`, on task group modulo `tasks`; each may have a note before it all."""
        runs = [_Run(self, f"{version}/{r}", int(group), notes[r] if notes else "") for r, group in enumerate(groups)]
        while asking := [run for run in runs if run.ask is not None]:
            prompts = [run.prompt() for run in asking]
            replies = policy.sample(prompts, random, most=self.reply, end=self.letters.end)
            for run, prompt, (ids, logps) in zip(asking, prompts, replies, strict=True):
                run.answer(prompt, ids, logps, version)
        return [run.rollout() for run in runs]

    def counts(self, rollouts: Sequence[Rollout]) -> dict[str, Array]:
        """[R] of each channel and measure."""
        told = [{**rollout.rewards, **rollout.info["measures"]} for rollout in rollouts]
        return {name: np.array([row[name] for row in told], dtype=np.float32) for name in told[0]}


class _Run:
    """One run of a script: what was said, and the turns so far."""

    def __init__(self, game: Game, label: str, group: int, note: str) -> None:
        self.game, self.label, self.group, self.note = game, label, group, note
        self.script = game.script(group % game.tasks)
        self.ask: Ask | None = next(self.script)
        self.turns: list[Turn] = []
        self.before: Ids = ()
        self.said: list[Json] = []
        self.told: Mapping[str, float] = {}

    def prompt(self) -> Ids:
        assert self.ask is not None
        if self.ask.fresh:
            self.before, self.said = (), []
        self.said = [*self.said, {"role": "user", "content": self.ask.text}]
        letters = self.game.letters
        prompt = letters.ask(self.ask.text, self.before)
        return letters.noted(prompt, self.note) if self.note and not self.before else prompt

    def answer(self, prompt: Ids, ids: Ids, logps: tuple[float, ...], version: int) -> None:
        assert self.ask is not None
        reply = {"role": "assistant", "content": self.game.letters.decode(ids)}
        reason = "stop" if ids[-1] == self.game.letters.end else "length"
        self.turns.append(
            Turn(
                f"{self.label}.{len(self.turns)}",
                prompt,
                ids,
                logps,
                version,
                reason,
                request={"messages": self.said},
                reply=reply,
                thread=self.ask.thread,
                link="append" if self.before else "root",
            )
        )
        self.before, self.said = (*prompt, *ids), [*self.said, reply]
        try:
            self.ask = self.script.send(reply["content"])
        except StopIteration as ended:
            self.ask, self.told = None, ended.value

    def rollout(self) -> Rollout:
        measures = {name: x for name, x in self.told.items() if name in self.game.measures}
        rewards: dict[str, float | None] = {name: x for name, x in self.told.items() if name not in measures}
        task = Task(str(self.group % self.game.tasks))
        return Rollout(self.label, task, str(self.group), tuple(self.turns), rewards, info={"measures": measures})
