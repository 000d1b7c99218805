from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from whippletree.engine.scripted import ScriptedEngine, scripted_logp
from whippletree.models.tiny import tiny_tokenizer
from whippletree.types import Piece, Sampling

TOKENIZER = tiny_tokenizer()
PROMPT = tuple(TOKENIZER.encode("hi", add_special_tokens=False))


async def pieces_of(engine: ScriptedEngine, *, max_tokens: int = 100) -> list[Piece]:
    return [piece async for piece in engine.sample(PROMPT, Sampling(max_tokens=max_tokens))]


async def test_a_reply_is_its_text_and_the_end_of_turn():
    pieces = await pieces_of(ScriptedEngine(["ab"], TOKENIZER))
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert [piece.ids for piece in pieces] == [(a,), (b,), (TOKENIZER.eos_token_id,)]
    assert [piece.logps for piece in pieces] == [
        (scripted_logp(a, 0),),
        (scripted_logp(b, 1),),
        (scripted_logp(TOKENIZER.eos_token_id, 2),),
    ]
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]


async def test_a_reply_that_is_cut_says_length():
    # "abc" and its end are 4 tokens; 3 leave the end out
    pieces = await pieces_of(ScriptedEngine(["abc"], TOKENIZER, piece=2), max_tokens=3)
    assert [len(piece.ids) for piece in pieces] == [2, 1]
    assert [piece.finish_reason for piece in pieces] == [None, "length"]


async def test_replies_may_be_a_function_of_the_prompt():
    engine = ScriptedEngine(str.upper, TOKENIZER, piece=10)
    (piece,) = await pieces_of(engine)
    assert TOKENIZER.decode(piece.ids, skip_special_tokens=True) == "HI"
    assert engine.prompts == ["hi"]


async def test_a_script_that_has_ended_and_a_full_window_are_refused():
    with pytest.raises(ValueError, match="the script has 0 replies"):
        await pieces_of(ScriptedEngine([], TOKENIZER))
    with pytest.raises(ValueError, match="must leave room in 2 tokens, but it has 2"):
        await pieces_of(ScriptedEngine(["x"], TOKENIZER, context=2))


async def test_a_scripted_failure_comes_after_its_tokens():
    engine = ScriptedEngine(["abc"], TOKENIZER, failure=OSError("no power"), fail_after=2)
    seen = []
    with pytest.raises(OSError, match="no power"):
        async for piece in engine.sample(PROMPT, Sampling(max_tokens=9)):
            seen.append(piece)
    assert len(seen) == 2


async def test_closing_a_reply_early_is_counted():
    engine = ScriptedEngine(["abc"], TOKENIZER)
    async with aclosing(engine.sample(PROMPT, Sampling(max_tokens=9))) as pieces:
        async for _ in pieces:
            break
    assert engine.closed == 1
    await engine.pause()  # nothing runs any more, so this returns


async def test_pause_waits_for_what_runs_and_holds_back_what_comes():
    engine = ScriptedEngine(["first", "second"], TOKENIZER)
    first = asyncio.create_task(pieces_of(engine))
    await asyncio.sleep(0)
    await engine.pause()
    assert (await asyncio.wait_for(first, 5))[-1].finish_reason == "stop"
    second = asyncio.create_task(pieces_of(engine))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    engine.resume(7)
    assert {piece.version for piece in await second} == {7}
