"""The words of a rollout, read from what the harness sent and got."""

from __future__ import annotations

from typing import Any

from whippletree.types import Json, Rollout, Turn


def assistant_texts(rollout: Rollout) -> list[str]:
    """The text of each reply, in order; "" where a reply has none (a tool call). Abandoned replies do not count."""
    return [text_of(reply_message(turn)) for turn in _read_turns(rollout)]


def final_text(rollout: Rollout) -> str:
    """The text of the last reply.

    Raises:
        ValueError: there is no reply, so there is nothing to be right or wrong.
    """
    if not (texts := assistant_texts(rollout)):
        raise ValueError(f"a reward reads the last reply, but rollout {rollout.id} has none")
    return texts[-1]


def conversation(rollout: Rollout) -> tuple[list[Json], list[Json]]:
    """The messages the harness began with, and those that followed: replies, tool results, the harness's own words.

    Where the last request does not extend the first one (history was rewritten), only the replies followed.
    """
    turns = _read_turns(rollout)
    if not turns:
        return list(rollout.task.messages), []
    prompt = list(turns[0].request.get("messages", rollout.task.messages))
    last = list(turns[-1].request.get("messages", ()))
    if last[: len(prompt)] == prompt:
        return prompt, [*last[len(prompt) :], reply_message(turns[-1])]
    return prompt, [reply_message(turn) for turn in turns]


def reply_message(turn: Turn) -> Json:
    """The assistant message of a reply: `reply` holds it under "message", or is it."""
    message: Json = turn.reply.get("message", turn.reply)
    return message


def text_of(message: Json) -> str:
    """The text of a message, whose content is text, a list of parts, or nothing."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _read_turns(rollout: Rollout) -> list[Turn]:
    return [turn for turn in rollout.turns if turn.finish_reason != "abandoned"]
