"""An ordinary agent: it asks, and if the answer is wrong says so and lets the model try once more."""

import re

from openai import AsyncOpenAI

from whippletree.reward import assistant_texts, final_text
from whippletree.types import Rollout, Task

CLIENT = AsyncOpenAI(api_key="set for each rollout")  # one pool of connections for all rollouts


def solves(reply: str, task: Task) -> bool:
    """The last number of the reply is the answer."""
    return re.findall(r"-?\d+", reply)[-1:] == [task.columns["answer"]]


async def agent(task: Task, base_url: str, api_key: str) -> None:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task.columns["question"]}]
    for _ in range(2):
        response = await client.chat.completions.create(model="policy", messages=messages)
        reply = response.choices[0].message.content or ""
        if solves(reply, task):
            return
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "That is wrong. Try again."}]


async def reward(rollout: Rollout) -> dict[str, float | None]:
    """1 if the first reply solves the task, 0.5 if the second does, else 0."""
    right = [solves(text, rollout.task) for text in assistant_texts(rollout)]
    return {"answer": 1.0 if right[0] else 0.5 if any(right) else 0.0}


async def last_reply(rollout: Rollout) -> dict[str, float | None]:
    """1 if the last reply solves the task, else 0: for agents that call tools before they answer."""
    return {"answer": float(solves(final_text(rollout), rollout.task))}
