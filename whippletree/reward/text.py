"""The words of a rollout, read from what the harness sent and got."""

from __future__ import annotations

from typing import Any

from whippletree.types import Json, Rollout, Turn

KINDS = ("text", "reasoning")  # of parts that are text


def assistant_texts(rollout: Rollout) -> list[str]:
    """The text of each reply of the main thread, in order; "" where a reply has none (a tool call).

    Replies that nobody read do not count.
    """
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
    """A reply as a chat message, whatever API it was written in.

    The parts that the gateway noted, where it did; else what stands in `reply` under "message", or `reply` itself.
    """
    if not (parts := turn.info.get("parts")):
        message: Json = turn.reply.get("message", turn.reply)
        return message
    said = {kind: "".join(part.get("text", "") for part in parts if part["kind"] == kind) for kind in KINDS}
    calls = [part["call"] for part in parts if part.get("call")]
    found: Json = {"role": "assistant", "content": said["text"] if said["text"] or not calls else None}
    more = {"reasoning_content": said["reasoning"], "tool_calls": calls}
    return found | {name: value for name, value in more.items() if value}


def text_of(message: Json) -> str:
    """The text of a message, whose content is text, a list of parts, or nothing."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _read_turns(rollout: Rollout) -> list[Turn]:
    """The turns of the main thread whose replies were read: titles and sub-agents are not the agent's answer."""
    return [turn for turn in rollout.turns if turn.kind == "main" and turn.finish_reason != "abandoned"]
