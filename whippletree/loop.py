"""The loop: collect, score, assemble, credit, update, sync, evaluate, checkpoint. One direction, one pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from whippletree.analysis.intervals import wilson
from whippletree.build import Parts, accepts
from whippletree.collect import HARNESS, Collected, rewards_of
from whippletree.evidence import Judge
from whippletree.learn import Learned
from whippletree.report.metrics import Metrics, read
from whippletree.report.terminal import View
from whippletree.run_directory import RunDirectory, State
from whippletree.stats import batch_metrics, collected_metrics, fidelity_metrics, harness_metrics
from whippletree.tree.black_box import apart, kept, threads
from whippletree.types import Batch, Rollout


class EmptyStepError(RuntimeError):
    """A step in which no group could be used."""


class Loop:
    """One run, from its last checkpoint to its last step."""

    def __init__(self, parts: Parts, directory: RunDirectory, metrics: Metrics, view: View) -> None:
        self.parts, self.directory, self.metrics, self.view = parts, directory, metrics, view
        self.recipe = parts.recipe
        self.weights = {reward.name: reward.weight for reward in self.recipe.rewards}
        self.last: tuple[list[Rollout], Batch, Learned] | None = None  # of the last step
        self.taught: list[tuple[list[Rollout], Batch, Learned]] = []  # first and latest step with any advantage

    async def train(self) -> State:
        """Run to the last step; a run that was ended before goes on where it was."""
        state = await self.resume()
        await self.evaluate_if_due(state)  # also one that a kill cut off after its checkpoint
        while state.step < self.recipe.steps:
            state = await self.step(state)
            if state.step % (self.recipe.checkpoint_every or self.recipe.steps) == 0 or state.step == self.recipe.steps:
                self.save(state)
            await self.evaluate_if_due(state)
        return state

    async def step(self, state: State) -> State:
        """One update of the policy from fresh rollouts."""
        parts, started = self.parts, time.perf_counter()
        found = await parts.collector.step(state.step, state.cursor, parts.task_at, accepts(parts.method, self.weights))
        sampled = time.perf_counter()
        section = self.recipe.threads
        whole, left_out = kept(self.usable(found), parts.method.keep or partial(threads, kinds=section.train))
        rollouts, alone = apart(whole, kinds=section.apart, own=section.rewards)
        batch = Batch.of(rollouts, channels=tuple(self.weights) or None, weights=self.weights)
        for evidence in parts.method.evidence:
            batch = batch.with_extra(**await evidence(rollouts, batch, parts.services))
        scored = time.perf_counter()
        await parts.engine.pause()
        rate = parts.updater.settings.rate(state.step, self.recipe.steps)
        update = partial(parts.learner.update, rollouts, batch, step=state.step, rate=rate)
        learned = await parts.engine.run(update)
        parts.engine.resume(state.version + 1)
        seconds = time.perf_counter() - started
        after = State(
            step=state.step + 1,
            version=state.version + 1,
            cursor=found.cursor,
            tokens=state.tokens + batch.tokens,
            seconds=state.seconds + seconds,
        )
        times = {
            "step_time": seconds,
            "time/sample": sampled - started,
            "time/evidence": scored - sampled,
            **learned.seconds,
        }
        told = (
            collected_metrics(found, whole)
            | harness_metrics(whole, rewards_of(whole, self.weights), found.failed_under)
            | left_out
            | alone
            | batch_metrics(rollouts, batch)
            | learned.metrics
            | fidelity_metrics(learned.logp_N, batch)
            | times
        )
        for name, asker in parts.services.askers.items():
            told |= asker.metrics(name) if isinstance(asker, Judge) else {}
        told |= {"num_tokens": after.tokens, "tokens_per_second": batch.tokens / (sampled - started)}
        self.last = (rollouts, batch, learned)
        if bool(learned.advantage_N.any()):
            self.taught = [*self.taught[:1], self.last]
        self.metrics.log(after.step, told)
        self.view.step(after.step, told)
        return after

    def usable(self, found: Collected) -> list[Rollout]:
        """The rollouts of the step, if there are any.

        Raises:
            EmptyStepError: there are none, with the reasons.
        """
        if not found.rollouts:
            reasons = "; ".join(found.reasons[:3]) or "the method accepted no group"
            raise EmptyStepError(
                f"no group of this step can be used ({found.dropped} dropped, {found.refused} refused): {reasons}"
            )
        return found.rollouts

    async def evaluate_if_due(self, state: State) -> None:
        """Evaluate before the first step, after every so many and after the last, each once."""
        every = self.recipe.evaluation.every
        due = state.step in (0, self.recipe.steps) or (every and state.step % every == 0)
        done = any(row["step"] == state.step and "eval/count" in row for row in read(self.metrics.path))
        if self.parts.held_out and due and not done:
            await self.evaluate(state)

    async def evaluate(self, state: State) -> dict[str, Any]:
        """One rollout of each held-out task: share solved, with its 95 % interval, and mean reward."""
        started = time.perf_counter()
        runs = await self.parts.collector.evaluate(
            f"eval/{state.step:06d}", self.parts.held_out, temperature=self.recipe.evaluation.temperature
        )
        told = evaluation(runs, self.weights, self.recipe.evaluation.success)
        told["eval/seconds"] = time.perf_counter() - started
        self.metrics.log(state.step, told)
        if told["eval/count"]:
            low, high = told["eval/interval"]
            self.view.note(
                f"evaluation after step {state.step}: {told['eval/accuracy']:.3f} [{low:.3f}, {high:.3f}] solved "
                f"of {told['eval/count']} held-out tasks"
            )
        return told

    async def resume(self) -> State:
        """Take up the last checkpoint, if there is one, and forget what was logged after it."""
        found = self.directory.latest()
        state = State()
        if found:
            state, weights, moments = found
            await self.parts.engine.run(lambda: self.parts.updater.restore(weights, moments))
            self.parts.engine.resume(state.version)
            self.view.note(f"resumed after step {state.step}")
        self.metrics.truncate_after(state.step)
        return state

    def save(self, state: State) -> None:
        """Leave a checkpoint that transformers can load, with what a resumed run needs."""
        updater, model = self.parts.updater, self.parts.policy.model
        tokenizer = self.parts.policy.pretrained.tokenizer

        def extras(folder: Any) -> None:
            model.config.save_pretrained(folder)
            if model.generation_config:
                model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        self.directory.save(state, updater.weights(), updater.moments(), extras)


def evaluation(runs: Sequence[Rollout], weights: dict[str, float], success: float) -> dict[str, Any]:
    """The figures of an evaluation, and of each harness where there are several; a failed rollout is missing."""
    told = _solved(runs, weights, success)
    under = [run.info.get(HARNESS, "") for run in runs]
    names = list(dict.fromkeys(name for name in under if name))
    for name in names if len(names) > 1 else ():
        mine = _solved([run for run, other in zip(runs, under, strict=True) if other == name], weights, success)
        told |= {key.replace("eval/", f"eval/{name}/"): value for key, value in mine.items()}
    return told


def _solved(runs: Sequence[Rollout], weights: dict[str, float], success: float) -> dict[str, Any]:
    totals = [total for total in rewards_of(runs, weights) if total is not None]
    solved = sum(total >= success for total in totals)
    interval = wilson(solved, len(totals)) if totals else None
    return {
        "eval/accuracy": solved / len(totals) if totals else None,
        "eval/interval": [interval.low, interval.high] if interval else None,
        "eval/reward": sum(totals) / len(totals) if totals else None,
        "eval/count": len(totals),
        "eval/missing": len(runs) - len(totals),
    }
