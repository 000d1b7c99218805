"""Rows of running replies for every other family: left-padded batches, each with a cache of its own.

Linear attention, state space and convolution keep a state that cannot be cut at a position, so prompts that come
together form cohorts that are computed left-padded and decoded in step; finished rows are dropped as they end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from whippletree.engine.slots import cache_keyword, similar


@dataclass
class Cohort:
    """Rows that were admitted together."""

    cache: DynamicCache
    mask_BL: Tensor  # which places hold tokens

    @property
    def rows(self) -> int:
        return len(self.mask_BL)

    def choose(self, rows: Sequence[int]) -> None:
        """Keep these rows, each as often as it is named."""
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.mask_BL.device)
        self.mask_BL = self.mask_BL[chosen]
        if rows:
            self.cache.reorder_cache(chosen)


class CohortRows:
    """The same face as `SlotRows`, for any causal language model of transformers. Nothing is kept between replies."""

    places = sys.maxsize

    def __init__(self, model: nn.Module, *, tokens: int = 2048) -> None:
        self.model, self.tokens = model, tokens
        self.keyword, self.device = cache_keyword(model), next(model.parameters()).device
        self.cohorts: list[Cohort] = []
        self.computed = 0

    def admit(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """(which prompt each new row holds, [B', V] logits after it); the new rows stand behind the others."""
        wanted: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts):
            wanted.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(number)
        order: list[int] = []
        logits: list[Tensor] = []
        for chunk in similar({key: len(prompts[numbers[0]]) for key, numbers in wanted.items()}, self.tokens):
            cohort, logits_UV = self._prefill([prompts[wanted[key][0]] for key in chunk])
            rows = [row for row, key in enumerate(chunk) for _ in wanted[key]]
            cohort.choose(rows)
            self.cohorts.append(cohort)
            order += [number for key in chunk for number in wanted[key]]
            logits.append(logits_UV[rows])
        return order, torch.cat(logits)

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        new_B1 = torch.tensor(ids, device=self.device)[:, None]
        parts = torch.split(new_B1, [cohort.rows for cohort in self.cohorts])
        return torch.cat([self._feed(cohort, part) for cohort, part in zip(self.cohorts, parts, strict=True)])

    def drop(self, rows: Sequence[int]) -> list[int]:
        """End some rows; gives the former place of each row that stays, in order."""
        order: list[int] = []
        start = 0
        for cohort in self.cohorts:
            here = [row for row in range(cohort.rows) if start + row not in rows]
            order += [start + row for row in here]
            start += cohort.rows
            if len(here) != cohort.rows:
                cohort.choose(here)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.rows]
        return order

    def clear(self) -> None:
        """End every row."""
        self.cohorts = []

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Cohort, Tensor]:
        width = max(map(len, prompts))
        input_UL = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=self.device)
        missing_U = torch.tensor([width - len(ids) for ids in prompts], device=self.device)
        mask_UL = torch.arange(width, device=self.device) >= missing_U[:, None]
        cohort = Cohort(DynamicCache(config=self.model.config), mask_UL[:, :0])
        return cohort, self._feed(cohort, input_UL, mask_UL)

    @torch.no_grad()
    def _feed(self, cohort: Cohort, input_BQ: Tensor, new_BQ: Tensor | None = None) -> Tensor:
        """[B, V] logits after these further tokens; `new` says which of them are no padding."""
        new_BQ = torch.ones_like(input_BQ, dtype=torch.bool) if new_BQ is None else new_BQ
        cohort.mask_BL = torch.cat([cohort.mask_BL, new_BQ], dim=1)
        self.computed += int(new_BQ.sum())
        position_BL = (cohort.mask_BL.cumsum(1) - 1).clamp_min(0)
        logits_B1V: Tensor = self.model(
            input_ids=input_BQ,
            attention_mask=cohort.mask_BL.long(),
            position_ids=position_BL[:, -input_BQ.shape[1] :],
            use_cache=True,
            logits_to_keep=1,
            **{self.keyword: cohort.cache},
        ).logits
        return logits_B1V[:, -1]
