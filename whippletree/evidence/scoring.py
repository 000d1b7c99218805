"""Distributions that scorers found: a scorer behind a server, and how far two distributions are apart."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from torch import Tensor

from whippletree.types import Batch, Kind, Scored

Ids = tuple[int, ...]
NO_MASS = -9999.0  # how vLLM writes the log of 0 in JSON


# ---- how far apart ----------------------------------------------------------------------------------------------


def outcomes(batch: Batch, column: str) -> Tensor:
    """[N, W] log-probs that `logp_under` found: of all V tokens, or of the M it read and of all others together."""
    if (whole := f"logp_{column}_NV") in batch.extra:
        return batch.extra[whole]
    return torch.cat([batch.column(f"top_logp_{column}_NM"), batch.column(f"log_tail_{column}_N")[:, None]], dim=1)


def outcomes_of(logits_NV: Tensor, batch: Batch, column: str) -> Tensor:
    """[N, W] log-probs of the same outcomes under the logits of a student, `forward.logits_NV`, with their gradient."""
    if f"logp_{column}_NV" in batch.extra:
        return logits_NV.log_softmax(-1)
    id_NM = batch.column(f"top_id_{column}_NM").to(logits_NV.device)
    chosen_NM, others_N = logits_NV.gather(1, id_NM), logits_NV.scatter(1, id_NM, -torch.inf).logsumexp(1)
    return torch.cat([chosen_NM, others_N[:, None]], dim=1) - logits_NV.logsumexp(1, keepdim=True)


def forward_kl(student_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """[N] KL(teacher || student) = sum_w p_T (log p_T - log p_S), in nats; see `reverse_kl`."""
    return reverse_kl(teacher_NW, student_NW)


def reverse_kl(student_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """[N] KL(student || teacher) = sum_w p_S (log p_S - log p_T), in nats, from log-probs of the same outcomes.

    Exact over the vocabulary; with a tail it is that of the coarser distributions, which is never more. NaN, with
    gradient 0, where either is missing.
    """
    missing_N = (student_NW.isnan() | teacher_NW.isnan()).any(dim=1)
    # 0 log 0 = 0; replaced before the product, so that no gradient of what is left out is NaN
    counts_NW = (student_NW > -torch.inf) & ~missing_N[:, None]
    p_NW, q_NW = (torch.where(counts_NW, x, 0.0) for x in (student_NW, teacher_NW))
    sum_N = torch.where(counts_NW, p_NW.exp() * (p_NW - q_NW), 0.0).sum(dim=1)
    return torch.where(missing_N, torch.nan, sum_N)


def jensen_shannon(student_NW: Tensor, teacher_NW: Tensor, *, weight: float = 0.5) -> Tensor:
    """[N] between the two, bounded: (1 - w) KL(p_S || M) + w KL(p_T || M),  M = (1 - w) p_S + w p_T, in nats.

    Raises:
        ValueError: the weight is not between 0 and 1.
    """
    if not 0 < weight < 1:
        raise ValueError(f"the weight of the teacher is between 0 and 1, but it is {weight}; at the ends use a KL")
    missing_NW = student_NW.isnan() | teacher_NW.isnan()
    neither_NW = missing_NW | ((student_NW == -torch.inf) & (teacher_NW == -torch.inf))
    p_NW, q_NW = (torch.where(neither_NW, 0.0, x) for x in (student_NW, teacher_NW))
    mixed_NW = torch.logaddexp(p_NW + math.log1p(-weight), q_NW + math.log(weight)).masked_fill(missing_NW, torch.nan)
    return (1 - weight) * reverse_kl(student_NW, mixed_NW) + weight * reverse_kl(teacher_NW, mixed_NW)


# ---- behind a server --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ServedScorer:
    """A `Reader` behind a vLLM server: the `prompt_logprobs` of its completions, asked with token ids.

    They are those of softmax(logits) at temperature 1, whatever the request or --logprobs-mode says, so turns sampled
    at another temperature are refused. The server's model must read the policy's own token ids. Turns that go on from
    one another are one request. A turn is None where the server fails on it; `counts` and `reason` say so.
    """

    url: str  # what stands before `/completions`
    model: str
    key: str = field(default="", repr=False)
    tls: Any = field(default_factory=httpx.create_ssl_context, repr=False)
    at_once: int = 8
    attempts: int = 5
    wait: float = 1.0  # seconds before the second attempt, twice that before the third, and so on
    timeout: float = 120.0  # seconds for each
    counts: Counter[str] = field(default_factory=Counter)
    reason: str = ""  # of the last request that failed

    async def logps(self, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
        """For each (prompt_ids, reply_ids): float32 [len(reply_ids)] at temperature 1; NaN where the server failed."""
        found = await self.score([(*turn, 1.0) for turn in turns])
        pairs = zip(found, turns, strict=True)
        return [torch.full((len(reply),), torch.nan) if s is None else s.logp_N for s, (_, reply) in pairs]

    async def score(
        self, turns: Sequence[tuple[Sequence[int], Sequence[int], float]], kind: Kind = "sampled"
    ) -> list[Scored | None]:
        """For each (prompt_ids, reply_ids, temperature) the sampled token, or with a number for `kind` the likeliest.

        Raises:
            ValueError: another kind or temperature, a prompt without tokens, or answers without log-probs.
            ConnectionError: no request was answered.
        """
        if kind != "sampled" and not (isinstance(kind, int) and kind > 0):
            told = repr(kind) if isinstance(kind, str | int) else "given ids"
            raise ValueError(f"a server gives the sampled token or its own likeliest ones, but was asked for {told}")
        for k, (prompt, reply, temperature) in enumerate(turns):
            if (reply and not prompt) or (temperature or 1.0) != 1.0:
                raise ValueError(
                    f"a server's log-probs are at temperature 1 and need a prompt, but turn {k} was sampled at "
                    f"{temperature} after {len(prompt)} tokens: score it with a local model"
                )
        most = 0 if isinstance(kind, str) else int(kind)
        row_of = _chains([(*prompt, *reply) for prompt, reply, _ in turns if reply])
        rows, gate = list(dict.fromkeys(row_of.values())), asyncio.Semaphore(self.at_once)
        async with httpx.AsyncClient(verify=self.tls, timeout=self.timeout) as client:
            answers = await asyncio.gather(*(self._asked(client, gate, row, most) for row in rows))
        said = {row: _places(answer, row) for row, answer in zip(rows, answers, strict=True) if answer is not None}
        if rows and not said:
            raise ConnectionError(f"{self.url} answered none of {len(rows)} requests for log-probs: {self.reason}")
        places = [said.get(row_of[*prompt, *reply]) if reply else [] for prompt, reply, _ in turns]
        found = [None if x is None else _parsed(x, *turn[:2], most) for x, turn in zip(places, turns, strict=True)]
        self.counts.update(turns=len(turns), missing=found.count(None))
        return found

    async def _asked(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, row: Ids, most: int) -> Any:
        """The answer on these tokens; None where there is none."""
        body = {"model": self.model, "prompt": list(row), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": most}
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        for attempt in range(self.attempts):
            await asyncio.sleep(self.wait * attempt)
            self.counts["requests"] += 1
            try:
                async with gate:
                    got = await client.post(f"{self.url.rstrip('/')}/completions", json=body, headers=headers)
            except httpx.TransportError as error:
                self.reason = repr(error)
                continue
            if got.status_code == 200:
                return got.json()
            self.reason = f"{got.status_code} {got.text:.200}"
            if got.status_code < 500 and got.status_code not in (408, 429):  # such as a row that is too long for it
                return None
        return None


def _chains(rows: Sequence[Ids]) -> Mapping[Ids, Ids]:
    """For each row one of them that begins with it and that no other goes on from."""
    last: dict[Ids, Ids] = {}
    after: Ids = ()
    for row in sorted(set(rows), reverse=True):  # what begins with a row stands right after it in order
        last[row] = last[after] if after[: len(row)] == row else row
        after = row
    return last


def _places(answer: Any, row: Ids) -> list[Any]:
    places: list[Any] = answer["choices"][0].get("prompt_logprobs") or []
    if len(places) != len(row):
        raise ValueError(
            f"an answer of vLLM's completions has `prompt_logprobs` for each of {len(row)} tokens, but got "
            f"{answer!s:.200}"
        )
    return places


def _parsed(places: Sequence[Any], prompt: Sequence[int], reply: Sequence[int], most: int) -> Scored:
    """One turn of an answer. The sampled token, which the server adds to the likeliest, is no outcome by itself."""
    if not reply:
        return Scored(torch.zeros(0), torch.zeros(0, most, dtype=torch.int64), torch.zeros(0, most), torch.zeros(0))
    said = [{int(i): x["logprob"] for i, x in place.items()} for place in places[len(prompt) :][: len(reply)]]
    top = [sorted(place, key=lambda i: -place[i])[:most] for place in said]
    values_NM = torch.tensor([[place[i] for i in ids] for place, ids in zip(said, top, strict=True)]).double()
    sampled_N = torch.tensor([place[i] for place, i in zip(said, reply, strict=True)]).double()
    mass_N = values_NM.exp().sum(dim=1)
    if bool((torch.maximum(mass_N, sampled_N.exp()) > 1 + 1e-3).any()):
        raise ValueError("log-probs have more mass than 1: the server gives logits; start it without --logprobs-mode")
    # fewer than were asked for are the whole vocabulary; else float32 leaves some mass to the others
    tail_N = (1 - mass_N).clamp(min=1e-7).log() if len(top[0]) == most else torch.full_like(mass_N, -torch.inf)
    logp_N, logp_NM = (torch.where(x <= NO_MASS, -torch.inf, x).float() for x in (sampled_N, values_NM))
    return Scored(logp_N, torch.tensor(top, dtype=torch.int64), logp_NM, tail_N.float())
