"""Rows of running replies for models with full attention: one block of keys and values, a slot for each row.

Row b of the block holds positions 0, 1, ... of its own sequence from the left, so rows of any length stand together,
a freed slot is filled at once, and an earlier prefix is taken over by copying. What a row may see is a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from whippletree.engine.prefixes import Ids, Prefixes, Saved, common_prefix

Mask = Callable[[Tensor, Tensor], Any]  # (seen [B, Q, L] bool, distance [B, Q, L]) -> what the model takes as its mask
SHARED = 16  # prompts that share this much more than is known of them are computed one after the other
STEP = 64  # the block is this much longer at a time, in tokens
EVEN = 8  # products over a multiple of this many rows round alike, however many they are


def plain_mask(seen_BQL: Tensor, distance_BQL: Tensor) -> Tensor:
    """The mask of a model whose layers all attend to everything before."""
    return seen_BQL[:, None]


class Slots(Cache):  # type: ignore[misc] # transformers carries no types
    """Keys and values of every layer, by slot. Layers of equal shape share one block [planes, slots, L, H, D]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(layers=[])
        self.keyword = cache_keyword(model)
        self.device = next(model.parameters()).device
        probe = DynamicCache()
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            model(input_ids=one, use_cache=True, **{self.keyword: probe})
        self.plane: dict[tuple[int, int], tuple[Any, int]] = {}
        counts: dict[Any, int] = {}
        for number, layer in enumerate(probe.layers):
            for side, tensor in enumerate((layer.keys, layer.values)):
                if tensor is not None:  # a layer may read the keys of another one
                    kind = (tensor.shape[1], tensor.shape[3], tensor.dtype)
                    self.plane[number, side] = (kind, counts.get(kind, 0))
                    counts[kind] = counts.get(kind, 0) + 1
        self.empty = {
            (heads, width, dtype): torch.zeros(planes, 0, 0, heads, width, dtype=dtype, device=self.device)
            for (heads, width, dtype), planes in counts.items()
        }
        self.place_bytes = sum(n * heads * width * dtype.itemsize for (heads, width, dtype), n in counts.items())
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.blocks: dict[Any, Tensor] = dict(self.empty)
        self.slots, self.length, self.span = 0, 0, 0

    def fit(self, slots: int, length: int, *, rows: int) -> None:
        """Room for this many slots of this length; the first `rows` stay. A new block fits what is asked for now."""
        if slots <= self.slots and length <= self.length:
            return
        kept = self.length if rows else 0
        grown = kept + kept // 4 if length > kept else kept  # by a part of itself, so that copying stays cheap
        self.slots, self.length = up(slots, EVEN), up(max(length, grown), STEP)
        for kind, block in self.blocks.items():
            self.blocks[kind] = block.new_zeros(len(block), self.slots, self.length, *block.shape[3:])
            self.blocks[kind][:, :rows, :kept] = block[:, :rows, :kept]

    def aim(self, first: int, rows: int, position_BQ: Tensor, valid_BQ: Tensor, span: int) -> None:
        """The next forward feeds slots from `first` on; the keys of `valid` tokens are written at their positions."""
        self.span, self.rows = span, slice(first, first + len(position_BQ))
        slot_BQ = torch.arange(first, self.rows.stop, device=self.device)[:, None].expand(position_BQ.shape)
        decoding = position_BQ.shape[1] == 1
        self.new_F: Any = (slice(rows), 0) if decoding else valid_BQ
        self.place_F = (slot_BQ * self.length + position_BQ)[self.new_F]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their places and give the rows' whole history."""
        seen = []
        for side, new in enumerate((key_states, value_states)):
            kind, plane = self.plane[layer_idx, side]
            block = self.blocks[kind][plane]
            block.flatten(0, 1).index_copy_(0, self.place_F, new.transpose(1, 2)[self.new_F])
            seen.append(block[self.rows, : self.span].transpose(1, 2))
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others, as if all at once."""
        for block in self.blocks.values():
            block[:, list(target), :length] = block[:, list(source), :length]

    def view(self, slot: int, length: int) -> list[Tensor]:
        """The first `length` positions of a slot."""
        return [block[:, slot, :length] for block in self.blocks.values()]


class Prompt(NamedTuple):
    """A prompt to compute, and the running row or saved sequence that already covers `known` tokens of it."""

    key: bytes
    ids: Ids
    source: int | Saved | None
    known: int


class SlotRows:
    """Running rows on slots. Implements `Rows`.

    Args:
        running_bytes: about the most memory for keys and values of running rows, unless a single row needs more.
        kept_bytes: the most memory for keys and values of rows that ended.
        tokens: the most tokens of one forward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mask: Mask = plain_mask,
        running_bytes: int = 4 << 30,
        kept_bytes: int = 1 << 30,
        tokens: int = 2048,
    ) -> None:
        self.model, self.mask, self.tokens = model, mask, tokens
        self.slots = Slots(model)
        self.prefixes = Prefixes(kept_bytes)
        self.places = running_bytes // self.slots.place_bytes
        self.computed = 0
        self.length_B: list[int] = []  # tokens whose keys each row holds
        self.id_BL: Ids = np.empty((0, 0), dtype=np.int64)  # those tokens, then -1

    def admit(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """(which prompt each new row holds, [B', V] logits after it); the new rows stand behind the others."""
        wanted: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts):
            wanted.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(number)
        base, todo = len(self.length_B), sorted(wanted)
        self._fit(base + len(prompts), max(map(len, prompts)) + 1)
        keys: list[bytes] = []
        logits: list[Tensor] = []
        while todo:
            now, todo = self._ready(todo)
            rest = {prompt.key: len(prompt.ids) - prompt.known for prompt in now}
            by_key = {prompt.key: prompt for prompt in now}
            for chunk in similar(rest, self.tokens):
                logits.append(self._prefill([by_key[key] for key in chunk]))
                keys += chunk
        again = [(place, number) for place, key in enumerate(keys) for number in wanted[key][1:]]
        self._repeat([base + place for place, _ in again])
        order = [wanted[key][0] for key in keys] + [number for _, number in again]
        return order, torch.cat(logits)[[*range(len(keys)), *(place for place, _ in again)]]

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        start = list(self.length_B)
        self._fit(len(start), max(start) + 1)
        for row, (place, token) in enumerate(zip(start, ids, strict=True)):
            self.id_BL[row, place] = token
            self.length_B[row] += 1
        return self._forward([np.array([token]) for token in ids], start, 0)

    def drop(self, rows: Sequence[int]) -> list[int]:
        """End some rows, remembering what they computed; gives the former place of each row that stays, in order."""
        for row in rows:
            self.prefixes.add(self._ids(row), self.slots.view(row, self.length_B[row]))
        total, stay = len(self.length_B), len(self.length_B) - len(rows)
        order = list(range(stay))
        holes = sorted(row for row in rows if row < stay)
        movers = sorted(set(range(stay, total)) - set(rows))
        if movers:
            self.slots.copy(movers, holes, max(self.length_B[row] for row in movers))
            self.id_BL[holes] = self.id_BL[movers]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.id_BL[stay:total] = -1
        self.length_B = [self.length_B[row] for row in order]
        return order

    def clear(self) -> None:
        """End every row, forget what was computed, free the memory."""
        self.prefixes.clear()
        self.slots.clear()
        self.length_B = []
        self.id_BL = np.empty((0, 0), dtype=np.int64)

    def _ids(self, row: int) -> Ids:
        return self.id_BL[row, : self.length_B[row]]

    def _fit(self, rows: int, length: int) -> None:
        self.slots.fit(rows, length, rows=len(self.length_B))
        if self.id_BL.shape != (self.slots.slots, self.slots.length):
            grown = np.full((self.slots.slots, self.slots.length), -1, dtype=np.int64)
            for row in range(len(self.length_B)):
                grown[row, : self.length_B[row]] = self._ids(row)
            self.id_BL = grown

    def _ready(self, keys: list[bytes]) -> tuple[list[Prompt], list[bytes]]:
        """Of sorted prompts: those to compute now, and those that wait for one of these, to share its prefix."""
        now: list[Prompt] = []
        later: list[bytes] = []
        for key in keys:
            ids = np.frombuffer(key, dtype=np.int64)
            source, known = self._known(ids[:-1])
            if now and common_prefix(now[-1].ids, ids) >= known + SHARED:
                later.append(key)
            else:
                now.append(Prompt(key, ids, source, known))
        return now, later

    def _known(self, ids: Ids) -> tuple[int | Saved | None, int]:
        """(running row or saved sequence that shares most, how many leading tokens it shares)."""
        saved, length = self.prefixes.longest(ids)
        if self.length_B and len(ids) > length:
            same_BL = self.id_BL[: len(self.length_B), : len(ids)] == ids
            shared_B = np.where(same_BL.all(axis=1), len(ids), same_BL.argmin(axis=1))
            if shared_B.max() > length:
                return int(shared_B.argmax()), int(shared_B.max())
        return saved, length

    def _prefill(self, prompts: list[Prompt]) -> Tensor:
        """[B', V] logits after some prompts, in new rows; a prompt longer than one forward may be is alone."""
        first = len(self.length_B)
        for row, prompt in enumerate(prompts, start=first):
            if isinstance(prompt.source, int):
                self.slots.copy([prompt.source], [row], prompt.known)
            elif prompt.source is not None:
                for block, saved in zip(self.slots.view(row, prompt.known), prompt.source.tensors, strict=True):
                    block.copy_(saved[:, : prompt.known])
        rest, start = [prompt.ids[prompt.known :] for prompt in prompts], [prompt.known for prompt in prompts]
        while len(rest[0]) > self.tokens:
            self._forward([rest[0][: self.tokens]], start, first)
            rest, start = [rest[0][self.tokens :]], [start[0] + self.tokens]
        logits_BV = self._forward(rest, start, first)
        for row, prompt in enumerate(prompts, start=first):
            self.id_BL[row, : len(prompt.ids)] = prompt.ids
            self.length_B.append(len(prompt.ids))
        return logits_BV

    def _repeat(self, rows: list[int]) -> None:
        """New rows that are copies of others."""
        for row in dict.fromkeys(rows):
            places = [len(self.length_B) + i for i, other in enumerate(rows) if other == row]
            self.slots.copy([row] * len(places), places, self.length_B[row])
            self.id_BL[places] = self.id_BL[row]
        self.length_B += [self.length_B[row] for row in rows]

    @torch.no_grad()
    def _forward(self, new: Sequence[Ids], start: Sequence[int], first: int) -> Tensor:
        """[B, V] logits after the last new token of each row, whose rows begin at slot `first`.

        Tokens stand at the right end of their rows. Rows of one token are filled up to EVEN rows, longer ones to EVEN
        tokens, so that a row's numbers hardly depend on how many others there are.
        """
        rows, count = len(new), [len(ids) for ids in new]
        self.computed += sum(count)
        width = 1 if max(count) == 1 and first == 0 else up(max(count), EVEN)
        height = up(rows, EVEN) if width == 1 else rows
        input_np = np.zeros((height, width), dtype=np.int64)
        start_np, end_np = np.zeros((height, 1), dtype=np.int64), np.zeros((height, 1), dtype=np.int64)
        for row, ids in enumerate(new):
            input_np[row, width - len(ids) :] = ids
            start_np[row], end_np[row] = start[row], start[row] + len(ids)
        position_np = end_np - width + np.arange(width)
        input_BQ, position_BQ, valid_BQ = (
            torch.from_numpy(x).to(self.slots.device) for x in (input_np, position_np.clip(0), position_np >= start_np)
        )
        span = up(int(end_np.max()), 16)
        self.slots.aim(first, rows, position_BQ, valid_BQ, span)
        distance_BQL = position_BQ[:, :, None] - torch.arange(span, device=self.slots.device)
        logits_BXV: Tensor = self.model(
            input_ids=input_BQ,
            attention_mask=self.mask(distance_BQL >= 0, distance_BQL),
            position_ids=position_BQ,
            use_cache=True,
            logits_to_keep=1 if height % EVEN == 0 else EVEN,
            **{self.slots.keyword: self.slots},
        ).logits
        return logits_BXV[:rows, -1]


def similar(rest: dict[bytes, int], tokens: int) -> list[list[bytes]]:
    """Prompts to compute together: similar numbers of tokens to compute, at most `tokens` with padding."""
    chunks: list[list[bytes]] = []
    for key in sorted(rest, key=lambda key: (rest[key], key)):
        last = chunks[-1] if chunks else []
        if last and rest[key] <= 2 * rest[last[0]] + 8 and (len(last) + 1) * rest[key] <= tokens:
            last.append(key)
        else:
            chunks.append([key])
    return chunks


def cache_keyword(model: nn.Module) -> str:
    """What this model's forward calls its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def up(n: int, unit: int) -> int:
    """The next multiple."""
    return -(-n // unit) * unit
