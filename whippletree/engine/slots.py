"""Rows of running replies for models with full attention: one block of keys and values, a slot for each row.

Row b of the block holds positions 0, 1, ... of its own sequence from the left, so rows of any length stand together,
a freed slot is filled at once, and an earlier prefix is taken over by copying. What a row may see is a mask.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from whippletree.engine.attention import DecodingKeys
from whippletree.engine.prefixes import Ids, Prefixes, Saved, common_prefix

Mask = Callable[[Tensor, Tensor], Any]  # (seen [B, Q, L] bool, distance [B, Q, L]) -> what the model takes as its mask
SHARED = 16  # prompts that share this much more than is known of them are computed one after the other
STEP = 64  # the block is this much longer at a time, in tokens
EVEN = 8  # products over a multiple of this many rows round alike, however many they are


def plain_mask(seen_BQL: Tensor, distance_BQL: Tensor) -> Tensor:
    """The mask of a model whose layers all attend to everything before."""
    return seen_BQL[:, None]


class Slots(Cache):
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
        self.blocks: dict[Any, Tensor] = {
            (heads, width, dtype): torch.zeros(planes, 0, 0, heads, width, dtype=dtype, device=self.device)
            for (heads, width, dtype), planes in counts.items()
        }
        self.place_bytes = sum(n * heads * width * dtype.itemsize for (heads, width, dtype), n in counts.items())
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
        self.decoding = decoding and self.device.type == "cpu"
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
        keys, values = seen
        fast = self.decoding and keys.dtype == torch.bfloat16
        return keys.as_subclass(DecodingKeys) if fast else keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others, as if all at once."""
        for block in self.blocks.values():
            block[:, list(target), :length] = block[:, list(source), :length]

    def spread(self, source: int, target: slice, length: int) -> None:
        """Copy the first `length` positions of a slot to a run of others."""
        for block in self.blocks.values():
            block[:, target, :length] = block[:, source : source + 1, :length]

    def view(self, slot: int, length: int) -> list[Tensor]:
        """The first `length` positions of a slot."""
        return [block[:, slot, :length] for block in self.blocks.values()]


class SlotRows:
    """Running rows on slots. Implements `Rows`.

    Rows 0, 1, ... run in the slots of the same numbers. A row that ended stays behind them in its slot, for prompts
    that extend it, until another one needs the slot; then it is copied to `prefixes`.

    Args:
        running_bytes: about the most memory for keys and values of running rows, unless a single row needs more.
        kept_bytes: the most memory for copies of rows that ended.
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
        self.running = 0
        self.length_S: Ids = np.zeros(0, dtype=np.int64)  # tokens whose keys each slot holds
        self.id_SL: Ids = np.empty((0, 0), dtype=np.int64)  # those tokens, then -1

    def admit(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """(which prompt each new row holds, [B', V] logits after it); the new rows stand behind the others."""
        wanted: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts):
            wanted.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(number)
        base, todo = self.running, sorted(wanted)
        self._fit(base + len(prompts), max(map(len, prompts)) + 1)
        keys: list[bytes] = []
        logits: list[Tensor] = []
        while todo:
            now, todo = self._ready(todo)
            for chunk in similar(now, self.tokens):
                logits.append(self._prefill([np.frombuffer(key, dtype=np.int64) for key in chunk]))
                keys += chunk
        again = [(place, number) for place, key in enumerate(keys) for number in wanted[key][1:]]
        self._repeat([base + place for place, _ in again])
        order = [wanted[key][0] for key in keys] + [number for _, number in again]
        return order, torch.cat(logits)[[*range(len(keys)), *(place for place, _ in again)]]

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        rows = np.arange(self.running)
        start_B = self.length_S[: self.running].copy()
        self._fit(self.running, int(start_B.max()) + 1)
        self.id_SL[rows, start_B] = ids
        self.length_S[rows] += 1
        return self._forward([np.array([token]) for token in ids], start_B.tolist(), 0)

    def drop(self, rows: Sequence[int]) -> list[int]:
        """End some rows; gives the former place of each row that stays, in order."""
        total, self.running = self.running, self.running - len(rows)
        holes = sorted(row for row in rows if row < self.running)
        movers = sorted(set(range(self.running, total)) - set(rows))
        order = np.arange(total)
        order[holes + movers] = movers + holes
        if movers:
            self.slots.copy(movers + holes, holes + movers, int(self.length_S[:total].max()))
            self.id_SL[:total], self.length_S[:total] = self.id_SL[order], self.length_S[order]
        return [int(row) for row in order[: self.running]]

    def clear(self) -> None:
        """End every row and forget what was computed. The block stays: touching new memory costs more than a step."""
        self.prefixes.clear()
        self.running = 0
        self.length_S[:] = 0
        self.id_SL[:] = -1

    def _fit(self, rows: int, length: int) -> None:
        if rows <= self.slots.slots and length <= self.slots.length:
            return
        self._vacate(range(self.running, self.slots.slots))
        self.slots.fit(rows, length, rows=self.running)
        old_SL, old_S, kept = self.id_SL, self.length_S, slice(self.running)
        self.id_SL = np.full((self.slots.slots, self.slots.length), -1, dtype=np.int64)
        self.length_S = np.zeros(self.slots.slots, dtype=np.int64)
        width = min(old_SL.shape[1], self.slots.length)
        self.id_SL[kept, :width], self.length_S[kept] = old_SL[kept, :width], old_S[kept]

    def _vacate(self, slots: range) -> None:
        """Copy the ended rows in these slots to the store; they stay readable until something is written."""
        for slot in slots:
            if length := int(self.length_S[slot]):
                self.prefixes.add(self.id_SL[slot, :length], self.slots.view(slot, length))

    def _hold(self, slots: int | slice, ids: Ids) -> None:
        self.id_SL[slots, : len(ids)], self.id_SL[slots, len(ids) :] = ids, -1
        self.length_S[slots] = len(ids)

    def _ready(self, keys: list[bytes]) -> tuple[dict[bytes, int], list[bytes]]:
        """Of sorted prompts: those to compute now with the number of tokens to compute, and those to compute after one
        of these, because they share its prefix."""
        now: dict[bytes, int] = {}
        later: list[bytes] = []
        last: Ids = np.empty(0, dtype=np.int64)
        for key in keys:
            ids = np.frombuffer(key, dtype=np.int64)
            known = self._known(ids)[1]
            if common_prefix(last, ids) >= known + SHARED:
                later.append(key)
            else:
                now[key], last = len(ids) - known, ids
        return now, later

    def _known(self, prompt: Ids) -> tuple[int | Saved | None, int]:
        """(slot or copy that shares most, how many leading tokens). The last token is always left to compute."""
        ids = prompt[:-1]
        saved, length = self.prefixes.longest(ids)
        if len(ids) > length and len(self.id_SL):
            same_SL = self.id_SL[:, : len(ids)] == ids
            shared_S = np.where(same_SL.all(axis=1), len(ids), same_SL.argmin(axis=1))
            if shared_S.max() > length:
                return int(shared_S.argmax()), int(shared_S.max())
        return saved, length

    def _prefill(self, prompts: list[Ids]) -> Tensor:
        """[B', V] logits after some prompts, in new rows; a prompt longer than one forward may be is alone."""
        first = self.running
        self._vacate(range(first, first + len(prompts)))
        found = [self._known(ids) for ids in prompts]
        start = [known for _, known in found]
        beside = [(source, first + i) for i, (source, _) in enumerate(found) if isinstance(source, int)]
        if beside:  # at once, since a slot may be both read and written
            self.slots.copy([source for source, _ in beside], [slot for _, slot in beside], max(start))
        for slot, (source, known) in enumerate(found, start=first):
            if isinstance(source, Saved):
                for block, saved in zip(self.slots.view(slot, known), source.tensors, strict=True):
                    block.copy_(saved[:, :known])
        rest = [ids[known:] for ids, known in zip(prompts, start, strict=True)]
        while len(rest[0]) > self.tokens:
            self._forward([rest[0][: self.tokens]], start, first)
            rest, start = [rest[0][self.tokens :]], [start[0] + self.tokens]
        logits_BV = self._forward(rest, start, first)
        for slot, ids in enumerate(prompts, start=first):
            self._hold(slot, ids)
        self.running += len(prompts)
        return logits_BV

    def _repeat(self, rows: list[int]) -> None:
        """New rows that are copies of others, equal ones side by side."""
        self._vacate(range(self.running, self.running + len(rows)))
        for row, count in Counter(rows).items():
            slots, length = slice(self.running, self.running + count), int(self.length_S[row])
            self.slots.spread(row, slots, length)
            self._hold(slots, self.id_SL[row, :length])
            self.running += count

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
        # padding stands at position 0 or later, which every model has, and nothing looks at what comes of it
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


def cache_keyword(model: Any) -> str:
    """What this model's forward calls its cache."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside a peft wrapper
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"


def up(n: int, unit: int) -> int:
    """The next multiple."""
    return -(-n // unit) * unit
