"""Tokens per second of the embedded engine and of `model.generate`: `python -m benchmarks.engine [MODEL FOLDER]`.

64 replies of at most 12 tokens to 8 of the quickstart's questions, sampled at temperature 1 from the same weights in
the same process and thread, as in a run. Both sides take turns, so that whatever else slows the machine slows both; the
engine forgets its keys before each turn, as after an update of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reasoning_gym
import torch

from whippletree.engine.torch import TorchEngine
from whippletree.models.pretrained import Pretrained, load
from whippletree.models.smollm2 import NAME
from whippletree.types import Sampling

HERE = Path(__file__).parent
GROUPS, GROUP, TOKENS = 8, 8, 12


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """The quickstart's first questions, each for a whole group."""
    source = reasoning_gym.create_dataset(
        "chain_sum", size=GROUPS, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task["question"]}], add_generation_prompt=True, tokenize=False
        )
        for task in source
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts for _ in range(GROUP)]


def engine_turn(engine: TorchEngine, prompts: list[list[int]], turn: int) -> int:
    """Tokens sampled by the engine for all prompts at once."""

    async def reply(number: int) -> int:
        sampling = Sampling(max_tokens=TOKENS, stream=f"{turn}/{number}")
        return sum([len(piece.ids) async for piece in engine.sample(prompts[number], sampling)])

    async def all_replies() -> int:
        await engine.pause()
        engine.resume(turn)
        return sum(await asyncio.gather(*(reply(number) for number in range(len(prompts)))))

    return asyncio.run(all_replies())


def generate_turn(policy: Pretrained, prompts: list[list[int]]) -> int:
    """Tokens sampled by `model.generate` for all prompts at once, left-padded; what follows an end does not count."""
    model: Any = policy.model
    width, pad = max(map(len, prompts)), policy.tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.arange(width) >= torch.tensor([[width - len(prompt)] for prompt in prompts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=seen.long(),
            max_new_tokens=TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(policy.end_ids),
            pad_token_id=pad,
        )
    end_BN = torch.isin(out[:, width:], torch.tensor(policy.end_ids)).long()
    return int((end_BN.cumsum(1) - end_BN == 0).sum())  # up to the first end, and that end


def measure(policy: Pretrained, *, turns: int) -> dict[str, list[float]]:
    """Tokens per second of each side, turn by turn, after one turn to warm up; who goes first alternates."""
    prompts = prompts_of(policy.tokenizer)
    engine = TorchEngine(policy.model, end_ids=policy.end_ids, context=policy.context)
    speeds: dict[str, list[float]] = {"engine": [], "generate": []}
    try:
        for turn in range(turns + 1):
            for side in ("engine", "generate") if turn % 2 else ("generate", "engine"):
                started = time.perf_counter()
                tokens = (
                    engine_turn(engine, prompts, turn)
                    if side == "engine"
                    else asyncio.run(engine.run(lambda: generate_turn(policy, prompts)))
                )
                speed = tokens / (time.perf_counter() - started)
                print(f"  turn {turn} {side:9} {speed:7.1f} tokens/s  {tokens} tokens", flush=True)
                if turn:
                    speeds[side].append(speed)
    finally:
        engine.close()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default=NAME, help="a Hugging Face folder; without it the quickstart's model"
    )
    parser.add_argument("--turns", type=int, default=7, help="measured turns of each side")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engine.json")
    given = parser.parse_args()
    with ThreadPoolExecutor(1) as once:  # a thread that computed and stays would slow the one that is measured
        policy = once.submit(load, given.model, dtype=given.dtype).result()
    print(f"{GROUPS * GROUP} replies of at most {TOKENS} tokens in {policy.dtype} ({policy.why})")
    speeds = measure(policy, turns=given.turns)
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    result = {
        "tokens_per_second": {side: {"median": medians[side], "all": values} for side, values in speeds.items()},
        "ratio_of_medians": medians["engine"] / medians["generate"],
        "replies": GROUPS * GROUP,
        "reply_tokens": TOKENS,
        "dtype": str(policy.dtype),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"engine {medians['engine']:.0f}, generate {medians['generate']:.0f} tokens/s")
    print(f"ratio {result['ratio_of_medians']:.2f}, written to {given.out}")


if __name__ == "__main__":
    main()
