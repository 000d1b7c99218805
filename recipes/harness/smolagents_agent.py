"""A tool agent or a code agent of smolagents with one tool.

python smolagents_agent.py tool|code MODEL PROMPT
"""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


if __name__ == "__main__":
    kind, name, prompt = sys.argv[1:]
    model = OpenAIServerModel(name, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = (CodeAgent if kind == "code" else ToolCallingAgent)(tools=[add], model=model, max_steps=4)
    print(agent.run(prompt))
