"""An agent on the Anthropic SDK: asks, runs the tool that the model calls, until there is an answer.

python anthropic_sdk.py messages|messages-stream MODEL PROMPT
"""

import sys
from typing import Any

from anthropic import Anthropic

ADD: Any = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def run(client: Anthropic, model: str, prompt: str, *, stream: bool) -> str:
    messages: Any = [{"role": "user", "content": prompt}]
    while True:
        if stream:
            with client.messages.stream(model=model, max_tokens=1024, messages=messages, tools=[ADD]) as events:
                reply: Any = events.get_final_message()
        else:
            reply = client.messages.create(model=model, max_tokens=1024, messages=messages, tools=[ADD])
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
            for call in calls
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]


if __name__ == "__main__":
    api, model, prompt = sys.argv[1:]
    print(run(Anthropic(), model, prompt, stream=api.endswith("-stream")))  # base URL and key: from the environment
