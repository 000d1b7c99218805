from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.postgres import postgres  # noqa: F401 - a fixture
from whippletree.gateway.exchange import AT_ONCE, KINDS, TURN, import_rollouts, read_rollouts, rows_of, write_rows
from whippletree.gateway.store import Store, open_store
from whippletree.types import Blame, Ending, Rollout, Task, Turn

TASK = Task("t", messages=({"role": "user", "content": "hi"},), columns={"answer": 7})
FORMATS = pytest.mark.parametrize("ending", ["jsonl", "parquet"])


def turn(name: str, *, prompt: tuple[int, ...] = (5, 6)) -> Turn:
    return Turn(
        id=name,
        prompt_ids=prompt,
        reply_ids=(7, 2**31 - 1),
        reply_logps=(-1 / 3, math.nan),
        version=3,
        finish_reason="tool_calls",
        temperature=0.7,
        top_p=0.9,
        request={"messages": [{"role": "user", "content": "h\u00e9\u2028\ud800"}]},
        reply={"content": None},
        thread="sub-agent/1",
        link="fork",
        versions=(2, 3),
        info={"api": "chat", "drift": [0.5]},
    )


def rollout(name: str, *turns: Turn, **changes: Any) -> Rollout:
    kept = turns or (turn(f"{name}/0"), turn(f"{name}/1", prompt=()))
    return replace(Rollout(name, TASK, "g", turns=kept, rewards={"correct": 0.1, "style": None}), **changes)


EMPTY = Rollout("empty", TASK, "g", ending="failed", blame="sandbox", reason="no space", info={"stderr": "x"})


def rows(*rollouts: Rollout) -> list[dict[str, Any]]:
    return [row for each in rollouts for row in rows_of(each)]


def write(path: Path, *rollouts: Rollout) -> Path:
    write_rows(rows(*rollouts), path, KINDS)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """As JSON, in which NaN equals NaN."""
    return [each.to_json() for each, _ in read_rollouts(path)]


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens a new store each time."""
    stores: list[Store] = []

    def make() -> Store:
        sqlite = request.param == "sqlite"
        place = tmp_path / f"{len(stores)}.sqlite" if sqlite else request.getfixturevalue("postgres").address()
        stores.append(open_store(place))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


# ---- what stands in a file --------------------------------------------------------------------------------------


def test_a_line_of_jsonl_by_hand(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", rollout("r", turn("a")))
    assert path.read_text() == (
        '{"rollout_id":"r","group":"g","task":{"id":"t","messages":[{"role":"user","content":"hi"}],'
        '"columns":{"answer":7}},"rewards":{"correct":0.1,"style":null},"ending":"done","blame":null,"reason":"",'
        '"rollout_info":{},"turns":1,"number":0,"id":"a","prompt_ids":[5,6],"reply_ids":[7,2147483647],'
        '"reply_logps":[-0.3333333333333333,null],"version":3,"finish_reason":"tool_calls","temperature":0.7,'
        '"top_p":0.9,"request":{"messages":[{"role":"user","content":"h\\u00e9\\u2028\\ud800"}]},'
        '"reply":{"content":null},"thread":"sub-agent/1","link":"fork","versions":[2,3],'
        '"info":{"api":"chat","drift":[0.5]}}\n'
    )


def test_parquet_has_numbers_as_numbers_and_objects_as_their_json(tmp_path: Path):
    table = pyarrow.parquet.read_table(write(tmp_path / "x.parquet", rollout("r"), EMPTY))
    assert table.column_names == list(KINDS)
    kinds = {field.name: str(field.type) for field in table.schema}
    assert [kinds[name] for name in ("prompt_ids", "versions", "reply_logps", "version", "temperature", "task")] == [
        "list<element: int32>",
        "list<element: int64>",
        "list<element: double>",
        "int64",
        "double",
        "string",
    ]
    first, _, empty = table.to_pylist()
    assert first["reply_logps"] == [-1 / 3, None]
    assert json.loads(first["task"]) == TASK.to_json()
    assert [empty[name] for name in ("turns", "number", "id", "prompt_ids", "request")] == [0, None, None, None, None]


def test_the_columns_of_a_turn_are_its_fields():
    assert list(TURN) == [field.name for field in fields(Turn)]


@FORMATS
def test_an_empty_store_gives_a_file_without_rows(ending: str, tmp_path: Path):
    assert read(write(tmp_path / f"x.{ending}")) == []


def test_many_tokens_are_written_in_several_row_groups(tmp_path: Path):
    long = tuple(range(1_500_000))  # three times that is more than a group of 4 * 2**20 takes
    kept = rollout("r", *(replace(turn(str(n)), prompt_ids=long) for n in range(4)))
    path = write(tmp_path / "x.parquet", kept)
    assert [pyarrow.parquet.ParquetFile(path).metadata.row_group(n).num_rows for n in range(2)] == [3, 1]
    assert read(path) == [kept.to_json()]


# ---- and back ---------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
OBJECTS = st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False))
ENDINGS, BLAMES = get_args(Ending), (None, *get_args(Blame))
LOGPS = st.floats(max_value=0) | st.just(math.nan)


@st.composite
def turns(draw: st.DrawFn, name: str) -> Turn:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
    reply = draw(ids)
    size = len(reply)
    wholes = st.integers(-(2**63), 2**63 - 1)
    return Turn(
        id=name,
        prompt_ids=tuple(draw(ids)),
        reply_ids=tuple(reply),
        reply_logps=tuple(draw(st.lists(LOGPS, min_size=size, max_size=size))),
        version=draw(wholes),
        finish_reason=draw(TEXTS),
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1)),
        request=draw(OBJECTS),
        reply=draw(OBJECTS),
        thread=draw(TEXTS),
        link=draw(st.sampled_from(("root", "append", "realign", "fork"))),
        versions=tuple(draw(st.lists(wholes, min_size=size, max_size=size))) if draw(st.booleans()) else (),
        info=draw(OBJECTS),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        kept = tuple(draw(turns(f"{number}/{k}")) for k in range(draw(st.integers(0, 3))))
        rewards = draw(st.dictionaries(TEXTS, st.none() | st.floats(allow_nan=False), max_size=2))
        task = Task(draw(TEXTS), tuple(draw(st.lists(OBJECTS, max_size=2))), draw(OBJECTS))
        ended: dict[str, Any] = {"ending": draw(st.sampled_from(ENDINGS)), "blame": draw(st.sampled_from(BLAMES))}
        said: dict[str, Any] = {"reason": draw(TEXTS), "info": draw(OBJECTS)}
        made.append(Rollout(str(number), task, draw(TEXTS), kept, rewards, **ended, **said))
    return made


@FORMATS
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=rollouts())
def test_rollouts_come_back_exactly(ending: str, kept: list[Rollout], tmp_path: Path):
    path = write(tmp_path / f"x.{ending}", *kept)
    try:
        assert read(path) == [each.to_json() for each in kept]
    finally:
        path.unlink()


@FORMATS
async def test_what_is_exported_from_one_store_is_the_same_in_another(
    ending: str, make: Callable[[], Store], tmp_path: Path
):
    store, other, path = make(), make(), tmp_path / f"x.{ending}"
    kept = [EMPTY, *(rollout(f"r{n:02}", group=f"g{n % 3}") for n in range(AT_ONCE + 3))]
    for each in kept:
        await store.add_rollout(each)
    assert write_rows(rows(*store.each()), path, KINDS) == 1 + 2 * (AT_ONCE + 3)
    parts: list[float] = []
    assert await import_rollouts(path, other, seen=parts.append) == [True] * len(kept)
    assert [each.to_json() for each in other.each()] == [each.to_json() for each in kept]
    assert len(parts) == 2  # after 32 rollouts, and at the end
    assert 0 < parts[0] < parts[1] == 1.0
    assert await import_rollouts(path, other) == [False] * len(kept)  # all there already


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reply_ids": [7, "8"]}, r"reply_ids.1: Input should be a valid integer, but got '8'"),
        ({"prompt_ids": [-1]}, r"prompt_ids.0: Input should be greater than or equal to 0, but got '-1'"),
        ({"prompt_ids": [2**31]}, r"prompt_ids.0: Input should be less than 2147483648"),
        (
            {"reply_ids": [7], "versions": []},
            r"turn b: each sampled token needs one log-probability, but there are 1 ids",
        ),
        ({"link": "prepend"}, r"link: Input should be 'root', 'append', 'realign' or 'fork', but got 'prepend'"),
        ({"task": {"id": "t"}}, r"task.messages: Field required"),
        ({"rewards": {"x": "1"}}, r"rewards.x: Input should be a valid number"),
        ({"version": None}, r"version: Input should be a valid integer"),
        ({"extra": 1}, r"without --as, but none is missing and extra is unknown"),
        ({"number": 3}, r"from 0 on, but this is turn 3 of 'r' after 1 turns of 'r'"),
        ({"rollout_id": "s"}, r"this is turn 1 of 's' after 1 turns of 'r'"),
        ({"group": "other"}, r"the rows of rollout 'r' say different things of it"),
        ({"turns": 0, "number": None}, r"'r' has 0 turns, but this row has one"),
    ],
)
def test_a_row_that_is_not_what_was_exported_is_refused_with_its_line(
    change: dict[str, Any], told: str, tmp_path: Path
):
    lines = rows(rollout("q"), rollout("r", turn("a"), turn("b")))
    lines[3] |= change
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_rollouts(tmp_path / "x.jsonl")
    assert next(found)[0].id == "q"
    with pytest.raises(ValueError, match=rf"x.jsonl, line 4: .*{told}"):
        next(found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"line 3: each line is one JSON object, but this is none: .*; the file was cut off here$"),
        ("\n", r"line 3: each line is one JSON object, but this is none: (?!.*cut off)"),
        ("[1]\n", r"line 3: a row has one turn, .* rollout_id, group, .*, info is missing and none is unknown"),
        ("\xff\n", r"line 3: each line is one JSON object, but this is none: "),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_number(text: str, told: str, tmp_path: Path):
    path = write(tmp_path / "x.jsonl", rollout("q"))
    path.write_bytes(path.read_bytes() + (text or '{"rollout_id":"r","gro').encode("latin-1"))
    with pytest.raises(ValueError, match=told):
        read(path)


def test_a_file_that_ends_within_a_rollout_is_told(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", rollout("r"))
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=r"ends after 1 of the 2 turns of rollout 'r'; it was cut off"):
        read(path)


def test_what_is_no_parquet_of_ours_is_refused_with_its_row(tmp_path: Path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"x.parquet cannot be read as Parquet"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"prompt_ids": [[1]], "reward": [1.0]}), path)
    with pytest.raises(ValueError, match=r"x.parquet, row 1: .* rollout_id, .* is missing and reward is unknown"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({name: [None] for name in KINDS}), path)
    with pytest.raises(ValueError, match=r"x.parquet, row 1: rollout_id: Input should be a valid string"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"task": ["{"]}), path)
    with pytest.raises(ValueError, match=r"x.parquet, row 1: task are JSON texts, but one is none"):
        read(path)


def test_nothing_is_overwritten_and_a_file_is_there_whole_or_not_at_all(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", rollout("r"))
    before = path.read_text()
    with pytest.raises(ValueError, match=r"no file is overwritten, but .*x.jsonl is there already"):
        write(path, EMPTY)

    def broken() -> Iterator[dict[str, Any]]:
        yield from rows_of(EMPTY)
        raise RuntimeError("the store went away")

    for ending in ("jsonl", "parquet"):
        with pytest.raises(RuntimeError, match="went away"):
            write_rows(broken(), tmp_path / f"y.{ending}", KINDS)
    assert [each.name for each in tmp_path.iterdir()] == ["x.jsonl"]
    assert path.read_text() == before


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    for use in (write, read):
        with pytest.raises(ValueError, match=r"its name ends in .jsonl or .parquet, but got .*x.csv"):
            use(tmp_path / "x.csv")


def test_without_pyarrow_its_extra_is_named_and_jsonl_is_written(tmp_path: Path):
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from whippletree.gateway.exchange import KINDS, write_rows\n"
        "write_rows([], Path('x.jsonl'), KINDS); write_rows([], Path('x.parquet'), KINDS)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "pip install 'whippletree[parquet]'" in result.stderr.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["x.jsonl"]


# ---- an import goes on where it was -----------------------------------------------------------------------------


async def test_an_import_that_met_an_error_goes_on_from_there(make: Callable[[], Store], tmp_path: Path):
    store, kept = make(), [rollout(f"r{n}") for n in range(4)]
    whole = write(tmp_path / "x.jsonl", *kept)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:5]))  # two rollouts, and half of the third
    with pytest.raises(ValueError, match="ends after 1 of the 2 turns of rollout 'r2'"):
        await import_rollouts(cut, store)
    assert store.ids() == ["r0", "r1"]
    assert await import_rollouts(whole, store) == [False, False, True, True]
    assert [each.to_json() for each in store.each()] == [each.to_json() for each in kept]


async def test_a_rollout_that_is_there_with_other_content_is_refused_and_stays(
    make: Callable[[], Store], tmp_path: Path
):
    store, here = make(), rollout("r1", turn("elsewhere"))
    await store.add_rollout(here)
    path = write(tmp_path / "x.jsonl", *(rollout(f"r{n}") for n in range(3)))
    with pytest.raises(ValueError, match=r"has another one named 'r1'; take another store"):
        await import_rollouts(path, store)
    assert store.ids() == ["r0", "r1", "r2"]  # those read along with it were kept
    assert [each.to_json() for each in store.each(prefix="r1")] == [here.to_json()]
