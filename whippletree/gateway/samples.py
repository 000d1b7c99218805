"""Rollouts as the samples that other trainers read, in their field names.

A sample is a run of turns of one thread, each of which begins with the whole of the one before: the first prompt, and
then replies and what came between them. Its mask is 1 at tokens that were sampled and may be trained: those whose
log-probability is known, in turns that are `trainable`. At the others the log-probability is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from whippletree.types import Json, Rollout, Turn

OURS = "rollout_id=rollout_id group=group thread=thread"
LAYOUTS = {  # their field = part of a sample
    "verl": "prompt_ids=prompt response_ids=reply response_mask=mask response_logprobs=logps reward_score=reward",
    "trl": "prompt_ids=prompt completion_ids=reply env_mask=mask logprobs=logps reward=reward",
    "verifiers": "prompt_ids=prompt prompt_mask=prompt_mask completion_ids=reply completion_mask=mask "
    "completion_logprobs=logps reward=reward",
    "prime-rl": "token_ids=all mask=all_mask logprobs=all_logps temperatures=temperatures reward=reward",
    "slime": "tokens=all response_length=length loss_mask=mask rollout_log_probs=logps reward=reward status=status",
    "agent-lightning": "prompt=prompt_tokens response=reply_tokens reward=reward",
}
SINGLE = ("agent-lightning",)  # has no mask, so a sample is one turn
KINDS = {"all_mask": "flags", "length": "whole", "reward": "number"}  # of the parts that their names do not tell
KINDS |= dict.fromkeys(("logps", "all_logps", "temperatures"), "numbers")
KINDS |= dict.fromkeys(("prompt_tokens", "reply_tokens"), "tokens")
KINDS |= dict.fromkeys(("status", "rollout_id", "group", "thread"), "text")


def layout(name: str) -> Mapping[str, str]:
    """The columns of samples for this trainer, and what each is in Parquet.

    Raises:
        ValueError: no such trainer is known.
    """
    if name not in LAYOUTS:
        raise ValueError(f"samples are written for one of {', '.join(LAYOUTS)}, but got {name!r}")
    return {field: KINDS.get(part, "ids") for field, part in _parts(name)}


def samples(rollout: Rollout, name: str) -> Iterator[Json]:
    """The samples of one rollout for this trainer; none of a failed one, and none in which nothing can train.

    The reward is the sum of the channels that apply, and null where none does.
    """
    if rollout.ending == "failed":
        return
    for chain in chains(rollout.turns, single=name in SINGLE):
        sample = _sample(rollout, chain)
        if any(sample["mask"]):
            yield {field: sample[part] for field, part in _parts(name)}


def chains(turns: Sequence[Turn], *, single: bool = False) -> list[list[Turn]]:
    """The turns, in runs of one thread in which each prompt begins with the prompt and reply before; or one by one."""
    found: list[list[Turn]] = []
    for turn in turns:
        for chain in found[::-1]:
            before = chain[-1].prompt_ids + chain[-1].reply_ids
            if not single and chain[-1].thread == turn.thread and turn.prompt_ids[: len(before)] == before:
                chain.append(turn)
                break
        else:
            found.append([turn])
    return found


def _parts(name: str) -> list[list[str]]:
    return [pair.split("=") for pair in f"{LAYOUTS[name]} {OURS}".split()]


def _sample(rollout: Rollout, chain: Sequence[Turn]) -> Json:
    prompt, reply, mask, logps = list(chain[0].prompt_ids), list[int](), list[int](), list[float]()
    temperatures = [chain[0].temperature] * len(prompt)
    for turn in chain:
        between = turn.prompt_ids[len(prompt) + len(reply) :]
        known = [turn.trainable and not math.isnan(logp) for logp in turn.reply_logps]
        reply += [*between, *turn.reply_ids]
        mask += [0] * len(between) + list(map(int, known))
        logps += [0.0] * len(between) + [logp if k else 0.0 for k, logp in zip(known, turn.reply_logps, strict=True)]
        temperatures += [turn.temperature] * (len(between) + len(known))
    rewards = [reward for reward in rollout.rewards.values() if reward is not None]
    truncated = rollout.ending == "truncated" or chain[-1].finish_reason == "length"
    return {
        "prompt": prompt,
        "prompt_mask": [0] * len(prompt),
        "reply": reply,
        "mask": mask,
        "logps": logps,
        "prompt_tokens": {"token_ids": prompt},
        "reply_tokens": {"token_ids": reply},
        "length": len(reply),
        "all": prompt + reply,
        "all_mask": [False] * len(prompt) + list(map(bool, mask)),
        "all_logps": [0.0] * len(prompt) + logps,
        "temperatures": temperatures,
        "reward": float(sum(rewards)) if rewards else None,
        "status": "truncated" if truncated else "completed",
        "rollout_id": rollout.id,
        "group": rollout.group,
        "thread": chain[0].thread,
    }
