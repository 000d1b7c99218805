"""One GRPO step of TRL a line: the worker that `benchmarks.step` starts in TRL's own environment.

Protocol, on standard output one JSON object a line and nothing else: first `{"ready": true, ...}` with versions and
settings; then for each line `go` on standard input one step is done and `{"seconds", "cpu_seconds",
"tokens", "peak_rss_mb", "reward"}` printed. The worker ends at end of input. See `benchmarks/README.md`.

The settings that are left as defaults are the fastest of those tried on this kind of machine (the table is there too).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.reward import KINDS, reward

GROUP = 8  # rollouts a prompt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--tasks", type=Path, required=True, help='JSONL of {"prompt": [messages], "answer": text}')
    parser.add_argument("--steps", type=int, required=True, help="most steps that will be asked for")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, each with 8 rollouts")
    parser.add_argument("--reply-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--reward", choices=KINDS, default="exact")
    parser.add_argument("--micro-batch", type=int, default=8, help="rollouts in one forward and backward")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--autocast", choices=["bf16", "no"], default="bf16")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--generation", choices=["static", "continuous"], default="static")
    return parser.parse_args()


class Gate(TrainerCallback):
    """Waits for `go` before each step and prints what the step took; the wait is outside the clock."""

    def __init__(self, out: TextIO, kind: str) -> None:
        self.kind = kind
        self.out, self.start, self.cpu, self.tokens, self.rewards = out, 0.0, 0.0, 0, [0.0]

    def earned(self, completions: list[Any], completion_ids: list[Any], answer: list[str], **_: Any) -> list[float]:
        """What the replies earn; counts the sampled tokens in passing."""
        self.tokens = sum(len(ids) for ids in completion_ids)
        texts = [completion[0]["content"] for completion in completions]
        self.rewards = [reward(text, right, kind=self.kind) for text, right in zip(texts, answer, strict=True)]
        return self.rewards

    def say(self, row: dict[str, Any]) -> None:
        print(json.dumps(row), file=self.out, flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if sys.stdin.readline().strip() != "go":
            os._exit(0)  # the driver has gone or wants no more: nothing here is worth keeping
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        mean = sum(self.rewards) / len(self.rewards)
        row = {"seconds": seconds, "cpu_seconds": cpu, "tokens": self.tokens, "peak_rss_mb": peak, "reward": mean}
        self.say(row)


def config(options: argparse.Namespace, folder: str) -> GRPOConfig:
    """GRPO as TRL has it, without what costs time and is not part of the comparison: files, reports, checkpointing."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.prompts * GROUP // options.micro_batch,
        num_generations=GROUP,
        max_completion_length=options.reply_tokens,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        bf16=options.autocast == "bf16",
        gradient_checkpointing=False,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        optim="adamw_torch_fused",
        use_transformers_continuous_batching=options.generation == "continuous",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    options = arguments()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = getattr(torch, options.weights)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation=options.attention)
    gate = Gate(out, options.reward)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=gate.earned,
            args=config(options, folder),
            train_dataset=Dataset.from_list([json.loads(line) for line in options.tasks.read_text().splitlines()]),
            processing_class=tokenizer,
            callbacks=[gate],
        )
        versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        settings = {k: str(v) for k, v in vars(options).items() if k not in ("model", "tasks")}
        gate.say({"ready": True, "name": "trl", "versions": versions, "settings": settings})
        trainer.train()


if __name__ == "__main__":
    main()
