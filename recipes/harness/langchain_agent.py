"""An agent of langchain (`create_agent`, on langgraph) with one tool.

python langchain_agent.py chat|responses|messages MODEL PROMPT
"""

import sys
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


def speaker(api: str, model: str) -> Any:
    """Base URLs and keys come from the environment."""
    if api.startswith("messages"):
        return ChatAnthropic(model_name=model, streaming=api.endswith("-stream"))
    return ChatOpenAI(model=model, use_responses_api=api.startswith("responses"), streaming=api.endswith("-stream"))


if __name__ == "__main__":
    api, model, prompt = sys.argv[1:]
    agent = create_agent(speaker(api, model), tools=[add])
    print(agent.invoke({"messages": [{"role": "user", "content": prompt}]})["messages"][-1].text)
