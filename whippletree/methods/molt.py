"""Molt: a small trainer with exact tokens, whose engine may lag behind (NVIDIA 2026, arXiv:2607.21653).

evidence   log pi_trainer(t), the trainer's own log-prob before the update
A_i  = r_i - mean(r) over the group, then whitened over all tokens of the batch     ("reinforce_baseline")
w_t  = min(pi_trainer(t) / pi_engine(t), 2)                        the engine/trainer correction, no gradient
loss = -w_t min(rho_t A_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A_t),  rho_t = pi(t) / pi_trainer(t)
averaged over the trainable tokens of the whole batch, so neither ranks nor micro-batches change it
"""

from __future__ import annotations

from functools import partial

import torch

from whippletree import credit, objective
from whippletree.evidence import trainer_logps
from whippletree.objective import diagnose
from whippletree.types import Batch, Claim, Forward, Method, Paper
from whippletree.update.averages import token_mean

CORRECTED = partial(objective.truncated_importance, objective=partial(objective.clipped_ratio, low=0.2, high=0.2))

METHOD = Method(
    paper=Paper(
        "Molt: a small, readable, token-exact asynchronous RL trainer for agents",
        authors="NVIDIA",
        year=2026,
        arxiv="2607.21653",
        source="summary",
        also_called=("labs-molt", "reinforce_baseline"),
    ),
    evidence=(trainer_logps,),
    credit=partial(credit.whitened, credit=partial(credit.group_mean, scale="none")),
    objective=partial(CORRECTED, level="token", mode="trunc", high=2.0),
    average=token_mean,
    differs="the recipes mask outside 0.99-1.01, which the page reports to reject whole batches; METHOD truncates at 2 "
    "and the mask is an arm of CLAIM. A lone rollout has advantage 0 or is refused, where leave-one-out in the code "
    "falls back to the raw reward. Its gate is over a segment, ours over the rollout. CLAIM measures the correction on "
    "a table of logits instead of a small transformer with a queue, since there the true gradient is known; that a "
    "change of algorithm is one function in one place is tested beside this file with the paper's own example",
)


def behind(drift: float, seed: int) -> tuple[Batch, Forward, torch.Tensor, torch.Tensor]:
    """Samples of an engine whose logits lie `drift` (standard deviation) from the trainer's, and the trainer's pass.

    64 groups of 8 rollouts of 3 tokens over 6 symbols; the reward is the sum of a random score of each symbol at each
    place. Returns the batch, the forward pass, the trainer's logits, and the exact expected reward as their function.
    """
    groups, size, length, symbols = 64, 8, 3, 6
    random = torch.Generator().manual_seed(seed)
    engine, step, score = torch.randn(3, length, symbols, generator=random).unbind()
    trainer = (engine + drift * step).requires_grad_()
    place = torch.arange(length).repeat(groups * size)
    ids = torch.multinomial(engine.softmax(-1), groups * size, replacement=True, generator=random).T.reshape(-1)
    rollout = torch.arange(groups * size)
    logp_N = trainer.log_softmax(-1)[place, ids]
    batch = Batch(
        group_R=rollout // size,
        rollout_K=rollout,
        turn_N=rollout.repeat_interleave(length),
        id_N=ids,
        logp_old_N=engine.log_softmax(-1)[place, ids],
        version_N=torch.zeros_like(ids),
        reward_RC=score[place, ids].view(-1, length).sum(1, keepdim=True),
        extra={"logp_train_N": logp_N.detach()},
    )
    return batch, Forward(logp_N), trainer, (trainer.softmax(-1) * score).sum()


def gradient_error(arm: Method, seed: int) -> float:
    """1 - cosine between the gradient `arm` takes on an engine's samples and the exact one: 0 right, 1 useless."""
    batch, forward, trainer, reward = behind(0.5, seed)
    loss = (arm.average(batch) * arm.objective(forward, arm.credit(batch), batch)).sum()
    (taken,) = torch.autograd.grad(-loss, trainer, retain_graph=True)
    (exact,) = torch.autograd.grad(reward, trainer)
    return 1 - torch.cosine_similarity(taken.flatten(), exact.flatten(), dim=0).item()


def lag(drift: float, seed: int) -> float:
    """KL (nats a token) between the engine that sampled and the trainer, as a run measures it; 0 after a sync."""
    batch, forward, _, _ = behind(drift, seed)
    return diagnose(forward.logp_N, torch.zeros(batch.tokens), batch, low=0.2, high=0.2)["kl"]


CLAIM = Claim(
    says="on rollouts of an engine behind the trainer, the correction brings the gradient closer to the true one",
    baseline=METHOD.but(objective=partial(CORRECTED, mode="clip", low=1.0, high=1.0)),  # every weight is 1
    method=METHOD,
    measure=gradient_error,
    better="lower",
    seeds=16,
    arms={"mask 0.99-1.01": METHOD.but(objective=partial(CORRECTED, mode="mask", low=0.99, high=1.01))},
)
