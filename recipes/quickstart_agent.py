"""An ordinary agent: it asks, and if the answer is wrong says so and lets the model try once more."""

from openai import AsyncOpenAI

from whippletree.reward import assistant_texts
from whippletree.types import Rollout, Task

CLIENT = AsyncOpenAI(api_key="set per rollout")  # one pool of connections for all


async def agent(task: Task, base_url: str, api_key: str) -> None:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": task.columns["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content
        if answer.strip() == task.columns["answer"]:
            return
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "That is wrong. Reply with the number alone."},
        ]


async def reward(rollout: Rollout) -> dict[str, float | None]:
    """1 if the first reply is the answer, 0.5 if the second is, else 0."""
    right = [text.strip() == rollout.task.columns["answer"] for text in assistant_texts(rollout)]
    return {"answer": 1.0 if right[0] else 0.5 if any(right) else 0.0}
