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
Memory = list[tuple[Tensor, Tensor]]  # of each block the keys and values [rows, heads, length, width of a head]


class Block(nn.Module):
    """Attention and a layer of twice the width, each added to what it read. Places are told apart by rotation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.leave = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, at: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        query, key = _rotated(query, turn), _rotated(key, turn)
        if past is None:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            keys, values = past
            row = torch.arange(rows)[:, None]
            keys[row, :, at], values[row, :, at] = key.transpose(1, 2), value.transpose(1, 2)
            seen = torch.arange(keys.shape[2]) <= at[:, None, :, None]
            mixed = scaled_dot_product_attention(query, keys, values, attn_mask=seen)
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
        self.heads, self.turns = heads, width // heads // 2

    def memory(self, rows: int, length: int) -> Memory:
        """Room for what is read of so many rows, up to this length."""
        shape = (rows, self.heads, length, 2 * self.turns)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.blocks]

    def forward(self, ids: Tensor, memory: Memory | None = None, at: Tensor | None = None) -> Tensor:
        """Hidden states [rows, length, width]; with a `memory`, of tokens at the places `at` after what it holds."""
        at = torch.arange(ids.shape[1])[None] if at is None else at
        angle = at[:, None, :, None] * torch.logspace(0, -2, self.turns)
        x, turn = self.embed(ids), (angle.cos(), angle.sin())
        for n, block in enumerate(self.blocks):
            x = block(x, turn, memory[n] if memory else None, at)
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
        actions, done = self.model.head.out_features, 0
        memory: Memory = []

        def choose(place_RT: Array, action_RT: Array, t: int) -> Array:
            nonlocal memory, done
            new = ([action_RT[:, t - 1]] if t else []) + ([] if t and one_turn else [actions + place_RT[:, t]])
            ids = torch.from_numpy(np.stack(new, axis=1))
            memory = memory or self.model.memory(len(ids), 2 * place_RT.shape[1])
            at = torch.arange(done, done + len(new)).expand_as(ids)
            done += len(new)
            with torch.no_grad():
                chosen: Array = self.model.head(self.model(ids, memory, at)[:, -1]).log_softmax(-1).numpy()
            return chosen

        return choose

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Ids], random: np.random.Generator, *, most: int, end: int
    ) -> list[tuple[Ids, tuple[float, ...]]]:
        """(ids, log-probs) of one reply to each prompt, up to and with `end`, or of `most` tokens."""
        length = torch.tensor([len(prompt) for prompt in prompts])
        unlike = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}  # a group asks the same: read it once
        rows, owner = _padded(list(unlike)), torch.tensor([unlike[prompt] for prompt in prompts])
        memory = self.model.memory(len(rows), rows.shape[1] + most)
        hidden = self.model(rows, memory, torch.arange(rows.shape[1]).expand_as(rows))[owner, length - 1]
        memory = [(keys[owner], values[owner]) for keys, values in memory]
        over = torch.zeros(len(prompts), dtype=torch.bool)
        draw, logps, replied = torch.from_numpy(random.random((most, len(prompts), 1))), [], []
        for n in range(most):
            logp = self.model.head(hidden).log_softmax(-1)
            up_to = logp.double().exp().cumsum(-1)
            chosen = (draw[n] * up_to[:, -1:] >= up_to).sum(-1)
            replied.append(chosen)
            logps.append(logp[torch.arange(len(prompts)), chosen])
            over |= chosen == end
            if over.all() or n == most - 1:
                break
            hidden = self.model(chosen[:, None], memory, (length + n)[:, None])[:, 0]
        numbers = torch.stack(logps, dim=1).tolist()
        replies = torch.stack(replied, dim=1).tolist()
        sizes = [(*reply, end).index(end) + 1 for reply in replies]
        return [(tuple(r[:s]), tuple(x[:s])) for r, x, s in zip(replies, numbers, sizes, strict=True)]

    def forward(self, rollouts: Sequence[Rollout], batch: Batch) -> Forward:
        return self.passed([(turn.prompt_ids, turn.reply_ids) for rollout in rollouts for turn in rollout.turns])

    def passed(self, turns: Sequence[Pair]) -> Forward:
        """One differentiable pass over replies of turns; a turn that goes on from the one before shares it."""
        rows, row_N, place_N = _chained(turns)
        hidden_ND = self.model(_padded(rows))[row_N, place_N]
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


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[rows, longest] token ids, 0 beyond each; what stands to the right is not seen."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for n, row in enumerate(rows):
        padded[n, : len(row)] = torch.tensor(row)
    return padded
