"""Rollouts in files: JSONL or Parquet, one row a turn, and back without loss.

A row has the columns of its rollout and those of a turn, under the names of `types.Rollout` and `types.Turn`. The turns
of a rollout stand together in their order; a rollout without turns is one row whose turn columns are null. An unknown
log-probability is null. Parquet holds what JSON calls an object as its text.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, create_model

from whippletree.gateway.store import Store
from whippletree.types import Blame, Ending, Json, Link, Rollout, Task, Turn

if TYPE_CHECKING:
    import pyarrow

STRICT = ConfigDict(strict=True, extra="forbid")
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TaskRow = create_model("Task", __config__=STRICT, id=(str, ...), messages=(list[Json], ...), columns=(Json, ...))
# what a column is in Parquet, and what may stand in it
ROLLOUT: dict[str, tuple[str, Any]] = {
    "rollout_id": ("text", str),
    "group": ("text", str),
    "task": ("json", TaskRow),
    "rewards": ("json", dict[str, float | None]),
    "ending": ("text", Ending),
    "blame": ("text", Blame | None),
    "reason": ("text", str),
    "rollout_info": ("json", Json),
    "turns": ("whole", NonNegativeInt),  # how many it has
    "number": ("whole", NonNegativeInt | None),  # which of them this is; null where it has none
}
TURN: dict[str, tuple[str, Any]] = {
    "id": ("text", str),
    "prompt_ids": ("ids", list[Id]),
    "reply_ids": ("ids", list[Id]),
    "reply_logps": ("numbers", list[float | None]),
    "version": ("whole", Whole),
    "finish_reason": ("text", str),
    "temperature": ("number", float),
    "top_p": ("number", float),
    "request": ("json", Json),
    "reply": ("json", Json),
    "thread": ("text", str),
    "link": ("text", Link),
    "versions": ("wholes", list[Whole]),
    "info": ("json", Json),
}
KINDS = {name: kind for name, (kind, _) in {**ROLLOUT, **TURN}.items()}
AT_ONCE = 32  # rollouts whose writes share a flush to disk
ROW_GROUP = 4 << 20  # numbers and letters after which Parquet gets a row group: some 100 MB in memory

Rows = Iterator[tuple[str, Json, float]]  # where it stands, the row, the part of the file that is read by then


def _model(columns: Mapping[str, tuple[str, Any]]) -> type[BaseModel]:
    kinds: dict[str, Any] = {name: (kind, ...) for name, (_, kind) in columns.items()}
    return create_model("Row", __config__=STRICT, **kinds)


ROLLOUT_ROW, TURN_ROW = _model(ROLLOUT), _model(TURN)


def rows_of(rollout: Rollout) -> Iterator[Json]:
    """The rows of one rollout."""
    row = rollout.to_json()
    turns = row.pop("turns")
    head = {"rollout_id": row.pop("id"), "rollout_info": row.pop("info"), **row, "turns": len(turns)}
    for number, turn in enumerate(turns or [dict.fromkeys(TURN)]):
        both = {**head, "number": number if turns else None, **turn}
        yield {name: both[name] for name in KINDS}


def write_rows(rows: Iterable[Json], path: Path, kinds: Mapping[str, str]) -> int:
    """Write rows with these columns to a .jsonl or .parquet file and say how many; it is there whole or not at all.

    Raises:
        ImportError: Parquet is asked for, and pyarrow is not installed.
        ValueError: the file is there already, or its name ends in neither.
    """
    write: Callable[[Iterable[Json], Path, Mapping[str, str]], int] = _by_ending(path, _write_jsonl, _write_parquet)
    if path.exists():
        raise ValueError(f"no file is overwritten, but {path} is there already; remove it, or name another")
    aside = path.with_name(f"{path.name}.part")
    try:
        count = write(rows, aside, kinds)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return count


def read_rollouts(path: Path) -> Iterator[tuple[Rollout, float]]:
    """The rollouts of a file, each with the part of the file (0 to 1) that is read by then.

    Raises:
        ImportError: it is a Parquet file, and pyarrow is not installed.
        ValueError: a row is not what was exported, or rows are missing; says which.
    """
    first: Json | None = None  # what the rows of a rollout share
    turns: list[Turn] = []
    for where, row, part in _by_ending(path, _read_jsonl, _read_parquet)(path):
        head, turn = _checked(where, row)
        number = head.pop("number")
        if number != (len(turns) if head["turns"] else None) or (first or head)["rollout_id"] != head["rollout_id"]:
            raise ValueError(
                f"{where}: the turns of a rollout stand together, from 0 on, but this is turn {number} of "
                f"{head['rollout_id']!r} after {len(turns)} turns of {(first or head)['rollout_id']!r}; export it again"
            )
        if first not in (None, head):
            raise ValueError(f"{where}: the rows of rollout {head['rollout_id']!r} say different things of it")
        first = head
        turns += [] if turn is None else [turn]
        if len(turns) == head["turns"]:
            yield _rollout(head, turns), part
            first, turns = None, []
    if first is not None:
        raise ValueError(
            f"{path} ends after {len(turns)} of the {first['turns']} turns of rollout {first['rollout_id']!r}; it was "
            f"cut off, so export it again"
        )


async def import_rollouts(path: Path, store: Store, *, seen: Callable[[float], None] = lambda part: None) -> list[bool]:
    """Keep the rollouts of a file; for each, whether it was new. Those that are there already are left as they are.

    `seen` is told the part of the file (0 to 1) that is done. What was kept before an error stays, so the same import,
    once the file is mended, goes on from there.

    Raises:
        ImportError: it is a Parquet file, and pyarrow is not installed.
        StoreError: the store cannot be written, or has one of these turns in another rollout.
        ValueError: the file is not what was exported, or the store has another rollout of the same id.
    """
    added: list[bool] = []
    waiting: list[Rollout] = []

    async def keep() -> None:
        batch, waiting[:] = waiting[:], []
        results = await asyncio.gather(*map(store.add_rollout, batch), return_exceptions=True)
        added.extend(result for result in results if isinstance(result, bool))
        for error in results:
            if isinstance(error, BaseException):
                raise error

    try:
        for rollout, part in read_rollouts(path):
            waiting.append(rollout)
            if len(waiting) == AT_ONCE:
                await keep()
                seen(part)
    finally:
        await keep()
    seen(1.0)
    return added


def _checked(where: str, row: Any) -> tuple[Json, Turn | None]:
    """The rollout's columns of this row, and its turn."""
    if not isinstance(row, dict) or row.keys() != KINDS.keys():
        names = row.keys() if isinstance(row, dict) else ()
        missing, unknown = [name for name in KINDS if name not in names], sorted(set(names) - set(KINDS))
        raise ValueError(
            f"{where}: a row has one turn, in the columns that `whippletree turns export` writes without --as, but "
            f"{', '.join(missing) or 'none'} is missing and {', '.join(unknown) or 'none'} is unknown"
        )
    head = {name: row[name] for name in ROLLOUT}
    turn = {name: row[name] for name in TURN}
    try:
        ROLLOUT_ROW.model_validate(head)
        if head["turns"] == 0:
            if any(value is not None for value in turn.values()):
                raise ValueError(f"rollout {head['rollout_id']!r} has 0 turns, but this row has one; export it again")
            return head, None
        TURN_ROW.model_validate(turn)
        return head, Turn.from_json(turn)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {name}: {first['msg']}, but got {str(first['input'])[:80]!r}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _rollout(head: Json, turns: list[Turn]) -> Rollout:
    return Rollout(
        id=head["rollout_id"],
        task=Task.from_json(head["task"]),
        turns=tuple(turns),
        info=head["rollout_info"],
        **{name: head[name] for name in ("group", "rewards", "ending", "blame", "reason")},
    )


# ---- the two kinds of file --------------------------------------------------------------------------------------


def _by_ending(path: Path, jsonl: Any, parquet: Any) -> Any:
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"a file of turns is JSONL or Parquet, so its name ends in .jsonl or .parquet, but got {path}")
    return jsonl if path.suffix == ".jsonl" else parquet


def _write_jsonl(rows: Iterable[Json], path: Path, kinds: Mapping[str, str]) -> int:
    count = 0
    with path.open("w", encoding="ascii") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            count += 1
    return count


def _read_jsonl(path: Path) -> Rows:
    read, size = 0, path.stat().st_size
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                ended = "" if line.endswith(b"\n") else "; the file was cut off here"
                raise ValueError(f"{where}: each line is one JSON object, but this is none: {error}{ended}") from None
            yield where, row, read / size


def _write_parquet(rows: Iterable[Json], path: Path, kinds: Mapping[str, str]) -> int:
    arrow = _arrow()
    schema = _schema(kinds)
    texts = [name for name, kind in kinds.items() if kind == "json"]
    count, size, batch = 0, 0, []
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for row in rows:
            batch.append({**row, **{name: json.dumps(row[name]) for name in texts if row[name] is not None}})
            size += sum(len(value) for value in batch[-1].values() if isinstance(value, list | str))
            count += 1
            if size >= ROW_GROUP:
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                size, batch = 0, []
        writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return count


def _read_parquet(path: Path) -> Rows:
    arrow = _arrow()
    number = 0
    with path.open("rb") as file:
        try:
            found = arrow.parquet.ParquetFile(file)
            for batch in found.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    number += 1
                    where = f"{path}, row {number}"
                    yield where, _unpacked(where, row), number / found.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def _unpacked(where: str, row: Json) -> Json:
    """The row with its JSON texts read."""
    texts = [name for name, kind in KINDS.items() if kind == "json" and row.get(name) is not None]
    try:
        return {**row, **{name: json.loads(row[name]) for name in texts}}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {', '.join(texts)} are JSON texts, but one is none: {error}") from None


def _schema(kinds: Mapping[str, str]) -> pyarrow.Schema:
    arrow = _arrow()
    types = {"text": arrow.string(), "json": arrow.string(), "whole": arrow.int64(), "number": arrow.float64()}
    types |= {"flag": arrow.bool_(), "ids": arrow.list_(arrow.int32()), "wholes": arrow.list_(arrow.int64())}
    types |= {"numbers": arrow.list_(arrow.float64()), "flags": arrow.list_(arrow.bool_())}
    types |= {"tokens": arrow.struct([("token_ids", types["ids"])])}
    return arrow.schema([(name, types[kind]) for name, kind in kinds.items()])


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs the library pyarrow: pip install 'whippletree[parquet]'") from error
    return pyarrow
