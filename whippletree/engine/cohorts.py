"""Rows of running replies for every other family: left-padded batches, each with a cache of its own.

Linear attention, state space and convolution keep a state that cannot be cut at a position, so prompts that come
together form a cohort that is computed left-padded and decoded in step; finished rows are dropped as they end.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass
class Cohort:
    """Rows that were admitted together."""

    cache: DynamicCache
    mask_BL: Tensor  # which places hold tokens
    rows: int


class CohortRows:
    """The same face as `SlotRows`, for any causal language model of transformers. Nothing is kept between replies."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.cohorts: list[Cohort] = []
        self.computed = 0

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """[B', V] logits after each prompt; its rows are added at the end, in this order. Equal prompts share a pass."""
        wanted = [tuple(prompt) for prompt in prompts]
        unique = list(dict.fromkeys(wanted))
        width = max(map(len, unique))
        input_UL = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in unique])
        mask_UL = torch.arange(width) >= torch.tensor([[width - len(ids)] for ids in unique])
        cohort = Cohort(DynamicCache(config=self.model.config), mask_UL, len(unique))
        logits_UV = self._forward(cohort, input_UL, mask_UL.cumsum(1).sub(1).clamp_min(0))
        self.computed += int(mask_UL.sum())
        self._gather(cohort, [unique.index(prompt) for prompt in wanted])
        self.cohorts.append(cohort)
        return logits_UV[[unique.index(prompt) for prompt in wanted]]

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        logits, start = [], 0
        for cohort in self.cohorts:
            new_B1 = torch.tensor(ids[start : start + cohort.rows])[:, None]
            start += cohort.rows
            cohort.mask_BL = torch.cat([cohort.mask_BL, torch.ones(cohort.rows, 1, dtype=torch.bool)], dim=1)
            logits.append(self._forward(cohort, new_B1, cohort.mask_BL.sum(1, keepdim=True) - 1))
            self.computed += cohort.rows
        return torch.cat(logits)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows; `rows` must be in rising order, so that cohorts stay together."""
        start = 0
        for cohort in self.cohorts:
            here = [row - start for row in rows if start <= row < start + cohort.rows]
            start += cohort.rows
            if len(here) != cohort.rows:
                self._gather(cohort, here)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.rows]

    def forget(self) -> None:
        """Nothing computed for one reply is used by another, so new weights need nothing forgotten."""

    def _gather(self, cohort: Cohort, rows: list[int]) -> None:
        cohort.mask_BL, cohort.rows = cohort.mask_BL[rows], len(rows)
        if rows:
            cohort.cache.reorder_cache(torch.tensor(rows))

    @torch.no_grad()
    def _forward(self, cohort: Cohort, input_BQ: Tensor, position_BQ: Tensor) -> Tensor:
        return self.model(
            input_ids=input_BQ,
            attention_mask=cohort.mask_BL.long(),
            position_ids=position_BQ,
            use_cache=True,
            logits_to_keep=1,
            **{self.keyword: cohort.cache},
        ).logits[:, -1]
