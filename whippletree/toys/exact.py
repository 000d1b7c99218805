"""What a world is worth, exactly: dynamic programming over its tables. Letters as in `world`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whippletree.toys.table import Table
from whippletree.toys.world import END, World


def values(world: World, logp_PV: Tensor, table_SV: Tensor | None = None) -> Tensor:
    """[T + 1, S] what is still to come in each state with `t` actions done, under a policy; differentiable.

        V_t(s) = sum_v pi(v | place of s) (r(s, v) + V_{t+1}(s'))        0 after the end and after the last step

    `logp_PV` may have more places than the world, which are those with messages. `table_SV` counts something else than
    the reward.
    """
    gain_SV = world.reward_SV if table_SV is None else table_SV
    share_SV = logp_PV[world.place_S].exp()
    after_SV, on_SV = world.next_SV.clamp(min=0), (world.next_SV != END).float()
    value_TS = [torch.zeros(world.states)]
    for _ in range(world.steps):
        value_TS.append((share_SV * (gain_SV + on_SV * value_TS[-1][after_SV])).sum(-1))
    return torch.stack(value_TS[::-1])


def by_task(world: World, logp_PV: Tensor, name: str | None = None) -> Tensor:
    """[G] the exact reward of each task, or what the channel or measure `name` counts there; differentiable."""
    table_SV = None if name is None else world.table(name)
    return values(world, logp_PV, table_SV)[0, world.start_G]


def expected(world: World, logp_PV: Tensor, name: str | None = None) -> Tensor:
    """The mean of `by_task`; differentiable."""
    return by_task(world, logp_PV, name).mean()


def optimum(world: World, name: str | None = None) -> Tensor:
    """[G] the most that each task can give to one who sees the state, not only the place."""
    gain_SV = world.reward_SV if name is None else world.table(name)
    best_S = torch.zeros(world.states)
    for _ in range(world.steps):
        best_S = (gain_SV + torch.where(world.next_SV != END, best_S[world.next_SV.clamp(min=0)], 0.0)).amax(-1)
    return best_S[world.start_G]


def chance(world: World, name: str | None = None) -> Callable[[Table], float]:
    """For `learn(exact=...)`: the exact mean of the reward, or of a channel or measure, of a table as it is now."""

    def now(policy: Table) -> float:
        with torch.no_grad():
            return float(expected(world, policy.logp_PV(), name))

    return now


def tilted(logp_PV: Tensor, reward_PV: Tensor, *, beta: float) -> Tensor:
    """[P, V] log-probs of what a bandit's reward less beta times the KL to this policy is largest for.

    pi*(v) = pi(v) exp(r(v) / beta) / Z
    """
    return (logp_PV + reward_PV / beta).log_softmax(-1)
