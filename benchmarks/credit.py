"""What each credit rule costs, in microseconds per thousand sampled tokens: `python -m benchmarks.credit`.

Rollouts of 50 turns of 20 sampled tokens, in groups of 10, from ten thousand to ten million tokens; no models. Every
call starts from a batch without anything kept from the last one, on one thread. What counts is processor time, of the
quickest of some calls, as what else runs on the machine can only slow it; the shortest time on the clock is written
too. It fails where a rule takes half a second for a million tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from whippletree import credit
from whippletree.types import Batch, Credit

RESULTS = Path(__file__).parent / "results" / "credit.json"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
TURNS, REPLY, GROUP = 50, 20, 10  # turns of a rollout, tokens of a turn, rollouts of a group
MOST_SECONDS, AT = 0.5, 1_000_000


def example(tokens: int) -> Batch:
    """A batch of that many tokens with every column that a rule reads; a tenth of the tokens may not train."""
    rollouts, draw = tokens // (TURNS * REPLY), torch.Generator().manual_seed(0)
    turns = rollouts * TURNS
    old_N = -torch.rand(tokens, generator=draw)
    position_K = torch.arange(turns) % TURNS
    fork_K = torch.where(position_K % 5 == 4, 2, 1).clamp(max=position_K)  # every fifth turn is tried again
    # in pairs, the second rollout goes on from the middle of the first
    rollout_K = torch.arange(turns) // TURNS
    held_K = torch.where((rollout_K % 2 == 1) & (position_K < TURNS // 2), rollout_K - 1, rollout_K)
    above_K = torch.where((rollout_K % 2 == 1) & (position_K <= TURNS // 2), rollout_K - 1, rollout_K)
    return Batch(
        group_R=torch.arange(rollouts) // GROUP,
        rollout_K=rollout_K,
        turn_N=torch.arange(tokens) // REPLY,
        id_N=torch.randint(50_000, (tokens,), generator=draw),
        logp_old_N=torch.where(torch.rand(tokens, generator=draw) < 0.1, torch.nan, old_N),
        version_N=torch.zeros(tokens, dtype=torch.int64),
        reward_RC=torch.rand(rollouts, 1, generator=draw),
        extra={
            "value_N": torch.rand(tokens, generator=draw),
            "ref_logp_N": old_N - 0.1,
            "score_K": torch.rand(turns, generator=draw),
            "state_K": torch.randint(100, (turns,), generator=draw),
            "back_K": fork_K,
            "node_K": held_K * TURNS + position_K,
            "above_K": torch.where(position_K > 0, above_K * TURNS + position_K - 1, -1),
        },
    )


def laid_out(batch: Batch, *, weight: str) -> torch.Tensor:
    """[N] the group's advantage, laid out over turns by weights from `score_K`."""
    score_K = batch.extra["score_K"]
    weights: dict[str, Credit] = {
        "uniform": credit.uniform,
        "proportional": partial(credit.proportional, score_K),
        "softmax": partial(credit.softmax_within, score_K),
        "top": partial(credit.top_turns, score_K, turns=5),
        "shuffled": partial(credit.shuffled, score_K, seed=0),
    }
    return credit.redistributed(credit.group_mean(batch), weights[weight](batch), batch, by="tokens")


def over_tokens(batch: Batch) -> torch.Tensor:
    return credit.redistributed_over_tokens(credit.group_mean(batch), batch.extra["value_N"], batch)


def against_turns(batch: Batch, *, state: bool) -> torch.Tensor:
    """[N] the return of a turn less that of other rollouts' turns at its position, or in its state."""
    return_K = credit.turn_returns(batch.extra["score_K"], batch, gamma=0.95)
    key_K = batch.extra["state_K"] if state else None
    return credit.turn_to_tokens(return_K - credit.turn_baseline(return_K, batch, key_K=key_K), batch)


def summed(batch: Batch) -> torch.Tensor:
    return credit.turn_to_tokens(credit.turn_mean(batch.extra["value_N"], batch), batch)


def in_rollouts(batch: Batch) -> torch.Tensor:
    """[N] the credit of trees within rollouts, from an outcome of each leaf."""
    extra = {name: x for name, x in batch.extra.items() if name not in ("node_K", "above_K")}
    return credit.tree_advantage(replace(batch, extra=extra), outcome="score_K")


RULES: Mapping[str, Credit] = {
    "group_mean": credit.group_mean,
    "leave_one_out": credit.leave_one_out,
    "batch_mean": credit.batch_mean,
    "reward_to_go": partial(credit.reward_to_go, gamma=0.99, kl_beta=0.01),
    "gae": partial(credit.gae, gamma=0.99, lam=0.95),
    "gae without discount": credit.gae,
    "whitened": partial(credit.whitened, credit=credit.group_mean),
    "redistributed: uniform": partial(laid_out, weight="uniform"),
    "redistributed: proportional": partial(laid_out, weight="proportional"),
    "redistributed: softmax_within": partial(laid_out, weight="softmax"),
    "redistributed: top_turns": partial(laid_out, weight="top"),
    "redistributed: shuffled": partial(laid_out, weight="shuffled"),
    "redistributed_over_tokens": over_tokens,
    "turn_mean": summed,
    "turn_baseline by position": partial(against_turns, state=False),
    "turn_baseline by state": partial(against_turns, state=True),
    "tree_advantage in rollouts": in_rollouts,
    "tree_advantage between rollouts": credit.tree_advantage,
}


def seconds(rule: Credit, batch: Batch, *, calls: int) -> tuple[float, float]:
    """The least processor time and the least time on the clock of some calls, each on a batch as if it were new."""
    processor, clock = [], []
    for _ in range(calls):
        fresh = replace(batch)
        started, began = time.process_time(), time.perf_counter()
        rule(fresh)
        processor.append(time.process_time() - started)
        clock.append(time.perf_counter() - began)
    return min(processor), min(clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5, help="of each rule at each size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    took: dict[str, dict[str, float]] = {name: {} for name in RULES}
    clock: dict[str, dict[str, float]] = {name: {} for name in RULES}
    print("microseconds per thousand tokens, of" + "".join(f"{size:>12,}" for size in SIZES))
    for size in SIZES:
        batch = example(size)
        for name, rule in RULES.items():
            took[name][str(size)], clock[name][str(size)] = seconds(rule, batch, calls=given.calls)
    for name, by_size in took.items():
        print(f"{name:36}" + "".join(f"{1e9 * by_size[str(size)] / size:12.1f}" for size in SIZES))
    result = {
        "processor_seconds": took,
        "clock_seconds": clock,
        "turns_of_a_rollout": TURNS,
        "tokens_of_a_turn": REPLY,
        "rollouts_of_a_group": GROUP,
        "calls": given.calls,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    slow = {name: by_size[str(AT)] for name, by_size in took.items() if by_size[str(AT)] >= MOST_SECONDS}
    slowest = max(took, key=lambda name: took[name][str(AT)])
    print(f"slowest for a million tokens: {slowest}, {took[slowest][str(AT)]:.3f} s; written to {given.out}")
    if slow:
        raise SystemExit(f"these take {MOST_SECONDS} s or more for a million tokens: {slow}")


if __name__ == "__main__":
    main()
