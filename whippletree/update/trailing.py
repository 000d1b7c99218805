"""An updater whose weights a copy follows: an exponential moving average of the policy, or an older one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whippletree.update.adamw import AdamW, Updater


class Trailing(Updater):
    """AdamW, and a float32 copy w' of what it trains, equal to it at the start.

        w' <- decay * w' + (1 - decay) * w        after every `every`-th optimizer step

    A decay of 0 makes it the policy of up to `every` steps ago. The copy stands among the moments, so that a resumed
    run goes on with it. What does not train is not copied: of adapters it is the adapters.

    Raises:
        ValueError: the decay is not in [0, 1), or `every` is below 1.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: AdamW, *, decay: float = 0.99, every: int = 1
    ) -> None:
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(
                f"the copy keeps a share `decay` of itself, 0 <= decay < 1, at each `every`-th step, 1 or more, but "
                f"decay is {decay} and every is {every}"
            )
        super().__init__(parameters, settings)
        self.decay, self.every, self.steps = decay, every, torch.zeros((), dtype=torch.int64)
        self.copies = {name: weight.clone() for name, weight in self.weights().items()}

    def step(self, rate: float) -> float:
        """One step, which the copy follows; returns the gradient's norm before clipping."""
        norm = super().step(rate)
        self.steps += 1
        if self.steps % self.every == 0:
            for name, weight in self.weights().items():
                self.copies[name].lerp_(weight, 1 - self.decay)
        return norm

    @contextmanager
    def held(self) -> Iterator[None]:
        """The copy in the place of the policy's weights while the block runs; nothing else may then compute."""
        own = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self.copies[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = own[name]

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, `name/trailing` of each parameter and `trailing/steps`."""
        copies = {f"{name}/trailing": copy for name, copy in self.copies.items()}
        return {**super().moments(), **copies, "trailing/steps": self.steps}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Continue from what `weights` and `moments` gave.

        Raises:
            ValueError: the checkpoint is of other parameters, or has no copy; nothing was restored.
        """
        mine = Trailing.moments(self).keys() - super().moments().keys()
        if missing := sorted(mine - moments.keys()):
            raise ValueError(f"the checkpoint must hold the copy that trails the policy, but it lacks {missing[:5]}")
        super().restore(weights, moments)
        self.steps.copy_(moments["trailing/steps"])
        for name, copy in self.copies.items():
            copy.copy_(moments[f"{name}/trailing"])
