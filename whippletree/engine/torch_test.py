"""The embedded engine on tiny float32 models: what it samples, and what it does with everything that can happen."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
import torch

from whippletree.build import engine_mask
from whippletree.engine.slots import SlotRows
from whippletree.engine.torch import TorchEngine
from whippletree.models.tiny import VOCABULARY, tiny_model
from whippletree.tree.families import decide
from whippletree.types import Piece, Sampling

Said = tuple[list[int], list[float]]


@contextmanager
def engine_of(model: Any = None, *, family: str = "llama", **settings: Any) -> Iterator[TorchEngine]:
    model = model or tiny_model(family)
    mask = engine_mask(decide(model.config), torch.float32)
    engine = TorchEngine(model, **{"end_ids": (), "context": 200, "mask": mask, "gather": 0.001, **settings})
    try:
        yield engine
    finally:
        engine.close()


def ids_of(length: int, *, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


async def say(engine: TorchEngine, prompt: Sequence[int], stream: str = "a", **sampling: Any) -> Said:
    """(ids, log-probs) of one reply."""
    pieces = await pieces_of(engine, prompt, stream, **sampling)
    return [i for piece in pieces for i in piece.ids], [x for piece in pieces for x in piece.logps]


async def pieces_of(engine: TorchEngine, prompt: Sequence[int], stream: str = "a", **sampling: Any) -> list[Piece]:
    settings = Sampling(**{"max_tokens": 12, "stream": stream, **sampling})
    return [piece async for piece in engine.sample(prompt, settings)]


def same(a: Said, b: Said) -> None:
    assert a[0] == b[0]
    assert a[1] == pytest.approx(b[1], abs=1e-5)


def own_logps(model: Any, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The model's log-probs of a reply, computed whole."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *reply]]), use_cache=False).logits[0]
    logp = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logp, reply, strict=True)]


class Broken(torch.nn.Module):
    """A model that fails on one token, or waits at every forward until it may go on."""

    def __init__(self, *, poison: int = -1) -> None:
        super().__init__()
        self.inner, self.poison = tiny_model(), poison
        self.config = self.inner.config
        self.go_on = threading.Event()
        self.go_on.set()

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **others: Any) -> Any:
        self.go_on.wait()
        if bool((input_ids == self.poison).any()):
            raise ValueError("poison")
        return self.inner(input_ids=input_ids, cache=cache, **others)


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_are_the_models_own(family: str, temperature: float):
    with engine_of(family=family) as engine:
        reply, logps = await say(engine, ids_of(15), max_tokens=30, temperature=temperature)
    assert len(reply) == 30
    assert logps == pytest.approx(own_logps(engine.model, ids_of(15), reply, temperature), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "lfm2"])
async def test_a_reply_does_not_depend_on_what_else_is_in_the_batch(family: str):
    prompts = [ids_of(5 + n % 7 * 6, seed=n % 9) for n in range(31)]

    async def one(engine: TorchEngine, n: int, delay: float) -> Said:
        await asyncio.sleep(delay)
        return await say(engine, prompts[n], f"stream {n}", max_tokens=4 + n)

    async def crowd(order: list[int], delays: list[float], **settings: Any) -> dict[int, Said]:
        with engine_of(family=family, **settings) as engine:
            said = await asyncio.gather(*(one(engine, n, delay) for n, delay in zip(order, delays, strict=True)))
        return dict(zip(order, said, strict=True))

    choose = random.Random(1)
    together = await crowd(list(range(31)), [0.0] * 31)
    scattered = await crowd(choose.sample(range(31), k=31), [choose.random() / 5 for _ in range(31)], rows=9)
    for n in range(31):
        same(together[n], scattered[n])
    for n in (0, 13, 30):
        same(together[n], (await crowd([n], [0.0]))[n])


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "lfm2"])
async def test_turns_that_extend_each_other_are_those_of_a_fresh_engine(family: str):
    with engine_of(family=family) as engine:
        ids = ids_of(20)
        for turn in range(4):
            said = await say(engine, ids, f"turn {turn}")
            with engine_of(engine.model) as fresh:
                same(said, await say(fresh, ids, f"turn {turn}"))
            ids = ids + said[0] + ids_of(3, seed=turn)


async def test_the_next_turn_computes_only_what_is_new():
    with engine_of() as engine:
        reply, _ = await say(engine, ids_of(40))
        assert engine.rows.computed == 40 + 11  # the last sampled token is never fed
        await say(engine, [*ids_of(40), *reply, 1, 2, 3], max_tokens=1)
        assert engine.rows.computed == 51 + 1 + 3


async def test_equal_names_give_equal_replies_and_others_differ():
    with engine_of() as engine:
        a, again, b = [await say(engine, ids_of(9), name) for name in ("a", "a", "b")]
    with engine_of(seed=1) as other:
        c = await say(other, ids_of(9), "a")
    same(a, again)
    assert len({tuple(ids) for ids, _ in (a, b, c)}) == 3


async def test_temperature_0_is_the_most_likely_token_each_time():
    with engine_of() as engine:
        reply, _ = await say(engine, ids_of(9), temperature=0.0)
    for n, token in enumerate(reply):
        logits = engine.model(input_ids=torch.tensor([[*ids_of(9), *reply[:n]]])).logits[0, -1]
        assert token == int(logits.argmax())


async def test_a_reply_ends_at_max_tokens_at_the_context_and_at_an_end_token():
    with engine_of(context=30) as engine:
        pieces = await pieces_of(engine, ids_of(9), max_tokens=5)
        assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]
        whole = await pieces_of(engine, ids_of(9), max_tokens=100)
        assert len(whole) == 30 - 9
        assert whole[-1].finish_reason == "length"
        assert len(await pieces_of(engine, ids_of(29), max_tokens=100)) == 1
    ids = [piece.ids[0] for piece in whole]
    with engine_of(context=30, end_ids=[ids[6], VOCABULARY]) as engine:
        ended = await pieces_of(engine, ids_of(9), max_tokens=100)
    place = ids.index(ids[6])
    assert [piece.ids[0] for piece in ended] == ids[: place + 1]  # the end token is part of the reply
    assert ended[-1].finish_reason == "stop"


@pytest.mark.parametrize("length", [0, 200, 5000])
async def test_a_prompt_that_is_empty_or_leaves_no_room_is_refused(length: int):
    with engine_of() as engine:
        with pytest.raises(ValueError, match=f"1 to 199 tokens, but got {length}"):
            await say(engine, [1] * length)
        assert len((await say(engine, ids_of(9)))[0]) == 12


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
async def test_impossible_sampling_is_refused(bad: dict[str, Any]):
    with engine_of() as engine, pytest.raises(ValueError, match="max_tokens must be"):
        await say(engine, ids_of(9), **bad)


async def test_closing_the_iterator_frees_the_row():
    with engine_of(rows=1, context=4000) as engine:
        endless = engine.sample(ids_of(9), Sampling(max_tokens=3000))
        async with aclosing(endless):
            async for _ in endless:
                break
        assert len((await say(engine, ids_of(9)))[0]) == 12  # with one row, only after the first has gone
        assert engine.sampled < 3000


async def test_a_caller_that_is_cancelled_while_waiting_never_runs():
    model = Broken()
    with engine_of(model, rows=1) as engine:
        model.go_on.clear()
        first = asyncio.create_task(say(engine, ids_of(9)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(say(engine, ids_of(30, seed=1)))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        model.go_on.set()
        await first
        assert engine.rows.computed == 9 + 11


async def test_more_requests_than_rows_wait_their_turn():
    with engine_of(rows=4) as engine:
        replies = await asyncio.gather(*(say(engine, ids_of(9, seed=n), str(n)) for n in range(23)))
        assert isinstance(engine.rows, SlotRows)
        assert engine.rows.slots.slots == 8  # slots come in eights; 23 rows at once would have made 24
    assert [len(ids) for ids, _ in replies] == [12] * 23


async def test_rows_that_outgrow_the_memory_go_on_later_where_they_were():
    prompts = [ids_of(20, seed=n) for n in range(6)]

    async def run(running_bytes: int, rows: int = 6) -> tuple[list[Said], int]:
        with engine_of(running_bytes=running_bytes) as engine:
            said = await asyncio.gather(*(say(engine, prompts[n], str(n), max_tokens=100) for n in range(rows)))
            assert isinstance(engine.rows, SlotRows)
            return said, engine.rows.slots.slots * engine.rows.slots.length

    place = SlotRows(tiny_model()).slots.place_bytes
    free, _ = await run(1 << 30)
    # 6 * (20 + 64) places are enough to begin, but not for 6 rows of 120 tokens; blocks come in 8 slots of 64, 128, ...
    tight, places = await run(6 * 85 * place)
    alone, _ = await run(1, rows=2)  # a single row always has room
    for a, b in zip(free + free[:2], tight + alone, strict=True):
        same(a, b)
    assert places <= 8 * 128


async def test_pause_drains_holds_back_and_resume_serves_the_new_weights():
    model = tiny_model()
    with engine_of(model) as engine:
        running = asyncio.create_task(pieces_of(engine, ids_of(40), max_tokens=60))
        while not engine._running:
            await asyncio.sleep(0.001)
        await engine.pause()
        assert engine._running == []
        held = asyncio.create_task(pieces_of(engine, ids_of(40)))
        await asyncio.sleep(0.05)
        assert not held.done()
        old = await running
        assert {piece.version for piece in old} == {0}
        assert len(old) == 60
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.9)
        engine.resume(7)
        new = await held
    assert {piece.version for piece in new} == {7}
    with engine_of(model) as fresh:
        ids, logps = await say(fresh, ids_of(40))
    same(([piece.ids[0] for piece in new], [piece.logps[0] for piece in new]), (ids, logps))


async def test_a_pause_lets_a_begun_reply_that_had_to_wait_end_under_its_version():
    place = SlotRows(tiny_model()).slots.place_bytes
    with engine_of(running_bytes=2 * 100 * place) as engine:
        running = [asyncio.create_task(pieces_of(engine, ids_of(20, seed=n), max_tokens=150)) for n in range(2)]
        while not any(reply.count for reply in engine._waiting):
            await asyncio.sleep(0.001)
        await engine.pause()
        engine.resume(1)
        for pieces in await asyncio.gather(*running):
            assert {piece.version for piece in pieces} == {0}
            assert len(pieces) == 150


async def test_pausing_twice_and_pausing_an_idle_engine_return():
    with engine_of() as engine:
        await engine.pause()
        await engine.pause()
        engine.resume(1)
        assert (await pieces_of(engine, ids_of(9)))[0].version == 1


async def test_an_error_inside_the_model_reaches_every_caller_and_the_engine_lives_on():
    healthy = ids_of(40)
    poison = next(token for token in range(1, VOCABULARY) if token not in healthy)
    model = Broken(poison=poison)
    with engine_of(model, rows=2) as engine:
        model.go_on.clear()
        tasks = [
            asyncio.create_task(say(engine, ids, max_tokens=100)) for ids in (healthy, [*healthy, poison], healthy[:20])
        ]
        await asyncio.sleep(0.05)
        model.go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in results] == ["sampling ended with ValueError('poison')"] * 3
        assert engine._running == engine._waiting == []
        model.poison = -1
        # what a failed step left in the rows is not taken for keys of a prefix
        said = await say(engine, [*healthy, poison, 1])
        assert said[1] == pytest.approx(own_logps(model.inner, [*healthy, poison, 1], said[0]), abs=1e-5)


async def test_a_step_that_failed_leaves_no_keys_behind():
    prompt = [1 + i % 40 for i in range(45)]
    with engine_of() as engine:
        reply, _ = await say(engine, prompt, max_tokens=30)
    place, poison = next((i, token) for i, token in enumerate(reply) if token > 40)  # not in the prompt
    model = Broken(poison=poison)
    with engine_of(model) as engine:
        with pytest.raises(RuntimeError, match="poison"):
            await say(engine, prompt, max_tokens=30)
        model.poison = -1
        longer = [*prompt, *reply[: place + 1], 5]  # what the row would have held after the step
        said = await say(engine, longer)
        assert said[1] == pytest.approx(own_logps(model.inner, longer, said[0]), abs=1e-5)
        assert engine.rows.computed >= len(longer)


async def test_weights_that_are_nan_are_an_error_for_the_caller():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with engine_of(model) as engine, pytest.raises(RuntimeError, match="NaN or infinite"):
        await say(engine, ids_of(9))


async def test_close_fails_who_waits_and_refuses_who_comes():
    model = Broken()
    with engine_of(model, rows=1) as engine:
        model.go_on.clear()
        tasks = [asyncio.create_task(say(engine, ids_of(9), max_tokens=150)) for _ in range(3)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.02)
        model.go_on.set()
        await closing
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert "the engine is closed" in str(error)
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await say(engine, ids_of(9))


def test_callers_in_many_event_loops_share_one_batch():
    said: dict[int, Said] = {}
    with engine_of() as engine:

        def caller(n: int) -> None:
            said[n] = asyncio.run(say(engine, ids_of(9, seed=n), str(n)))

        threads = [threading.Thread(target=caller, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(6):
            same(said[n], asyncio.run(say(engine, ids_of(9, seed=n), str(n))))


def test_an_event_loop_that_ends_without_a_word_frees_its_row():
    with engine_of(rows=1, context=4000) as engine:
        loop = asyncio.new_event_loop()
        pieces: AsyncGenerator[Piece, None] = engine.sample(ids_of(9), Sampling(max_tokens=3900))
        loop.run_until_complete(anext(pieces))
        loop.close()
        assert len(asyncio.run(say(engine, ids_of(9)))[0]) == 12
        assert engine.sampled < 3900


async def test_other_work_is_done_by_the_engines_own_thread_while_replies_run_and_while_paused():
    with engine_of() as engine:
        reply = asyncio.create_task(say(engine, ids_of(9), max_tokens=50))
        assert await engine.run(lambda: threading.current_thread().name) == "engine"
        assert len((await reply)[0]) == 50
        await engine.pause()
        assert await engine.run(lambda: 6 * 7) == 42
        engine.resume(1)
        assert len((await say(engine, ids_of(9)))[0]) == 12


async def test_work_that_fails_tells_its_caller_and_the_engine_lives():
    def fail() -> None:
        raise ZeroDivisionError("one by nothing")

    with engine_of() as engine:
        with pytest.raises(ZeroDivisionError, match="one by nothing"):
            await engine.run(fail)
        assert len((await say(engine, ids_of(9)))[0]) == 12
    with pytest.raises(RuntimeError, match="closed"):
        await engine.run(lambda: 1)


def test_a_model_that_cannot_be_asked_for_its_keys_is_refused_where_the_engine_is_made():
    class Refuses(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
            raise ValueError("no such input")

    model = Refuses()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="no such input"):
        TorchEngine(model, end_ids=(), context=20)
