"""A model as a scorer: what it says of given tokens, in packed rows and without a gradient."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whippletree.tree.forward import forward, sampled
from whippletree.tree.pack import Sampled, pack
from whippletree.tree.packed import Layout, reader
from whippletree.types import Kind, Scored


@dataclass(frozen=True)
class PackedScorer:
    """A `Reader` over packed rows; with a value head, a `Scorer` that gives its outputs in place of log-probs.

    Up to `kept_bytes` of logits stand in memory at a time, whatever the number of tokens; where the head is more than
    a linear map, those of all places.
    """

    model: Any
    layout: Layout
    temperature: float  # of `logps`, whose turns name none
    token_budget: int
    value_head: nn.Module | None = None
    compute: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None  # where set, it runs what is computed
    weights: Callable[[], AbstractContextManager[object]] = nullcontext  # held while it computes: an average, a copy
    kept_bytes: int = 2**28
    limit_bytes: int = 2**31  # of the log-probs that one call may give

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """For each (prompt_ids, reply_ids): float32 [len(reply_ids)], no gradient."""
        triples = sampled([(*turn, self.temperature) for turn in turns])
        if self.value_head is None:
            return [scored.logp_N for scored in await self.score(triples)]
        value_N: Tensor = await self._computed(lambda: self._values(triples))
        return list(value_N.split([len(reply) for _, reply in turns]))

    async def score(self, turns: Sequence[Sampled], kind: Kind = "sampled") -> list[Scored]:
        """For each (prompt_ids, reply_ids, temperature) what is asked for, on the CPU.

        Raises:
            ValueError: there is a value head, the answer would be larger than `limit_bytes`, `kind` is none, or ids
                repeat or are not given for each sampled token.
        """
        if self.value_head is not None:
            raise ValueError("this scorer gives values, which are no distribution: ask the scorer of the same model")
        found: Scored = await self._computed(lambda: self._scored(sampled(turns), kind))
        return found.split([len(reply) for _, reply, _ in turns])

    async def _computed(self, work: Callable[[], Any]) -> Any:
        def held() -> Any:
            with torch.no_grad(), self.weights():
                return work()

        return await self.compute(held) if self.compute else held()

    def _values(self, turns: Sequence[Sampled]) -> Tensor:
        head, budget = self.value_head, self.token_budget
        found = forward(self.model, turns, [0] * len(turns), token_budget=budget, value_head=head, layout=self.layout)
        return found.value_N.cpu()

    def _scored(self, turns: Sequence[Sampled], kind: Kind) -> Scored:
        packed = pack(turns, [0] * len(turns), unroll=self.layout.masks == "none", most=self.token_budget)
        words, tokens = self.model.config.get_text_config().vocab_size, len(packed.id_N)
        given_NM, width = _asked(kind, turns, words)
        if 4 * tokens * width > self.limit_bytes:
            raise ValueError(
                f"log-probs of {width} tokens at each of {tokens} places take {4 * tokens * width} bytes, more than "
                f"the limit of {self.limit_bytes}: ask for the likeliest (kind=64), or for fewer turns at a time"
            )
        every = width == words and given_NM is None  # their ids need not be kept
        order = packed.place_N.argsort()
        place_N, id_N, heat_P = packed.place_N[order], packed.id_N[order], packed.temperature_P
        parts = [(torch.zeros(0), torch.zeros(0, 0 if every else width).long(), torch.zeros(0, width), torch.zeros(0))]

        def block(logits: Tensor, at: slice) -> Tensor:
            ends = torch.searchsorted(place_N, torch.tensor([at.start, at.stop])).tolist()
            # several tokens of one place are several rows, so some at a time
            for some in torch.arange(*ends).split(max(1, self.kept_bytes // (4 * words))):
                row = place_N[some]
                z_nV = logits[(row - at.start).to(logits.device)].float() / heat_P[row, None].to(logits.device)
                most = None if every or given_NM is not None else z_nV.topk(width).indices
                parts.append(_of(z_nV, id_N[some], most if given_NM is None else given_NM[order[some]]))
            return logits.new_empty(0)

        reader(self.model, packed, self.layout, self.kept_bytes)[1](block)
        logp_N, id_NM, logp_NM, tail_N = (torch.cat(x)[order.argsort()] for x in zip(*parts, strict=True))
        return Scored(logp_N, torch.arange(words).expand(tokens, -1) if every else id_NM, logp_NM, tail_N)


def _asked(kind: Kind, turns: Sequence[Sampled], words: int) -> tuple[Tensor | None, int]:
    """The ids [N, M] where they are given, and M."""
    if isinstance(kind, str | int):
        width = {"sampled": 0, "full": words}.get(kind, -1) if isinstance(kind, str) else min(kind, words) or -1
        if width < 0:
            raise ValueError(f'kind is "sampled", "full", a number of tokens from 1 up, or ids, but it is {kind!r}')
        return None, width
    got, wanted = [len(ids) for ids in kind], [len(reply) for _, reply, _ in turns]
    given_NM = torch.cat([*kind] or [torch.zeros(0, 0, dtype=torch.int64)])
    if got != wanted or bool((given_NM.sort(1).values.diff() == 0).any()):
        raise ValueError(f"ids that differ are given for each sampled token, {wanted} a turn; there are {got}")
    return given_NM, given_NM.shape[1]


def _of(z_nV: Tensor, id_n: Tensor, id_nM: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob of the sampled token, ids, their log-probs, log of the mass of all others; without ids those of all."""
    lse_n = z_nV.logsumexp(1)
    logp_n = z_nV.gather(1, id_n[:, None].to(z_nV.device))[:, 0] - lse_n
    if id_nM is None:
        none_n = torch.full_like(logp_n, -torch.inf)
        return logp_n.cpu(), id_n.new_zeros(len(id_n), 0), (z_nV - lse_n[:, None]).cpu(), none_n.cpu()
    there = id_nM.to(z_nV.device)
    # the sum over the others themselves: 1 - sum of the rest has no digits left where the rest is nearly all
    tail_n = z_nV.scatter(1, there, -torch.inf).logsumexp(1) - lse_n
    return logp_n.cpu(), id_nM.cpu(), (z_nV.gather(1, there) - lse_n[:, None]).cpu(), tail_n.cpu()
