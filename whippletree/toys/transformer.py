"""A tiny causal transformer, and the policy that it is: of worlds token by token, of text games reply by reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from whippletree.toys.played import Array, Chooser
from whippletree.toys.world import World
from whippletree.types import Batch, Forward, Rollout

Ids = tuple[int, ...]
Pair = tuple[Sequence[int], Sequence[int]]  # prompt ids, reply ids


class Block(nn.Module):
    """Attention and a layer of twice the width, each added to what it read. Places are told apart by rotation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(_rotated(query, turn), _rotated(key, turn), value, is_causal=True)
        x = x + self.leave(mixed.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.think(self.norms[1](x))
        return out


class Transformer(nn.Module):
    """Token ids [rows, length] to hidden states; `head` gives logits of the ids that may be sampled, 0 to outputs - 1.

    The same seed gives the same weights.
    """

    def __init__(
        self, vocabulary: int, outputs: int, *, width: int = 64, layers: int = 2, heads: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.norm, self.head, self.value = nn.LayerNorm(width), nn.Linear(width, outputs), nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)  # so that it starts uniform
        nn.init.zeros_(self.head.bias)
        self.turns = width // heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        angle = torch.arange(ids.shape[1])[:, None] * torch.logspace(0, -2, self.turns)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, (angle.cos(), angle.sin()))
        normed: Tensor = self.norm(x)
        return normed


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    (one, other), (cos, sin) = x.chunk(2, dim=-1), turn
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Language:
    """The policy of a `Transformer`; beside logits it gives a learned value, and hidden states that predict a token."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @classmethod
    def of(cls, world: World, **sizes: int) -> Language:
        """A transformer whose tokens are the actions and places of a world; it samples actions."""
        return cls(Transformer(world.actions + world.places * (1 + world.messages), world.actions, **sizes))

    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def frozen(self) -> Language:
        """A copy that no longer changes."""
        return deepcopy(self)

    def chooser(self, *, one_turn: bool = False) -> Chooser:
        """For worlds: reads (place, action, place, ...), with one place only at the start of a world of one turn."""
        actions = self.model.head.out_features

        def choose(place_RT: Array, action_RT: Array, t: int) -> Array:
            if one_turn:
                ids = np.concatenate([actions + place_RT[:, :1], action_RT[:, :t]], axis=1)
            else:
                ids = np.stack([actions + place_RT[:, : t + 1], action_RT[:, : t + 1]], axis=2)
                ids = ids.reshape(len(ids), -1)[:, :-1]
            with torch.no_grad():
                logits = self.model.head(self.model(torch.from_numpy(ids))[:, -1])
            chosen: Array = logits.log_softmax(-1).numpy()
            return chosen

        return choose

    def sample(
        self, prompts: Sequence[Ids], random: np.random.Generator, *, most: int, end: int
    ) -> list[tuple[Ids, tuple[float, ...]]]:
        """(ids, log-probs) of one reply to each prompt, up to and with `end`, or of `most` tokens."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        rows, index = _padded(prompts, most), torch.arange(len(prompts))
        draw, logps, over = (
            torch.from_numpy(random.random((most, len(prompts), 1))),
            [],
            torch.zeros(len(prompts), dtype=torch.bool),
        )
        for n in range(most):
            with torch.no_grad():
                hidden = self.model(rows[:, : int(length.max()) + n])[index, length + n - 1]
                logp = self.model.head(hidden).log_softmax(-1)
            up_to = logp.double().exp().cumsum(-1)
            chosen = (draw[n] * up_to[:, -1:] >= up_to).sum(-1)
            rows[index, length + n] = chosen
            logps.append(logp[index, chosen])
            over |= chosen == end
            if over.all():
                break
        numbers = torch.stack(logps, dim=1).tolist()
        replies = [row[a : a + len(logps)].tolist() for row, a in zip(rows, length.tolist(), strict=True)]
        sizes = [(*reply, end).index(end) + 1 for reply in replies]
        return [(tuple(r[:s]), tuple(x[:s])) for r, x, s in zip(replies, numbers, sizes, strict=True)]

    def forward(self, rollouts: Sequence[Rollout], batch: Batch) -> Forward:
        return self.passed([(turn.prompt_ids, turn.reply_ids) for rollout in rollouts for turn in rollout.turns])

    def passed(self, turns: Sequence[Pair]) -> Forward:
        """One differentiable pass over replies of turns; a turn that goes on from the one before shares it."""
        rows, row_N, place_N = _chained(turns)
        hidden_ND = self.model(_padded(rows, 0))[row_N, place_N]
        logits_NV = self.model.head(hidden_ND)
        logp_NV = logits_NV.log_softmax(-1)
        id_N = torch.tensor([i for _, reply in turns for i in reply], dtype=torch.int64)
        return Forward(
            logp_NV.gather(1, id_N[:, None])[:, 0],
            ask={
                "logits_NV": lambda: logits_NV,
                "entropy_N": lambda: -(logp_NV.exp() * logp_NV).sum(-1),
                "hidden_ND": lambda: hidden_ND,
                "value_N": lambda: self.model.value(hidden_ND)[:, 0],
            },
            second_pass=lambda prompts: self.passed([(p, reply) for p, (_, reply) in zip(prompts, turns, strict=True)]),
        )

    async def logps(self, turns: Sequence[Pair]) -> list[Tensor]:
        return self._read(turns, lambda passed: passed.logp_N)

    def values(self) -> Values:
        """A scorer that gives the learned value before each token."""
        return Values(self)

    def _read(self, turns: Sequence[Pair], column: Callable[[Forward], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(column(self.passed(turns)).split([len(reply) for _, reply in turns]))


class Values:
    """The learned value as a scorer."""

    def __init__(self, policy: Language) -> None:
        self.policy = policy

    async def logps(self, turns: Sequence[Pair]) -> list[Tensor]:
        return self.policy._read(turns, lambda passed: passed.value_N)


def pretrain(
    policy: Language,
    examples: Callable[[np.random.Generator], Sequence[Pair]],
    *,
    steps: int,
    rate: float = 3e-3,
    seed: int = 0,
) -> list[float]:
    """Learn to say these replies: the mean loss of a token of each step, on fresh examples."""
    random, losses = np.random.default_rng(seed), []
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
    for _ in range(steps):
        turns = examples(random)
        optimizer.zero_grad()
        loss = -policy.passed(turns).logp_N.mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _chained(turns: Sequence[Pair]) -> tuple[list[list[int]], Tensor, Tensor]:
    """(rows of tokens, and for each sampled token its row and the place that predicts it)."""
    rows: list[list[int]] = []
    row_N: list[int] = []
    place_N: list[int] = []
    for prompt, reply in turns:
        if rows and list(prompt[: len(rows[-1])]) == rows[-1]:
            rows[-1] = [*prompt]
        else:
            rows.append([*prompt])
        row_N += [len(rows) - 1] * len(reply)
        place_N += range(len(prompt) - 1, len(prompt) - 1 + len(reply))
        rows[-1] += reply
    return rows, torch.tensor(row_N, dtype=torch.int64), torch.tensor(place_N, dtype=torch.int64)


def _padded(rows: Sequence[Sequence[int]], more: int) -> Tensor:
    """[rows, longest + more] token ids, 0 beyond each; what stands to the right is not seen."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows) + more, dtype=torch.int64)
    for n, row in enumerate(rows):
        padded[n, : len(row)] = torch.tensor(row)
    return padded
