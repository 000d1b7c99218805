"""A search world: facts in documents, and a prior that answers without reading; right where one trains, not elsewhere.

Question q asks for fact q, which document q tells; its answer is q. Actions 0 to Q - 1 query a document, Q + a answers
a, which ends the episode. The letter Q: questions, documents and answers alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from whippletree.toys.played import Array, Played
from whippletree.toys.world import END, World


@dataclass(frozen=True)
class Search:
    """The world, its two sets of questions, and what the policy believes before it reads."""

    world: World  # of the questions one trains on
    held_out: World  # the same, of the others
    prior_Q: Tensor  # the answer that comes to mind: right on the training set, wrong on the held-out questions


def search_world(*, facts: int = 20, held_out: int = 5, steps: int = 4) -> Search:
    """Reward 1 for the right answer. One sees the question and the document that was read last, or none.

    Place and state: q * (Q + 1) + 1 + (last document, -1: none); the state adds P once document q has been read.
    Measures: "grounded", a right answer after its document was read; "found", the first reading of it; "searches".
    """
    Q = facts
    P = Q * (Q + 1)
    state_S = torch.arange(2 * P)
    asked_S, known_S = state_S % P // (Q + 1), state_S >= P
    action_V = torch.arange(2 * Q)
    queries_SV = (action_V < Q).expand(2 * P, 2 * Q)
    hits_SV = action_V == asked_S[:, None]
    read_SV = asked_S[:, None] * (Q + 1) + 1 + action_V + P * (known_S[:, None] | hits_SV)
    right_SV = (action_V - Q == asked_S[:, None]).float()
    question_Q = torch.arange(Q)
    world = World(
        next_SV=torch.where(queries_SV, read_SV, END),
        rewards={"reward": right_SV},
        measures={
            "grounded": right_SV * known_S[:, None],
            "found": (hits_SV & ~known_S[:, None]).float(),
            "searches": queries_SV.float(),
        },
        place_S=state_S % P,
        start_G=question_Q[: Q - held_out] * (Q + 1),
        steps=steps,
        does=(*(f"query {q}" for q in range(Q)), *(f"answer {q}" for q in range(Q))),
        sees=tuple(
            f"question {q}" + (f", document {d} says {d}" if d >= 0 else "") for q in range(Q) for d in range(-1, Q)
        ),
    )
    wrong_Q = torch.where(question_Q < Q - held_out, question_Q, (question_Q + 1) % Q)
    return Search(world, replace(world, start_G=question_Q[Q - held_out :] * (Q + 1)), wrong_Q)


def searcher(search: Search, *, guess: float = 3.0, look: float = 3.0, read: float = 3.0) -> tuple[Tensor, Tensor]:
    """`start_PV` and `index_PV` of a `Table` that treats all questions alike.

    What it can tell apart: nothing read yet, the asked document read last, another read last; and of actions: to query
    the asked document, another; to answer what comes to mind, what the last document says, something else. The logits
    it starts with favour querying what is asked, answering what comes to mind, and answering what was read.
    """
    Q = len(search.prior_Q)
    place_P = torch.arange(search.world.places)
    asked_P, last_P = place_P // (Q + 1), place_P % (Q + 1) - 1
    view_P = torch.where(last_P < 0, 0, torch.where(last_P == asked_P, 1, 2))
    action_V = torch.arange(2 * Q)
    kind_PV = torch.where(action_V < Q, 1, 4).repeat(len(place_P), 1)
    kind_PV[action_V == asked_P[:, None]] = 0
    kind_PV[action_V - Q == search.prior_Q[asked_P][:, None]] = 2
    kind_PV[(action_V - Q == last_P[:, None]) & (last_P >= 0)[:, None]] = 3
    start_PV = torch.tensor([look, 0.0, guess, read, 0.0])[kind_PV]
    return start_PV, 5 * view_P[:, None] + kind_PV


def evidence_found(played: Played) -> tuple[Array, Array]:
    """(found [R, T], used [R]): the action brought the asked document for the first time; the answer stands in a
    document that was read. Both 0 or 1; `used` is NaN where nothing was answered."""
    Q = played.world.actions // 2
    found_RT = played.world.table("found").numpy()[played.state_RT, played.action_RT] * played.taken_RT
    rows = np.arange(len(played))
    last_R = played.action_RT[rows, played.length_R - 1]
    read_RT = (played.action_RT == (last_R - Q)[:, None]) & played.taken_RT
    used_R = np.where(last_R >= Q, read_RT.any(1).astype(np.float32), np.nan)
    return found_RT, used_R
