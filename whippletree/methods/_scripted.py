"""A toy of black boxes: scripted harnesses that call a small transformer, which learns to copy a digit through them.

A harness is a generator: it yields what it asks, gets the sampled ids, and returns the reward. All harnesses of a step
run at once, one reply each a round. Turns, evidence and the packed forward take the same way as in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from whippletree.models.tiny import tiny_model
from whippletree.objective import with_entropy
from whippletree.tree.black_box import kept, threads
from whippletree.tree.forward import forward
from whippletree.types import Batch, Method, Rollout, Services, Task, Turn

DIGITS = 10  # ids 0 to 9; then the end of a reply, and the words of harnesses
END, COPY, SEE, SAY, TITLE, SUMMARY, VOCABULARY = range(DIGITS, DIGITS + 7)
LONGEST = 3  # tokens of a reply

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One call of a harness."""

    prompt: Ids
    thread: str = "main"


Run = Generator[Ask, Ids, float]
Harness = Callable[[int, Random], Run]  # the digit of the task, its own random numbers -> a run


def says(reply: Ids, digit: int) -> float:
    """1 if the reply begins with the digit, else 0."""
    return float(reply[:1] == (digit,))


@dataclass
class Policy:
    """The model, and the random numbers it samples with."""

    seed: int
    model: Any = field(init=False)
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.model = tiny_model(seed=self.seed, vocabulary=VOCABULARY)
        self.random = torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Ids]) -> list[tuple[Ids, tuple[float, ...]]]:
        """(ids, log-probs) of one reply to each prompt, up to its end or `LONGEST`."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        rows = torch.full((len(prompts), int(length.max()) + LONGEST), END)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        index, logps = torch.arange(len(prompts)), []
        for n in range(LONGEST):  # what stands to the right is not seen
            width = int(length.max()) + n
            logp = self.model(input_ids=rows[:, :width]).logits[index, length + n - 1].log_softmax(-1)
            rows[index, length + n] = torch.multinomial(logp.exp(), 1, generator=self.random)[:, 0]
            logps.append(logp[index, rows[index, length + n]])
        replies = [row[a : a + LONGEST].tolist() for row, a in zip(rows, length.tolist(), strict=True)]
        sizes = [(*reply, END).index(END) + 1 for reply in replies]
        numbers = torch.stack(logps, dim=1).tolist()
        return [(tuple(r[:s]), tuple(x[:s])) for r, x, s in zip(replies, numbers, sizes, strict=True)]

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """What a `Scorer` gives, of these weights."""
        with torch.no_grad():
            found = forward(self.model, [(*turn, 1.0) for turn in turns], [0] * len(turns)).logp_N
        return list(found.split([len(reply) for _, reply in turns]))


def roll(policy: Policy, runs: Mapping[str, tuple[str, Run]], version: int = 0) -> list[Rollout]:
    """The rollouts of some runs, given as name -> (group, run)."""
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    asks = {name: next(run) for name, (_, run) in runs.items()}
    rewards: dict[str, float] = {}
    while asks:
        replies = policy.sample([ask.prompt for ask in asks.values()])
        after = {}
        for (name, ask), (ids, logps) in zip(asks.items(), replies, strict=True):
            reason = "stop" if ids[-1] == END else "length"
            label = f"{name}.{len(turns[name])}.0"
            turns[name].append(Turn(label, ask.prompt, ids, logps, version, reason, thread=ask.thread))
            try:
                after[name] = runs[name][1].send(ids)
            except StopIteration as ended:
                rewards[name] = ended.value
        asks = after
    groups = {name: group for name, (group, _) in runs.items()}
    return [Rollout(n, Task(n), groups[n], tuple(turns[n]), {"reward": rewards[n]}) for n in runs]


def step(policy: Policy, harnesses: Mapping[str, Harness], number: int, *, tasks: int, size: int) -> list[Rollout]:
    """The rollouts of one step: of each task and harness a group of `size`."""
    runs = {}
    for name, harness in harnesses.items():
        for task in range(tasks):
            for i in range(size):
                label, group = f"{name}/{number}/{task}/{i}", f"{name}/{task}"
                runs[label] = (group, harness(task % DIGITS, Random(f"{policy.seed}/{label}")))
    return roll(policy, runs, version=number)


def learn(
    method: Method,
    harnesses: Mapping[str, Harness],
    *,
    seed: int,
    updates: int,
    tasks: int = 8,
    size: int = 4,
    bonus: float = 0.01,
) -> list[dict[str, float]]:
    """For each update the mean reward of each harness, by its name, and what was left out, by reason.

    Any method gets a small entropy bonus: from random weights the policy else settles on a few digits.
    """
    policy, told = Policy(seed), []
    optimizer = torch.optim.Adam(policy.model.parameters(), lr=1.5e-3, betas=(0.9, 0.95))
    objective = partial(with_entropy, objective=method.objective, bonus=bonus)
    for number in range(updates):
        rollouts = step(policy, harnesses, number, tasks=tasks, size=size)
        names = [rollout.id.partition("/")[0] for rollout in rollouts]
        rewards = {
            h: [r.rewards["reward"] or 0.0 for r, n in zip(rollouts, names, strict=True) if n == h] for h in names
        }
        told.append({name: sum(rs) / len(rs) for name, rs in rewards.items()})
        rollouts, left_out = kept(rollouts, method.keep or threads)
        told[-1] |= left_out
        batch = Batch.of(rollouts)
        for evidence in method.evidence:
            found = asyncio.run(_found(evidence(rollouts, batch, Services({"policy": policy}))))
            batch = batch.with_extra(**found)
        optimizer.zero_grad()
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        passed = forward(policy.model, turns, batch.group_R[batch.rollout_K])
        (method.average(batch) * objective(passed, method.credit(batch), batch)).sum().backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    return told


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    """The mean reward of some rollouts."""
    return sum(rollout.rewards["reward"] or 0.0 for rollout in rollouts) / len(rollouts)


def last(told: Sequence[Mapping[str, float]], name: str, *, updates: int = 20) -> float:
    """The mean of a number over the last updates."""
    return sum(row[name] for row in told[-updates:]) / updates


async def _found(columns: Any) -> dict[str, Tensor]:
    return dict(await columns)
