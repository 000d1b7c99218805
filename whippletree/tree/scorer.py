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
    """A `Reader` over packed rows; with a value head, a `Scorer` that gives its outputs in place of log-probs."""

    model: Any
    layout: Layout
    temperature: float  # of `logps`, whose turns name none
    token_budget: int
    value_head: nn.Module | None = None
    compute: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None  # where set, it runs what is computed
    weights: Callable[[], AbstractContextManager[object]] = nullcontext  # held while it computes: an average, a copy
    limit_bytes: int = 2**31  # most bytes of log-probs that a call may give

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """For each (prompt_ids, reply_ids): float32 [len(reply_ids)], no gradient."""
        triples = [(prompt, reply, self.temperature) for prompt, reply in turns]
        if self.value_head is None:
            return [scored.logp_N for scored in await self.score(triples)]
        value_N: Tensor = await self._computed(lambda: self._values(triples))
        return list(value_N.split([len(reply) for _, reply in turns]))

    async def score(self, turns: Sequence[Sampled], kind: Kind = "sampled") -> list[Scored]:
        """For each (prompt_ids, reply_ids, temperature) what is asked for, on the CPU.

        Raises:
            ValueError: it has a value head, or the answer would be larger than `limit_bytes`.
        """
        if self.value_head is not None:
            raise ValueError("this scorer gives values, which are no distribution: ask the scorer of the same model")
        found: Scored = await self._computed(
            lambda: read_off(
                self.model,
                sampled(turns),
                kind,
                layout=self.layout,
                token_budget=self.token_budget,
                limit_bytes=self.limit_bytes,
            )
        )
        return found.split([len(reply) for _, reply, _ in turns])

    @torch.no_grad()
    def _values(self, turns: Sequence[Sampled]) -> Tensor:
        return forward(
            self.model,
            turns,
            [0] * len(turns),
            layout=self.layout,
            token_budget=self.token_budget,
            value_head=self.value_head,
        ).value_N.cpu()

    async def _computed(self, work: Callable[[], Any]) -> Any:
        def held() -> Any:
            with self.weights():
                return work()

        return await self.compute(held) if self.compute else held()


@torch.no_grad()
def read_off(
    model: Any,
    turns: Sequence[Sampled],
    kind: Kind = "sampled",
    *,
    layout: Layout,
    token_budget: int | None = None,
    kept_bytes: int = 2**28,
    limit_bytes: int = 2**31,
) -> Scored:
    """What a model says at each sampled token of these turns, in turn order, on the CPU.

    Up to `kept_bytes` of logits stand in memory at a time, whatever the number of tokens; where the head is more than
    a linear map, those of all the places.

    Raises:
        ValueError: the log-probs would take more than `limit_bytes`, or there are not M ids for each sampled token.
    """
    packed = pack(turns, [0] * len(turns), unroll=layout.masks == "none", most=token_budget)
    words, tokens = model.config.get_text_config().vocab_size, len(packed.id_N)
    given_NM = _given(kind, turns)
    width = _width(kind, given_NM, words)
    if 4 * tokens * width > limit_bytes:
        raise ValueError(
            f"log-probs of {width} tokens at each of {tokens} places take {4 * tokens * width} bytes, more than the "
            f"limit of {limit_bytes}: ask for the most likely tokens (kind=64), or for fewer turns at a time"
        )
    device = model.get_input_embeddings().weight.device
    order = packed.place_N.argsort()
    place_N, id_N, heat_P = packed.place_N[order], packed.id_N[order].to(device), packed.temperature_P.to(device)
    read = reader(model, packed, layout, kept_bytes)[1]
    kept = 0 if width == words and given_NM is None else width  # ids that are all ids need not be kept
    parts: list[tuple[Tensor, ...]] = []

    def block(logits: Tensor, at: slice) -> Tensor:
        ends = torch.searchsorted(place_N, torch.tensor([at.start, at.stop])).tolist()
        step = max(1, kept_bytes // (4 * words))
        for a in range(ends[0], ends[1], step):  # several tokens of one place are several rows
            some = slice(a, min(a + step, ends[1]))
            row = place_N[some].to(device)
            z_nV = logits[row - at.start].float() / heat_P[row, None]
            ids = _most(z_nV, width) if given_NM is None else given_NM[order[some]].to(device)
            logp_n, logp_nM, tail_n = _of(z_nV, id_N[some], ids)
            parts.append((logp_n.cpu(), ids[:, :kept].cpu(), logp_nM.cpu(), tail_n.cpu()))
        return logits.new_empty(0)

    read(block)
    empty = (torch.zeros(0), torch.zeros(0, kept, dtype=torch.int64), torch.zeros(0, width), torch.zeros(0))
    back = order.argsort()
    logp_N, id_NM, logp_NM, tail_N = (torch.cat(column)[back] for column in zip(empty, *parts, strict=True))
    return Scored(logp_N, id_NM if kept == width else torch.arange(words).expand(tokens, -1), logp_NM, tail_N)


def _given(kind: Kind, turns: Sequence[Sampled]) -> Tensor | None:
    if isinstance(kind, str | int):
        return None
    got, wanted = [len(ids) for ids in kind], [len(reply) for _, reply, _ in turns]
    if got != wanted:
        raise ValueError(f"ids are given for each sampled token, {wanted} a turn, but there are {got}")
    given_NM = torch.cat([*kind] or [torch.zeros(0, 0, dtype=torch.int64)])
    if bool((given_NM.sort(1).values.diff() == 0).any()):
        raise ValueError("the ids given for a token must differ, or their mass would count twice")
    return given_NM


def _width(kind: Kind, given_NM: Tensor | None, words: int) -> int:
    """M: how many tokens are read beside each sampled one."""
    if given_NM is not None:
        return given_NM.shape[1]
    if isinstance(kind, str) and kind in (spelled := {"sampled": 0, "full": words}):
        return spelled[kind]
    if not isinstance(kind, int) or kind < 1:
        raise ValueError(f'kind is "sampled", "full", a number of tokens from 1 up, or ids, but it is {kind!r}')
    return min(kind, words)


def _most(z_nV: Tensor, width: int) -> Tensor:
    """[n, width] the most likely ids, or all in their own order."""
    words = z_nV.shape[1]
    return torch.arange(words, device=z_nV.device).expand_as(z_nV) if width == words else z_nV.topk(width).indices


def _of(z_nV: Tensor, id_n: Tensor, id_nM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the sampled token and of these ids, and the log of the mass of all others."""
    lse_n = z_nV.logsumexp(1)
    logp_n = z_nV.gather(1, id_n[:, None])[:, 0] - lse_n
    # the sum over the others themselves: 1 - sum of the rest has no digits left where the rest is nearly all
    tail_n = z_nV.scatter(1, id_nM, -torch.inf).logsumexp(1) - lse_n
    return logp_n, z_nV.gather(1, id_nM) - lse_n[:, None], tail_n
