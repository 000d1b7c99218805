"""An agent on the OpenAI SDK: asks, runs the tool that the model calls, until there is an answer.

python openai_sdk.py chat|chat-stream|responses|responses-stream MODEL PROMPT
"""

import json
import sys
from typing import Any

from openai import OpenAI

ADD = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def add(arguments: str) -> str:
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


def chat(client: OpenAI, model: str, prompt: str, *, stream: bool) -> str:
    tools: Any = [{"type": "function", "function": ADD}]
    messages: Any = [{"role": "user", "content": prompt}]
    while True:
        if stream:
            with client.chat.completions.stream(model=model, messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(model=model, messages=messages, tools=tools)
            message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(client: OpenAI, model: str, prompt: str, *, stream: bool) -> str:
    tools: Any = [{"type": "function", **ADD}]
    items: Any = [{"role": "user", "content": prompt}]
    while True:
        if stream:
            with client.responses.stream(model=model, input=items, tools=tools, store=False) as events:
                reply: Any = events.get_final_response()
        else:
            reply = client.responses.create(model=model, input=items, tools=tools, store=False)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return str(reply.output_text)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)})


if __name__ == "__main__":
    api, model, prompt = sys.argv[1:]
    run = chat if api.startswith("chat") else responses
    print(run(OpenAI(), model, prompt, stream=api.endswith("-stream")))  # base URL and key: from the environment
