"""Which turns of a rollout may train, where the harness is a black box that retries, forks, and asks on the side.

A policy is a `Keep`: `threads` keeps the turns of some kinds of thread, `main_paths` prunes the tree of the rollout.
`kept` applies one to the rollouts of a step, and `apart` credits sub-agents against sub-agents. Each turn holds its
whole prompt, so leaving one out takes away its sampled tokens and nothing from the turns that continue it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from whippletree.types import Keep, Kept, Rollout, Turn

MAIN = ("main",)


def threads(rollout: Rollout, *, kinds: Sequence[str] = MAIN) -> Kept:
    """The turns of threads of these kinds; the others are counted as `tree/aux/KIND`.

    Raises:
        ValueError: no kind is named, so that nothing could train.
    """
    if not kinds or isinstance(kinds, str):
        raise ValueError(
            f"threads keeps the turns of a list of kinds, such as ('main', 'sub-agent'), but got {kinds!r}"
        )
    others = Counter(f"tree/aux/{turn.kind}" for turn in rollout.turns if turn.kind not in kinds)
    return Kept(tuple(turn for turn in rollout.turns if turn.kind in kinds), others)


def main_paths(rollout: Rollout, *, most: int = 8) -> Kept:
    """The turns on the main paths of the rollout's tree: none of a dead leaf, of a side thread, or of a thicket.

        tree/dead_leaves    leaves that a later request with the same parent and prompt replaces, or whose reply is
                            empty or was cut off by an abort; the last leaf is never dead
        tree/aux            turns of other threads than the main one: sub-agents, titles, summaries
        tree/over_branched  1 if more than `most` leaves remain; then no turn of the rollout is kept

    A rollout without turns stays in its group, so its reward still counts in the baseline. A parent that loses its leaf
    ends its path and is not looked at again. Replies that one request asked for together do not replace each other.

    The parts of a rollout that did not lead to its reward get no credit by it; good sub-agents and summaries get none
    either, and broadcasting the reward to them would be biased instead. `threads` and `apart` are that other choice.

    Source: ClawGym II (arXiv:2608.16798) for what is removed; which turns that are is our reading.
    """
    dead = _dead_leaves(rollout.turns)
    alive = [turn for k, turn in enumerate(rollout.turns) if k not in dead]
    main = tuple(turn for turn in alive if turn.kind in MAIN)
    thicket = len(leaves(main)) > most
    counts = {"dead_leaves": len(dead), "aux": len(alive) - len(main), "over_branched": int(thicket)}
    return Kept(() if thicket else main, {f"tree/{reason}": count for reason, count in counts.items()})


def kept(rollouts: Sequence[Rollout], keep: Keep) -> tuple[list[Rollout], dict[str, float]]:
    """(the rollouts with the turns that may train, what was left out by reason).

    Whatever `keep` says, a turn that the client abandoned is left out (`tree/abandoned`): nobody read it.
    `tree/main_trajectories` counts the paths from root to leaf in what is left.
    """
    counts = Counter({"tree/abandoned": 0, "tree/main_trajectories": 0})
    found = []
    for rollout in rollouts:
        chosen = keep(rollout)
        turns = tuple(turn for turn in chosen.turns if turn.finish_reason != "abandoned")
        counts.update(chosen.removed)
        counts["tree/abandoned"] += len(chosen.turns) - len(turns)
        counts["tree/main_trajectories"] += len(leaves(turns))
        found.append(replace(rollout, turns=turns))
    return found, dict(counts)


def apart(
    rollouts: Sequence[Rollout], *, kinds: Sequence[str], own: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[Rollout], dict[str, float]]:
    """(the rollouts, each followed by a part for each of these kinds of thread that it has, what was left out).

        part of KIND    id ID#KIND, group GROUP#KIND, all turns of its threads of that kind
        its rewards     the channels `own[KIND]`, which the main part then loses; all of the rollout's without `own`

    A credit that compares within groups so compares like with like. A sub-agent's turns are judged against those of the
    other rollouts that asked for one too: that one was asked for is not their doing, and whether it should have been is
    credited to the main part, in a group with all rollouts. All threads of a kind are one part, as with a part for each
    the rollout with the most sub-agents would set the baseline. A broadcast reward is the same whatever a sub-agent did
    beside the point, so a channel of its own is better where there is one. Each part counts as a rollout in averages.

    A part that has no reward (missing is not 0), or is alone in its group, is left out, as `tree/parts_unpaid` and
    `tree/parts_alone`.
    """
    own = own or {}
    taken = {channel for kind in kinds for channel in own.get(kind, ())}
    counts = {"tree/parts_unpaid": 0.0, "tree/parts_alone": 0.0}
    parts: list[Rollout] = []
    for rollout in rollouts:
        rest = {channel: reward for channel, reward in rollout.rewards.items() if channel not in taken}
        parts.append(replace(rollout, turns=tuple(t for t in rollout.turns if t.kind not in kinds), rewards=rest))
        for kind in dict.fromkeys(kinds):
            paid = {c: r for c, r in rollout.rewards.items() if kind not in own or c in own[kind]}
            turns = threads(rollout, kinds=(kind,)).turns
            known = any(reward is not None for reward in paid.values())
            counts["tree/parts_unpaid"] += bool(turns) and not known
            if turns and known:
                name, group = f"{rollout.id}#{kind}", f"{rollout.group}#{kind}"
                parts.append(replace(rollout, id=name, group=group, turns=turns, rewards=paid))
    whole = {rollout.id for rollout in rollouts}
    size = Counter(part.group for part in parts)
    together = [part for part in parts if part.id in whole or size[part.group] > 1]
    counts["tree/parts_alone"] += len(parts) - len(together)
    return together, counts


def parents(turns: Sequence[Turn]) -> list[int]:
    """For each turn the earlier one whose prompt and reply are the longest beginning of its prompt; -1: there is none.

    Of equally long ones the latest. Compared are token ids, never text.
    """
    whole = [_key(turn.prompt_ids + turn.reply_ids) for turn in turns]
    found = []
    for k, turn in enumerate(turns):
        prompt, parent = _key(turn.prompt_ids), -1
        for i in range(k):
            if (parent < 0 or len(whole[i]) >= len(whole[parent])) and prompt.startswith(whole[i]):
                parent = i
        found.append(parent)
    return found


def leaves(turns: Sequence[Turn]) -> list[int]:
    """The turns that no later one continues: the ends of the paths through the tree."""
    return sorted(set(range(len(turns))) - set(parents(turns)))


def request_of(turn: Turn) -> str:
    """What the replies that one request asked for have in common: the gateway names them REQUEST.0, REQUEST.1, ..."""
    return turn.id.rpartition(".")[0] or turn.id


def _dead_leaves(turns: Sequence[Turn]) -> set[int]:
    above = parents(turns)
    ends = sorted(set(range(len(turns))) - set(above))

    def replaced(k: int) -> bool:
        asked = (above[k], turns[k].prompt_ids)
        later = (m for m in range(k + 1, len(turns)) if (above[m], turns[m].prompt_ids) == asked)
        return any(request_of(turns[m]) != request_of(turns[k]) for m in later)

    empty = {k for k in ends[:-1] if not turns[k].reply_ids or turns[k].finish_reason == "abandoned"}
    return empty | {k for k in ends[:-1] if replaced(k)}


def _key(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
