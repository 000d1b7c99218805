"""The flat table that credit, objective and average read. Part of the nouns: import it from `types`.

One entry per *sampled* token, in turn order. Prompts and tool output are not in it. The legend of the shape letters is
in `types`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from whippletree.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The flat table that credit, objective and average read: rollouts, turns, sampled tokens.

    Rows are grouped: tokens of a turn are contiguous, turns of a rollout are contiguous, so `rollout_K` and `turn_N`
    never decrease. `reward_RC` is NaN where a channel does not apply. Untrainable tokens have NaN in `logp_old_N`.
    """

    group_R: Tensor  # int64, which group (task and harness) a rollout belongs to
    rollout_K: Tensor  # int64, turn -> rollout
    turn_N: Tensor  # int64, sampled token -> turn
    id_N: Tensor  # int64, the sampled token ids
    logp_old_N: Tensor  # float32, log-prob under the policy that sampled, at the turn's temperature
    version_N: Tensor  # int64, version of that policy
    reward_RC: Tensor  # float32, one column a channel
    channels: tuple[str, ...] = ("reward",)
    weight_C: Tensor = field(default_factory=lambda: torch.ones(1))  # what each channel counts in `reward_R`
    extra: dict[str, Tensor] = field(default_factory=dict)  # evidence; keys end in shape letters

    def __post_init__(self) -> None:
        sizes = {"R": self.rollouts, "K": self.turns, "N": self.tokens, "C": len(self.channels)}
        columns = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        for name, tensor in {**columns, **self.extra}.items():
            for axis, letter in enumerate(shape_letters(name)):
                if letter in sizes and tensor.shape[axis : axis + 1] != (sizes[letter],):
                    raise ValueError(
                        f"column {name} must have {sizes[letter]} entries on axis {axis} ({letter}), but its shape is "
                        f"{tuple(tensor.shape)}"
                    )
        for name in ("rollout_K", "turn_N"):
            if (columns[name].diff() < 0).any():
                raise ValueError(f"{name} must not decrease: turns of a rollout and tokens of a turn stand together")

    @property
    def rollouts(self) -> int:
        return self.group_R.shape[0]

    @property
    def turns(self) -> int:
        return self.rollout_K.shape[0]

    @property
    def tokens(self) -> int:
        return self.turn_N.shape[0]

    @cached_property
    def rollout_N(self) -> Tensor:
        """[N] which rollout each sampled token belongs to."""
        return self.rollout_K[self.turn_N]

    @cached_property
    def lengths_K(self) -> Tensor:
        """[K] sampled tokens of each turn."""
        return torch.bincount(self.turn_N, minlength=self.turns)

    @cached_property
    def lengths_R(self) -> Tensor:
        """[R] sampled tokens of each rollout, over all its turns."""
        return torch.bincount(self.rollout_N, minlength=self.rollouts)

    @cached_property
    def trainable_N(self) -> Tensor:
        """[N] bool: the log-probability at sampling is known."""
        return ~self.logp_old_N.isnan()

    @cached_property
    def reward_R(self) -> Tensor:
        """[R] weighted sum of the channels that apply; NaN where none does."""
        total_R = (self.reward_RC * self.weight_C).nansum(dim=1)
        return torch.where(self.reward_RC.isnan().all(dim=1), torch.nan, total_R)

    def column(self, name: str) -> Tensor:
        """The evidence column of this name.

        Raises:
            ValueError: no evidence of the method found such a column.
        """
        if name not in self.extra:
            raise ValueError(
                f"a part of this method reads the column {name!r}, but its evidence found {sorted(self.extra)}: add "
                f"the evidence that finds it"
            )
        return self.extra[name]

    def with_extra(self, **columns: Tensor) -> Batch:
        """The same batch with further evidence columns, checked against their shape letters."""
        return replace(self, extra={**self.extra, **columns})

    def select(self, rollouts: Tensor) -> Batch:
        """The sub-batch of these rollouts, renumbered: indices [R'] in the wanted order, or a bool mask [R].

        Raises:
            ValueError: the mask does not have one entry for each rollout.
        """
        if rollouts.dtype == torch.bool and len(rollouts) != self.rollouts:
            raise ValueError(f"a mask needs one entry for each of {self.rollouts} rollouts, but it has {len(rollouts)}")
        rollout_R = rollouts.nonzero()[:, 0] if rollouts.dtype == torch.bool else rollouts
        turn_K, rollout_K = _members(self.rollout_K, rollout_R, self.rollouts)
        token_N, turn_N = _members(self.turn_N, turn_K, self.turns)
        index = {"R": rollout_R, "K": turn_K, "N": token_N}

        def pick(name: str, tensor: Tensor) -> Tensor:
            letters = shape_letters(name)
            return tensor[index[letters[0]]] if letters and letters[0] in index else tensor

        columns: dict[str, Any] = {
            f.name: pick(f.name, getattr(self, f.name)) for f in fields(self) if f.name.endswith(("_R", "_N", "_RC"))
        }
        extra = {name: pick(name, tensor) for name, tensor in self.extra.items()}
        return replace(self, **{**columns, "rollout_K": rollout_K, "turn_N": turn_N}, extra=extra)

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        *,
        channels: Sequence[str] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Batch:
        """The table of these rollouts; `channels` defaults to every channel named by any of them, sorted.

        Raises:
            ValueError: there are no rollouts or no channels, or a rollout failed (it is missing, not a reward of 0).
        """
        failed = [r.id for r in rollouts if r.ending == "failed"]
        if not rollouts or failed:
            raise ValueError(f"a batch needs rollouts that did not fail, but got {len(rollouts)}, failed: {failed[:5]}")
        names = tuple(channels) if channels else tuple(sorted({name for r in rollouts for name in r.rewards}))
        if not names:
            raise ValueError("a batch needs at least one reward channel, but no rollout names any: score them first")
        turns = [turn for r in rollouts for turn in r.turns]
        lengths = torch.tensor([len(turn.reply_ids) for turn in turns], dtype=torch.int64)
        numbers = {group: n for n, group in enumerate(dict.fromkeys(r.group for r in rollouts))}
        rewards = [[math.nan if (x := r.rewards.get(name)) is None else x for name in names] for r in rollouts]
        unknown = math.nan
        return cls(
            group_R=torch.tensor([numbers[r.group] for r in rollouts]),
            rollout_K=torch.repeat_interleave(
                torch.arange(len(rollouts)), torch.tensor([len(r.turns) for r in rollouts], dtype=torch.int64)
            ),
            turn_N=torch.repeat_interleave(torch.arange(len(turns)), lengths),
            id_N=torch.tensor([i for turn in turns for i in turn.reply_ids], dtype=torch.int64),
            logp_old_N=torch.tensor(
                [x if turn.trainable else unknown for turn in turns for x in turn.reply_logps], dtype=torch.float32
            ),
            version_N=torch.tensor(
                [v for t in turns for v in t.versions or [t.version] * len(t.reply_ids)], dtype=torch.int64
            ),
            reward_RC=torch.tensor(rewards, dtype=torch.float32),
            channels=names,
            weight_C=torch.tensor([(weights or {}).get(name, 1.0) for name in names], dtype=torch.float32),
        )

    def save(self, path: str | Path) -> None:
        """Write every column to one safetensors file."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        extra = {f"extra.{name}": tensor for name, tensor in self.extra.items()}
        tensors = {name: tensor.clone().contiguous() for name, tensor in {**columns, **extra}.items()}
        save_file(tensors, str(path), metadata={"channels": json.dumps(self.channels)})

    @classmethod
    def load(cls, path: str | Path) -> Batch:
        """Read back what `save` wrote, exactly."""
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            channels = tuple(json.loads(file.metadata()["channels"]))
        extra = {name.removeprefix("extra."): x for name, x in tensors.items() if name.startswith("extra.")}
        columns = {name: x for name, x in tensors.items() if not name.startswith("extra.")}
        return cls(**columns, channels=channels, extra=extra)


def shape_letters(name: str) -> str:
    """The capital letters after the last underscore of a tensor's name: `reward_RC` -> "RC"."""
    letters = name.rsplit("_", 1)[-1]
    return letters if letters.isupper() and letters.isalpha() else ""


def _members(owner: Tensor, chosen: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Members of the chosen owners, in the order of the chosen, and which of the chosen owns each.

    `owner` must not decrease, so that the members of one owner are a range.
    """
    size = torch.bincount(owner, minlength=owners)
    start = (size.cumsum(0) - size)[chosen]
    size = size[chosen]
    rank = torch.repeat_interleave(torch.arange(len(chosen), device=owner.device), size)
    within = torch.arange(len(rank), device=owner.device) - (size.cumsum(0) - size)[rank]
    return start[rank] + within, rank
