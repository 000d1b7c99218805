"""From a recipe to the parts of a run: policy, engine, gateway, harness, tasks, rewards, learner."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from whippletree import config, tasks
from whippletree.chosen import chosen_method
from whippletree.collect import Collector, Runner, rewards_of
from whippletree.engine.torch import TorchEngine
from whippletree.evidence import Itself, Judge, Scripted, Server
from whippletree.gateway.app import create_app
from whippletree.gateway.render import Renderer
from whippletree.gateway.server import serve
from whippletree.gateway.sessions import Sessions
from whippletree.gateway.store import Store
from whippletree.harness.command import CommandHarness
from whippletree.harness.function import FunctionHarness, load_agent
from whippletree.harness.launched import load_launcher
from whippletree.harness.outcome import Harness
from whippletree.learn import Learner, Sampled
from whippletree.models.pretrained import Pretrained, load, recompute
from whippletree.reward.from_harness import from_harness
from whippletree.tree.attention import use_fast_attention
from whippletree.tree.families import prove
from whippletree.tree.fidelity import check, in_context
from whippletree.tree.forward import forward
from whippletree.tree.pack import micro_batches
from whippletree.tree.packed import Layout
from whippletree.tree.scorer import PackedScorer
from whippletree.types import Asker, Batch, Forward, Json, Method, Reward, Rollout, Services, Task
from whippletree.update.adamw import AdamW, Updater
from whippletree.update.lora import Lora, add_lora
from whippletree.update.trailing import Trailing


@dataclass
class Policy:
    """The model that samples and learns: one set of weights, the layout it takes trees in, and perhaps a value head."""

    pretrained: Pretrained
    layout: Layout
    value_head: nn.Module | None = None

    @property
    def model(self) -> Any:
        return self.pretrained.model

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter by its own name; the value head's under `value_head.`."""
        head = self.value_head.named_parameters(prefix="value_head") if self.value_head else ()
        return {**dict(self.model.named_parameters()), **dict(head)}

    def forward(self, turns: Sequence[Sampled], group_K: Tensor | Sequence[int]) -> Forward:
        """One differentiable packed pass."""
        return forward(self.model, turns, group_K, layout=self.layout, value_head=self.value_head)


@dataclass(frozen=True)
class Gateway:
    """A policy behind the gateway, serving."""

    engine: TorchEngine
    store: Store
    sessions: Sessions
    server: str  # its URL
    digests: Json  # of the template and the tokenizer


@asynccontextmanager
async def gateway(
    policy: Policy, turns: Path, *, name: str, rows: int = 64, seed: int = 0, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Gateway]:
    """Serve a policy under `name` while the block runs; every call is kept in the file `turns`."""
    pretrained = policy.pretrained
    renderer = Renderer(pretrained.tokenizer)  # first: a model without a chat template is refused before anything runs
    engine = TorchEngine(
        policy.model,
        end_ids=pretrained.end_ids,
        context=pretrained.context,
        rows=rows,
        seed=seed,
        mask=engine_mask(policy.layout, pretrained.dtype),
    )
    store = Store(turns)
    sessions = Sessions(store)
    try:
        async with serve(create_app(engine, renderer, store, sessions, model_name=name), host=host, port=port) as url:
            yield Gateway(engine, store, sessions, url, renderer.digests)
    finally:
        engine.close()
        store.close()


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    recipe: config.Recipe
    method: Method
    policy: Policy
    engine: TorchEngine
    collector: Collector
    updater: Updater
    learner: Learner
    services: Services
    task_at: Callable[[int], Task]
    held_out: list[Task]


@asynccontextmanager
async def build(recipe: config.Recipe, folder: Path, *, progress: Callable[[int, int], None]) -> AsyncIterator[Parts]:
    """The parts of a run, with the gateway serving while the block runs.

    Raises:
        ValueError: the recipe asks for what does not exist or cannot work, with the reason.
    """
    method = chosen_method(recipe)
    harnesses = {
        section.label: Runner(chosen_harness(section), section.concurrency, section.takes_cut_replies)
        for section in recipe.harness
    }
    rewards = chosen_rewards(recipe)
    train, held_out = chosen_tasks(recipe)
    with ThreadPoolExecutor(1) as once:  # torch's helpers of this thread end with it, and do not crowd the engine's
        choice = asyncio.get_running_loop().run_in_executor(once, chosen_policy, recipe, method)
        policy, updater, services = await choice
    name, rows = Path(recipe.model.path).name, sum(runner.limit for runner in harnesses.values())
    async with gateway(policy, folder / "turns.sqlite", name=name, rows=rows, seed=recipe.seed) as served:
        yield Parts(
            recipe=recipe,
            method=method,
            policy=policy,
            engine=served.engine,
            collector=Collector(
                harnesses=harnesses,
                store=served.store,
                sessions=served.sessions,
                server=served.server,
                rewards=rewards,
                reward_timeout=recipe.reward_timeout,
                sampling=recipe.sampling,
                digests=served.digests,
                progress=progress,
            ),
            updater=updater,
            learner=chosen_learner(recipe, method, policy, updater),
            services=replace(
                computed_by(served.engine, services),
                askers=chosen_askers(recipe.judge, served.engine, policy.pretrained.tokenizer, folder / "judge"),
            ),
            task_at=endless(train, recipe.seed),
            held_out=held_out,
        )


def computed_by(engine: TorchEngine, services: Services) -> Services:
    """The same services, with the engine's thread computing for the scorers."""
    scorers = {
        name: replace(scorer, compute=engine.run) if isinstance(scorer, PackedScorer) else scorer
        for name, scorer in services.scorers.items()
    }
    return replace(services, scorers=scorers)


def chosen_learner(recipe: config.Recipe, method: Method, policy: Policy, updater: Updater) -> Learner:
    """What turns scored rollouts into a step."""
    update = recipe.update
    return Learner(
        method,
        updater,
        policy.forward,
        partial(micro_batches, token_budget=update.token_budget, unroll=policy.layout.masks == "none"),
        epochs=update.epochs,
        minibatches=update.minibatches,
        seed=recipe.seed,
        check=partial(faithful, recipe=recipe, decode=policy.pretrained.tokenizer.decode),
    )


def chosen_harness(section: config.HarnessSection) -> Harness:
    """How the agent is started."""
    if section.kind == "launcher":
        return load_launcher(section.agent, api=section.api)
    if section.kind == "command":
        return CommandHarness(command=section.agent, timeout=section.timeout, env=section.environment)
    return FunctionHarness(load_agent(section.agent), timeout=section.timeout)


def chosen_askers(
    section: config.JudgeSection | None, engine: TorchEngine, tokenizer: Any, cache: Path
) -> dict[str, Judge]:
    """The judge, if the recipe names one. What a server answered is kept in `cache`, so that nothing is asked twice.

    Raises:
        ValueError: the variable that is to hold its key is not set.
    """
    if section is None:
        return {}
    key = os.environ.get(section.key_variable, "")
    if section.key_variable and not key:
        raise ValueError(f"judge.key_variable names {section.key_variable}, but that variable is not set")
    asker: Asker
    if section.kind == "server":
        asker = Server(section.url, section.model, key)
    elif section.kind == "policy":
        asker = Itself(engine, tokenizer)
    else:
        asker = Scripted(cast(Any, load_agent(section.function)))
    judge = Judge(
        asker,
        cache=cache if section.kind == "server" else None,
        at_once=section.at_once,
        timeout=section.timeout,
        reply_tokens=section.reply_tokens,
        calls=section.calls or math.inf,
        tokens=section.tokens or math.inf,
        ticketed=section.kind != "function",
    )
    return {"judge": judge}


def chosen_rewards(recipe: config.Recipe) -> Mapping[str, Reward] | Sequence[Reward]:
    """The rewards by channel; without any in the recipe, those that the harness itself gives."""
    if not recipe.rewards:
        return [from_harness]
    return {section.name: cast(Reward, load_agent(section.function)) for section in recipe.rewards}


def chosen_tasks(recipe: config.Recipe) -> tuple[list[Task], list[Task]]:
    """(training tasks, held-out tasks), which share no question."""
    train = load_tasks(recipe.tasks)
    held_out = load_tasks(recipe.evaluation.tasks) if recipe.evaluation.tasks else []
    return (tasks.disjoint(train, held_out) if held_out else train), held_out


def load_tasks(section: config.TasksSection) -> list[Task]:
    """The tasks of one table of the recipe.

    Raises:
        ValueError: fewer than `size` tasks fit `where`, one has no such column, or a pattern is none.
    """
    source = {"jsonl": "path", "reasoning_gym": "dataset", "hub": "dataset"}[section.kind]
    spec: dict[str, Any] = {"kind": section.kind, source: section.source, **section.settings}
    size = section.size or (1000 if section.kind == "reasoning_gym" else None)
    if section.kind == "reasoning_gym" and size:
        # where some are left out, more are generated
        spec |= {"size": size * (10 if section.where and not spec.get("distinct") else 1), "seed": section.seed}
    found = tasks.load(spec)
    for column, pattern in section.where.items():
        if missing := [task.id for task in found if column not in task.columns]:
            raise ValueError(
                f"tasks.where names the column {column!r}, but task {missing[0]} of {section.source} has none"
            )
        try:
            found = [task for task in found if re.fullmatch(pattern, str(task.columns[column]))]
        except re.error as error:
            raise ValueError(f"tasks.where.{column} = {pattern!r} is not a regular expression: {error}") from None
    if not found or (size and section.where and len(found) < size):
        raise ValueError(f"only {len(found)} tasks of {section.source} fit where = {section.where}, but size is {size}")
    return found[:size]


def chosen_policy(recipe: config.Recipe, method: Method) -> tuple[Policy, Updater, Services]:
    """The policy with what moves it, and the scorers that evidence may ask."""
    section = recipe.update
    pretrained = load(recipe.model.path, dtype=recipe.model.dtype, context=recipe.model.context)
    use_fast_attention(pretrained.model)
    layout = prove(pretrained.model)
    reference = copy.deepcopy(pretrained.model) if "reference" in method.needs else None
    torch.manual_seed(recipe.seed)  # what is drawn at random from here on: adapters
    if section.lora_rank:
        adapters = Lora(rank=section.lora_rank, alpha=section.lora_alpha or 2.0 * section.lora_rank)
        pretrained = Pretrained(**{**vars(pretrained), "model": add_lora(pretrained.model, adapters)})
    if recipe.model.gradient_checkpointing:
        recompute(pretrained.model)
    policy = Policy(pretrained, layout, value_head(pretrained.model) if "value_head" in method.needs else None)
    shared = {name for name in AdamW.__dataclass_fields__ if name in config.UpdateSection.model_fields}
    settings = AdamW(**{name: getattr(section, name) for name in shared})
    updater = (method.update or Updater)(policy.parameters, settings)
    score = partial(
        PackedScorer, layout=layout, temperature=recipe.sampling.temperature, token_budget=section.token_budget
    )
    scorers = {"policy": score(policy.model)}
    if isinstance(updater, Trailing):
        scorers["trailing"] = score(policy.model, weights=updater.held)
    if reference is not None:
        scorers["reference"] = score(reference.requires_grad_(False))
    if policy.value_head is not None:
        scorers["value"] = score(policy.model, value_head=policy.value_head)
    return policy, updater, Services(scorers=scorers, tokenizer=pretrained.tokenizer)


def faithful(
    rollouts: Sequence[Rollout],
    batch: Batch,
    logp_N: Tensor,
    *,
    recipe: config.Recipe,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Refuse a step whose log-probs at training are not those at sampling, within the recipe's limits.

    Raises:
        FidelityError: beyond the limits, with the three worst tokens as they stand in their turns.
    """
    seen = replace(batch, logp_old_N=torch.where(logp_N.isnan(), torch.nan, batch.logp_old_N))  # what was not left out
    limits = recipe.fidelity

    def describe(n: int) -> str:
        k = int(batch.turn_N[n])
        turn = [turn for rollout in rollouts for turn in rollout.turns][k]
        at = len(turn.prompt_ids) + n - int((batch.turn_N < k).sum())
        return in_context([*turn.prompt_ids, *turn.reply_ids], at, decode)

    check(logp_N, seen, mean_limit=limits.mean_limit, max_limit=limits.max_limit, describe=describe)


def value_head(model: Any) -> nn.Module:
    """A linear map of hidden states to one value, 0 everywhere at the start."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def engine_mask(layout: Layout, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Any] | None:
    """How the engine hands its masks to a model of this layout; None where the model takes none."""
    if layout.masks == "none":
        return None

    def form(seen_BQL: Tensor) -> Tensor:
        mask = seen_BQL[:, None]
        return (
            torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            if layout.additive
            else mask
        )

    def masks(seen_BQL: Tensor, distance_BQL: Tensor) -> Any:
        if layout.window is None:
            return form(seen_BQL)
        near = form(seen_BQL & (distance_BQL < layout.window))
        return near if layout.masks == "windowed" else {"full_attention": form(seen_BQL), "sliding_attention": near}

    return masks


def endless(train: Sequence[Task], seed: int) -> Callable[[int], Task]:
    """Task number n of an endless series: every task once in each round, each round in an order of its own."""

    def order(round_: int) -> list[int]:
        places = list(range(len(train)))
        random.Random(f"{seed}/{round_}").shuffle(places)
        return places

    rounds: dict[int, list[int]] = {}

    def task_at(n: int) -> Task:
        round_, place = divmod(n, len(train))
        if round_ not in rounds:
            rounds.clear()
            rounds[round_] = order(round_)
        return train[rounds[round_][place]]

    return task_at


def accepts(method: Method, weights: dict[str, float]) -> Callable[[Sequence[Rollout]], bool]:
    """Whether a finished group enters the update, by the method's rule on its total rewards."""

    def accept(group: Sequence[Rollout]) -> bool:
        if method.accept is None:
            return True
        totals = rewards_of(group, weights)
        return method.accept(torch.tensor([float("nan") if x is None else x for x in totals]))

    return accept
