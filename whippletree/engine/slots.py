"""Rows of running replies for models with full attention: one block of keys and values, a slot for each row.

Row b of the block holds positions 0, 1, ... of its own sequence from the left, so rows of any length stand together,
a freed slot is filled at once, and an earlier prefix is taken over by copying. What a row may see is a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from whippletree.engine.prefixes import Ids, Prefixes, common_prefix

Mask = Callable[[Tensor, Tensor], Any]  # (seen [B, Q, L] bool, distance [B, Q, L]) -> what the model takes as its mask
SHARED = 16  # a prefix that several new prompts have in common is computed alone first when at least this long
STEP = 64  # slots are this much longer at a time


def plain_mask(seen_BQL: Tensor, distance_BQL: Tensor) -> Tensor:
    """The mask of a model whose layers all attend to everything before."""
    return seen_BQL[:, None]


class Slots(Cache):
    """Keys and values of every layer, by slot. Layers of equal shape share one tensor [slots, planes, H, L, D]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(layers=[])
        self.keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        probe = DynamicCache()
        device = next(model.parameters()).device
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=True, **{self.keyword: probe})
        self.plane: dict[tuple[int, int], tuple[Any, int]] = {}
        counts: dict[Any, int] = {}
        self.blocks: dict[Any, Tensor] = {}
        for number, layer in enumerate(probe.layers):
            for side, tensor in enumerate((layer.keys, layer.values)):
                kind = (tensor.shape[1], tensor.shape[3], tensor.dtype)
                self.plane[number, side] = (kind, counts.get(kind, 0))
                counts[kind] = counts.get(kind, 0) + 1
                self.blocks[kind] = tensor.new_zeros(0, 0, tensor.shape[1], 0, tensor.shape[3])
        for kind, count in counts.items():
            self.blocks[kind] = self.blocks[kind].new_zeros(0, count, kind[0], 0, kind[1])
        self.rows = slice(0, 0)
        self.row_F = self.position_F = self.valid_F = torch.zeros(0, dtype=torch.int64)
        self.span = 0

    def fit(self, slots: int, length: int) -> None:
        """Room for this many slots of this length; what is there stays."""
        for kind, block in self.blocks.items():
            have_slots, planes, heads, have_length, width = block.shape
            if slots > have_slots or length > have_length:
                grown = block.new_zeros(
                    max(slots, have_slots), planes, heads, max(-(-length // STEP) * STEP, have_length), width
                )
                grown[:have_slots, :, :, :have_length] = block
                self.blocks[kind] = grown

    def aim(self, rows: slice, start: Sequence[int], count: Sequence[int]) -> None:
        """The next forward feeds `count[i]` tokens of row i of `rows`, at positions from `start[i]`."""
        self.rows = rows
        width = max(count)
        offset_BQ = torch.arange(width).expand(len(count), width)
        valid_BQ = offset_BQ < torch.tensor(count)[:, None]
        position_BQ = offset_BQ + torch.tensor(start)[:, None]
        row_BQ = torch.arange(rows.start, rows.stop)[:, None].expand(-1, width)
        self.valid_F, self.row_F, self.position_F = valid_BQ, row_BQ[valid_BQ], position_BQ[valid_BQ]
        self.span = -(-(max(s + c for s, c in zip(start, count, strict=True))) // 16) * 16
        self.fit(0, self.span)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their places and give the rows' whole history."""
        seen = []
        for side, new in enumerate((key_states, value_states)):
            kind, plane = self.plane[layer_idx, side]
            block = self.blocks[kind][:, plane]
            if new.shape[2] == 1:
                block[self.row_F, :, self.position_F] = new[:, :, 0]
            else:
                block[self.row_F, :, self.position_F] = new.transpose(1, 2)[self.valid_F]
            seen.append(block[self.rows, :, : self.span])
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    def copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some slots to others."""
        for block in self.blocks.values():
            block[list(target), :, :, :length] = block[list(source), :, :, :length]

    def take(self, slot: int, length: int) -> list[Tensor]:
        """A copy of the first `length` positions of a slot."""
        return [block[slot, :, :, :length].clone() for block in self.blocks.values()]

    def put(self, slot: int, saved: Sequence[Tensor], length: int) -> None:
        """Write the first `length` positions of what `take` gave into a slot."""
        for block, tensor in zip(self.blocks.values(), saved, strict=True):
            block[slot, :, :, :length] = tensor[:, :, :length]


class SlotRows:
    """Running rows on slots. Row order is the caller's: new rows stand last, `keep` says which stay and in what order."""

    def __init__(self, model: nn.Module, *, mask: Mask = plain_mask, cache_bytes: int = 1 << 30, tokens: int = 4096) -> None:
        self.model, self.mask, self.tokens = model, mask, tokens
        self.slots = Slots(model)
        self.prefixes = Prefixes(cache_bytes)
        self.ids: list[list[int]] = []  # the tokens whose keys each row holds
        self.computed = 0  # tokens that went through the model, for the metrics

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """[B', V] logits after each prompt; its rows are added at the end, in this order."""
        base, wanted = len(self.ids), [tuple(prompt) for prompt in prompts]
        unique = sorted(set(wanted))
        # distinct prompts are computed in slots past the end, then copied to every row that asked for them
        scratch = base + len(wanted)
        self.slots.fit(scratch + len(unique), max(map(len, wanted)) + 1)
        slot, logits = self._prefill(unique, scratch)
        for prompt in unique:
            rows = [base + i for i, other in enumerate(wanted) if other == prompt]
            self.slots.copy([slot[prompt]] * len(rows), rows, len(prompt))
        self.ids += [list(prompt) for prompt in wanted]
        return torch.stack([logits[prompt] for prompt in wanted])

    def step(self, ids: Sequence[int]) -> Tensor:
        """[B, V] logits after feeding one more token to every row."""
        start = [len(row) for row in self.ids]
        for row, token in zip(self.ids, ids, strict=True):
            row.append(token)
        return self._forward([[token] for token in ids], start, slice(0, len(start)))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, remembering what they computed for prompts that extend it."""
        for row in sorted(set(range(len(self.ids))) - set(rows)):
            self.prefixes.add(self.ids[row], self.slots.take(row, len(self.ids[row])))
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if moved:
            source, target = zip(*moved, strict=True)
            self.slots.copy(source, target, max(len(self.ids[row]) for row in source))
        self.ids = [self.ids[row] for row in rows]

    def forget(self) -> None:
        """The weights changed: nothing computed before may be used again."""
        self.prefixes.clear()

    def _prefill(self, prompts: list[Ids], slot: int) -> tuple[dict[Ids, int], dict[Ids, Tensor]]:
        """Compute sorted distinct prompts in slots from `slot` on: which slot each got, and its [V] logits."""
        slots: dict[Ids, int] = {}
        logits: dict[Ids, Tensor] = {}
        leaders = self._leaders(prompts)
        for phase in (leaders, [prompt for prompt in prompts if prompt not in leaders]):
            known = {prompt: self._known(prompt) for prompt in phase}
            for chunk in self._chunks({prompt: len(prompt) - length for prompt, (_, length) in known.items()}):
                rows = slice(slot, slot + len(chunk))
                for prompt in chunk:
                    self._fetch(*known[prompt], slot)
                    slots[prompt], slot = slot, slot + 1
                starts = [known[prompt][1] for prompt in chunk]
                rest = [list(prompt[start:]) for prompt, start in zip(chunk, starts, strict=True)]
                logits |= dict(zip(chunk, self._forward(rest, starts, rows), strict=True))
            for prompt in leaders if phase is leaders else []:
                self.prefixes.add(prompt, self.slots.take(slots[prompt], len(prompt)))
        return slots, logits

    def _leaders(self, prompts: list[Ids]) -> list[Ids]:
        """One prompt of each run of neighbours that share a prefix nobody has computed yet."""
        leaders: list[Ids] = []
        for before, after in zip(prompts, prompts[1:], strict=False):
            led = bool(leaders) and common_prefix(leaders[-1], after) >= SHARED
            if not led and common_prefix(before, after) >= self._known(after)[1] + SHARED:
                leaders.append(before)
        return leaders

    def _known(self, prompt: Ids) -> tuple[int | list[Tensor] | None, int]:
        """(running slot or saved tensors, how many leading tokens they cover); the last token is always left to compute."""
        source, length = self.prefixes.longest(prompt[:-1])
        best: int | list[Tensor] | None = source
        for row, ids in enumerate(self.ids):
            if (common := common_prefix(ids, prompt[:-1])) > length:
                best, length = row, common
        return best, length

    def _fetch(self, source: int | list[Tensor] | None, length: int, slot: int) -> None:
        if isinstance(source, int):
            self.slots.copy([source], [slot], length)
        elif source is not None:
            self.slots.put(slot, source, length)

    def _chunks(self, rest: dict[Ids, int]) -> list[list[Ids]]:
        """Prompts to compute together: similar lengths of what is left, at most `tokens` places with padding."""
        chunks: list[list[Ids]] = []
        for prompt in sorted(rest, key=lambda prompt: (rest[prompt], prompt)):
            last = chunks[-1] if chunks else []
            if last and rest[prompt] <= 2 * rest[last[0]] + 8 and (len(last) + 1) * rest[prompt] <= self.tokens:
                last.append(prompt)
            else:
                chunks.append([prompt])
        return chunks

    @torch.no_grad()
    def _forward(self, new: list[list[int]], start: list[int], rows: slice) -> Tensor:
        """[B, V] logits after the last new token of each row."""
        count = [len(ids) for ids in new]
        width = max(count)
        self.computed += sum(count)
        self.slots.aim(rows, start, count)
        device = next(self.model.parameters()).device
        input_BQ = torch.tensor([ids + [0] * (width - len(ids)) for ids in new], device=device)
        position_BQ = torch.tensor(start, device=device)[:, None] + torch.arange(width, device=device)
        distance_BQL = position_BQ[:, :, None] - torch.arange(self.slots.span, device=device)
        last = sorted({n - 1 for n in count})
        logits_BXV = self.model(
            input_ids=input_BQ,
            attention_mask=self.mask(distance_BQL >= 0, distance_BQL),
            position_ids=position_BQ,
            use_cache=True,
            logits_to_keep=torch.tensor(last, device=device),
            **{self.slots.keyword: self.slots},
        ).logits
        return logits_BXV[torch.arange(len(new)), [last.index(n - 1) for n in count]]
