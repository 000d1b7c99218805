"""An agent of pydantic-ai with one tool.

python pydantic_agent.py chat|responses|messages MODEL PROMPT
"""

import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


if __name__ == "__main__":
    api, model, prompt = sys.argv[1:]
    agent = Agent(MODELS[api](model), tools=[add])  # base URLs and keys: from the environment
    print(agent.run_sync(prompt).output)
