"""An agent of the OpenAI Agents SDK with one tool.

python openai_agents.py chat|chat-stream|responses|responses-stream MODEL PROMPT
"""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


async def main(api: str, model: str, prompt: str) -> str:
    set_tracing_disabled(True)  # else it uploads each run
    speaks = OpenAIChatCompletionsModel if api.startswith("chat") else OpenAIResponsesModel
    agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=speaks(model, AsyncOpenAI()))
    if api.endswith("-stream"):
        streamed = Runner.run_streamed(agent, prompt)
        async for _ in streamed.stream_events():
            pass
        return str(streamed.final_output)
    return str((await Runner.run(agent, prompt)).final_output)


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))
