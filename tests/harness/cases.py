"""What each harness is asked, what a scripted model answers, and what the gateway must then have captured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whippletree.types import Link

PROMPT = "Add 40000 and 2013 with the tool that you have, and say the sum."
SUM = "42013"  # stands in no reply before a tool or a sub-agent has said it
ANSWER = f"The sum is {SUM}, says the quokka."
SAID = "Let me  add them. "  # double space, trailing space: what a harness may lose
TITLE = "Adding two numbers"
ERRAND = "Say what forty thousand and 2013 make."  # what a sub-agent is told
REPORT = f"They make {SUM}."
SHELL = "expr 40000 + 2013"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: `first` is said until the sum is known, then `last`; `follows` is how later calls link."""

    recipe: str
    api: str
    first: str
    last: str = ANSWER
    follows: Link = "append"
    side: str = ""  # the kind of thread that there is beside the main one: "title", "sub-agent"
    waits: Callable[[str], str] | None = None  # what is said to a prompt while a sub-agent works

    @property
    def id(self) -> str:
        return f"{self.recipe}-{self.api}" + ("-agents" if self.side == "sub-agent" else "")

    def script(self) -> Callable[[str], str]:
        """The model: from the text of a prompt to the reply."""

        def reply(prompt: str) -> str:
            if PROMPT not in prompt:  # a sub-agent sees only what it was told
                return REPORT
            if self.side == "title" and "<tools>" not in prompt:
                return TITLE
            if SUM in prompt:
                return self.last
            return self.waits(prompt) if self.waits and ERRAND in prompt else self.first

        # a prompt that must be answered by a call opens it: the reply is what follows
        return lambda prompt: reply(prompt).partition(OPENED)[2] if prompt.endswith(OPENED) else reply(prompt)


OPENED = '<tool_call>\n{"name": "'


def call(name: str, said: str = SAID, **arguments: Any) -> str:
    """A reply that calls a tool, in the form of the model's chat template."""
    return f"{said}\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def wait_agent(prompt: str) -> str:
    """Codex: wait for the sub-agent whose id the prompt holds."""
    found = re.findall(r"agent_id\W+([0-9a-f-]{36})", prompt)
    return call("wait_agent", targets=found[-1:])


TOLD = {"description": "adds", "prompt": ERRAND}
ADD = call("add", a=40000, b=2013)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo the quokka says so"
BASH = call("bash", command=SHELL)
DESCRIBED = call("bash", command=SHELL, description="adds")
CODE = "Thought: I add.\n<code>\nprint(add(a=40000, b=2013))\n</code>"


def each(recipe: str, apis: str, **said: Any) -> list[Case]:
    """A case for each of these APIs."""
    return [Case(recipe=recipe, api=api, **said) for api in apis.split()]


CASES = [
    *each("openai_sdk", "chat chat-stream responses responses-stream", first=ADD),
    *each("anthropic_sdk", "messages messages-stream", first=ADD),
    *each("openai_agents", "chat chat-stream responses responses-stream", first=ADD),
    *each(
        *("smolagents", "chat-tool"),
        first=ADD,
        last=call("final_answer", answer=ANSWER),
        follows="fork",  # it writes our reply anew, as text
    ),
    *each("smolagents", "chat-code", first=CODE, last=f'<code>\nfinal_answer("{ANSWER}")\n</code>'),
    *each("mini_swe_agent", "chat responses messages", first=BASH, last=call("bash", command=SUBMIT)),
    *each("langchain", "chat chat-stream responses messages", first=ADD),
    *each("pydantic_ai", "chat responses messages", first=ADD),
    *each("claude_code", "messages messages-bearer messages-bare", first=call("Bash", command=SHELL)),
    *each("codex", "responses", first=call("exec_command", cmd=SHELL)),
    *each("opencode", "chat responses messages", first=DESCRIBED),
    *each("opencode", "chat-title", first=DESCRIBED, side="title"),
    *each("qwen_code", "chat", first=call("run_shell_command", command=SHELL, description="adds", is_background=False)),
    *each("openclaw", "responses", first=call("exec", command=SHELL)),
    *each("openclaw", "chat messages", first=call("exec", command=SHELL), follows="fork"),  # a moving message
    *each("gemini_cli", "gemini", first=call("run_shell_command", command=SHELL, description="adds")),
    *each("claude_code", "messages", first=call("Agent", **TOLD, run_in_background=False), side="sub-agent"),
    *each("codex", "responses", first=call("spawn_agent", message=ERRAND), waits=wait_agent, side="sub-agent"),
    *each("opencode", "chat messages", first=call("task", **TOLD, subagent_type="general"), side="sub-agent"),
    *each("qwen_code", "chat", first=call("agent", **TOLD, run_in_background=False), side="sub-agent"),
]
