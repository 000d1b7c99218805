"""Whether training sees the policy that sampled: the distance between the two log-probabilities of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whippletree.types import Batch


class FidelityError(RuntimeError):
    """Training and sampling disagree about the log-probabilities of the same tokens."""


def drift(logp_train_N: Tensor, batch: Batch) -> dict[str, float]:
    """Mean and maximum of |log-prob at training - log-prob at sampling| in nats, over the trainable tokens.

    Both 0 where nothing is trainable. Meant for a policy that has not moved since it sampled.
    """
    gap_N = _gap(logp_train_N, batch)[batch.trainable_N]
    if not len(gap_N):
        return {"logp_drift/mean": 0.0, "logp_drift/max": 0.0}
    return {"logp_drift/mean": float(gap_N.mean()), "logp_drift/max": float(gap_N.max())}


def check(
    logp_train_N: Tensor,
    batch: Batch,
    *,
    mean_limit: float,
    max_limit: float,
    describe: Callable[[int], str] | None = None,
    worst: int = 3,
) -> dict[str, float]:
    """The drift, if it is within both limits (nats).

    Raises:
        FidelityError: it is not (NaN included), with the worst tokens, each with what `describe(n)` says of it.
    """
    found = drift(logp_train_N, batch)
    if found["logp_drift/mean"] <= mean_limit and found["logp_drift/max"] <= max_limit:
        return found
    gap_N = torch.where(batch.trainable_N, _gap(logp_train_N, batch).nan_to_num(torch.inf), -1.0)
    lines = [
        f"token {n} (id {int(batch.id_N[n])}, turn {int(batch.turn_N[n])}, rollout {int(batch.rollout_N[n])}): "
        f"{float(batch.logp_old_N[n]):.4f} at sampling, {float(logp_train_N[n]):.4f} at training"
        f"{' - ' + describe(n) if describe else ''}"
        for n in gap_N.topk(min(worst, int(batch.trainable_N.sum()))).indices.tolist()
    ]
    raise FidelityError(
        f"log-probs at training must equal those at sampling within {mean_limit:g} on average and {max_limit:g} at "
        f"most, but they differ by {found['logp_drift/mean']:.4g} and {found['logp_drift/max']:.4g}, so the gradient "
        f"would not be of the policy that sampled. Check that engine and trainer hold the same weights, template and "
        f"number type, or raise the limits. Worst:\n" + "\n".join(lines)
    )


def in_context(ids: Sequence[int], at: int, decode: Callable[[Sequence[int]], str], *, around: int = 16) -> str:
    """The text around token number `at`, which stands between >>> and <<<."""
    before, after = ids[max(0, at - around) : at], ids[at + 1 : at + 1 + around // 2]
    return repr(f"{decode(before)}>>>{decode(ids[at : at + 1])}<<<{decode(after)}")


def _gap(logp_train_N: Tensor, batch: Batch) -> Tensor:
    return (logp_train_N.detach().float().cpu() - batch.logp_old_N).abs()
