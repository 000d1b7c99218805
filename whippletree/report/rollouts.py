"""Rollouts as conversations: what the policy was shown, and each token it sampled, coloured by its advantage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from whippletree.types import Rollout, Turn

Json = dict[str, Any]
Decode = Callable[[list[int]], str]
SHADES = 5  # on either side of zero


def rollout_view(rollout: Rollout, advantages: Sequence[Sequence[float]], decode: Decode) -> Json:
    """A rollout as the report reads it: JSON, with the text of every token.

        {title, reward, rewards, ending, segments: [{kind, text, tokens: [{text, logp, advantage}]}]}

    `kind` is "prompt" or "sampled". `advantages` holds one list a turn, one number a sampled token; NaN, as an
    unknown log-prob, becomes null: that token was not trained. `reward` is the sum of the channels that apply. A
    turn's prompt is shown from where the turn before ended, if it begins with it.

    Raises:
        ValueError: the advantages are not one for each sampled token.
    """
    sizes = [len(turn.reply_ids) for turn in rollout.turns]
    if [len(a) for a in advantages] != sizes:
        raise ValueError(
            f"rollout {rollout.id}: each sampled token has one advantage, but its turns have {sizes} tokens "
            f"and the advantages {[len(a) for a in advantages]}"
        )
    segments: list[Json] = []
    seen: tuple[int, ...] = ()
    for turn, advantage in zip(rollout.turns, advantages, strict=True):
        new = turn.prompt_ids[len(seen) :] if turn.prompt_ids[: len(seen)] == seen else turn.prompt_ids
        segments += [{"kind": "prompt", "text": decode(list(new)), "tokens": []}, _sampled(turn, advantage, decode)]
        seen = turn.prompt_ids + turn.reply_ids
    applied = {name: x for name, x in rollout.rewards.items() if x is not None}
    return {
        "title": f"Task {rollout.task.id}, rollout {rollout.id}",
        "reward": sum(applied.values()) if applied else None,
        "rewards": applied,
        "ending": rollout.ending,
        "segments": segments,
    }


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; of a character spread over several tokens all is told at its last.

    Each token is decoded behind the one before it, because some vocabularies drop the space of a first token.
    """
    texts, start, told = [], 0, 0
    for end in range(1, len(ids) + 1):
        text = decode(list(ids[start:end]))
        before = len(decode(list(ids[start:told])))
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
        else:
            texts.append(text[before:])
            start, told = told, end
    return texts


def rollouts_html(views: Sequence[Mapping[str, Any]]) -> str:
    """The legend and every rollout, the first of them open; shades are relative to the greatest advantage shown."""
    tokens = [token for view in views for part in view["segments"] for token in part["tokens"]]
    greatest = max((abs(t["advantage"]) for t in tokens if t["advantage"] is not None), default=0.0)
    drawn = [_rollout(view, greatest, is_open=number == 0) for number, view in enumerate(views)]
    return _legend(greatest) + "".join(drawn)


def _sampled(turn: Turn, advantage: Sequence[float], decode: Decode) -> Json:
    texts = token_texts(turn.reply_ids, decode)
    tokens = [
        {"text": text, "logp": _known(logp), "advantage": _known(a) if _known(logp) is not None else None}
        for text, logp, a in zip(texts, turn.reply_logps, advantage, strict=True)
    ]
    return {"kind": "sampled", "text": "".join(texts), "tokens": tokens}


def _known(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def _rollout(view: Mapping[str, Any], greatest: float, *, is_open: bool) -> str:
    rewards = view.get("rewards") or {}
    reward = "no reward" if view["reward"] is None else f"reward {view['reward']:.3g}"
    channels = ", ".join(f"{name} {x:.3g}" for name, x in rewards.items()) if len(rewards) > 1 else ""
    ending = view.get("ending", "done")
    said = [reward, channels, "" if ending == "done" else ending]
    about = "".join(f"<span>{escape(text)}</span>" for text in said if text)
    parts, turn = [], 0
    for part in view["segments"]:
        turn += part["kind"] == "sampled"
        parts.append(_segment(part, greatest, turn))
    head = f"<summary>{escape(str(view['title']))}{about}</summary>"
    return f'<details class="card"{" open" if is_open else ""}>{head}{"".join(parts)}</details>'


def _segment(part: Mapping[str, Any], greatest: float, turn: int) -> str:
    if part["kind"] == "prompt":
        label = "prompt" if turn == 0 else "from the harness"
        text = f'<p class="text prompt" tabindex="0" aria-label="{label}">{escape(part["text"])}</p>'
        return f'<p class="says">{label}</p>{text}' if part["text"] else ""
    inside = "".join(_token(token, greatest) for token in part["tokens"]) or escape(part["text"])
    return f'<p class="says">sampled, turn {turn}</p><p class="text sampled">{inside}</p>'


def _token(token: Mapping[str, Any], greatest: float) -> str:
    advantage, logp, text = token["advantage"], token["logp"], token["text"]
    told = "not trained" if advantage is None else f"advantage {advantage:+.3f}"
    sure = "unknown" if logp is None else f"{logp:.3f}"
    tip = escape(f"{text!r}  log-prob {sure}  {told}")
    shown = escape(text).replace("\n", "↵\n") or "▫"  # what cannot be seen could not be pointed at
    return f'<span class="t{_shade(advantage, greatest)}" title="{tip}">{shown}</span>'


def _shade(advantage: float | None, greatest: float) -> str:
    if advantage is None:
        return " off"
    level = math.ceil(SHADES * abs(advantage) / greatest) if greatest else 0
    return f" {'p' if advantage > 0 else 'n'}{level}" if level else ""


def _legend(greatest: float) -> str:
    ends = f'−{greatest:.2g} <i class="ramp" aria-hidden="true"></i> +{greatest:.2g}'
    return (
        f'<p class="legend"><span>Advantage {ends}</span>'
        '<span><i class="t n1">underlined</i> negative: made less likely</span>'
        '<span><i class="off">dashed</i> sampled, not trained</span>'
        "<span>grey: from the harness, never trained</span></p>"
    )
