"""Slots against a plain forward of each whole sequence, for every family that takes masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whippletree.build import engine_mask
from whippletree.engine.slots import SlotRows, Slots, similar
from whippletree.models.tiny import VOCABULARY, tiny_model
from whippletree.tree.families import decide

MASKED = ("llama", "qwen3", "gemma3", "mistral")  # gemma3 and mistral see 6 tokens back in some or all layers


def rows_of(family: str = "llama", **settings: Any) -> SlotRows:
    model = tiny_model(family, layers=3)
    mask = engine_mask(decide(model.config), torch.float32)
    assert mask is not None
    return SlotRows(model, mask=mask, **settings)


def ids_of(length: int, *, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def plain(model: Any, ids: Sequence[int]) -> Tensor:
    """[V] logits after these ids, computed alone and whole."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0, -1]


class Checked:
    """`SlotRows` with the sequences that its rows should hold; every answer is compared with the plain forward."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.sequences: list[list[int]] = []

    def admit(self, *prompts: Sequence[int]) -> int:
        """Tokens that went through the model for these prompts."""
        before = self.rows.computed
        order, logits_BV = self.rows.admit(prompts)
        assert sorted(order) == list(range(len(prompts)))
        new = [list(prompts[number]) for number in order]
        self._compare(new, logits_BV)
        self.sequences += new
        return int(self.rows.computed - before)

    def step(self, ids: Sequence[int]) -> None:
        logits_BV = self.rows.step(ids)
        self.sequences = [[*row, token] for row, token in zip(self.sequences, ids, strict=True)]
        self._compare(self.sequences, logits_BV)

    def drop(self, *rows: int) -> None:
        order = self.rows.drop(rows)
        assert sorted([*order, *rows]) == list(range(len(self.sequences)))
        self.sequences = [self.sequences[row] for row in order]

    def _compare(self, sequences: list[list[int]], logits_BV: Tensor) -> None:
        assert len(logits_BV) == len(sequences)
        for ids, logits_V in zip(sequences, logits_BV, strict=True):
            torch.testing.assert_close(logits_V, plain(self.rows.model, ids), atol=1e-5, rtol=1e-5)


def random_life(rows: Any, *, seed: int, moves: int = 14) -> None:
    """Rows come (new, shared, extended and shortened prompts), are fed, and go, in random order."""
    choose = random.Random(seed)
    checked = Checked(rows)
    old = [ids_of(30, seed=seed)]
    for move in range(moves):
        kind = choose.choice(("admit", "step", "step", "drop")) if checked.sequences else "admit"
        if kind == "admit":
            base = choose.choice(old + checked.sequences)
            new = [base[: choose.randint(1, len(base))] + ids_of(choose.choice((0, 1, 19)), seed=move) for _ in "12"]
            checked.admit(*choose.sample([*new, new[0], ids_of(choose.choice((1, 7, 70)), seed=move)], k=3))
        elif kind == "step":
            checked.step([choose.randrange(VOCABULARY) for _ in checked.sequences])
        else:
            gone = choose.sample(range(len(checked.sequences)), k=choose.randint(1, len(checked.sequences)))
            old += [checked.sequences[row] for row in gone]
            checked.drop(*gone)


@pytest.mark.parametrize("family", MASKED)
@pytest.mark.parametrize("seed", range(3))
def test_rows_give_the_logits_of_whole_sequences_whatever_comes_and_goes(family: str, seed: int):
    random_life(rows_of(family), seed=seed)


def test_a_prompt_that_many_ask_for_is_computed_once():
    checked = Checked(rows_of())
    assert checked.admit(*[ids_of(40)] * 5, ids_of(9, seed=1)) == 40 + 9
    checked.step([1, 2, 3, 4, 5, 6])


def test_a_prefix_that_new_prompts_share_is_computed_once():
    # two system prompts of 50 tokens behind one opening of 20, two questions of 5 tokens under each:
    # 20 + 50 + 5, then the other question (5) and the other system prompt (50 + 5), then its other question (5)
    checked = Checked(rows_of())
    prompts = [ids_of(20) + [system] * 50 + [question] * 5 for system in (1, 2) for question in (3, 4)]
    assert checked.admit(*prompts) == 75 + 5 + 55 + 5


def test_a_prompt_that_is_a_prefix_of_another_is_computed_within_it():
    checked = Checked(rows_of())
    assert checked.admit(ids_of(60), ids_of(60)[:40]) == 60


def test_a_prompt_takes_over_what_a_running_row_computed():
    checked = Checked(rows_of())
    checked.admit(ids_of(40))
    checked.step([7])
    # 40 prompt tokens and the fed one are there; the next prompt is those 41 and 3 more
    assert checked.admit([*ids_of(40), 7, 8, 9, 10]) == 3
    assert checked.admit(ids_of(40)[:30]) == 1  # the last token is always computed: its logits are wanted


def test_the_next_turn_computes_only_its_suffix():
    checked = Checked(rows_of())
    checked.admit(ids_of(40))
    for token in (5, 6, 7):
        checked.step([token])
    checked.drop(0)  # the reply was 5 6 7 8: its last token was sampled and never fed
    assert checked.admit([*ids_of(40), 5, 6, 7, 8, *ids_of(9, seed=1)]) == 1 + 9


def test_an_ended_row_is_still_known_when_its_slot_is_taken():
    a, b, c = ([seed] * 40 for seed in (1, 2, 3))
    checked = Checked(rows_of())
    checked.admit(a, b)
    checked.drop(0, 1)
    assert checked.admit(c, c) == 40  # in the slot of a, and copied into that of b
    assert checked.admit(a, b) == 2


def test_an_ended_row_is_still_known_when_the_block_grows():
    checked = Checked(rows_of())
    checked.admit([1] * 40)
    checked.drop(0)
    assert checked.admit([2] * 300) == 300
    assert checked.admit([1] * 40) == 1


def test_a_long_prompt_passes_in_parts():
    rows = rows_of("gemma3", tokens=32)
    checked = Checked(rows)
    assert checked.admit(ids_of(100), ids_of(20, seed=1)) == 120
    checked.step([3, 4])


def test_rows_of_very_different_lengths_stand_together():
    checked = Checked(rows_of("qwen3"))
    checked.admit([5], ids_of(200), ids_of(17, seed=2))
    for token in (1, 2):
        checked.step([token] * 3)


def test_after_clear_nothing_is_known():
    rows = rows_of()
    checked = Checked(rows)
    checked.admit(ids_of(40))
    checked.drop(0)
    rows.clear()
    assert rows.prefixes.bytes == 0
    assert checked.admit(ids_of(40)) == 40


def test_after_clear_other_weights_count():
    rows = rows_of()
    checked = Checked(rows)
    checked.admit(ids_of(40))
    rows.clear()
    with torch.no_grad():
        for weight in rows.model.parameters():
            weight.add_(0.01)
    checked.sequences = []
    checked.admit(ids_of(40))


def test_kept_memory_stays_within_its_budget():
    rows = rows_of(kept_bytes=100 * Slots(tiny_model(layers=3)).place_bytes)
    checked = Checked(rows)
    for seed in range(5):
        checked.admit(ids_of(40, seed=seed))
        checked.drop(0)
        assert rows.prefixes.bytes <= 100 * rows.slots.place_bytes
    assert checked.admit(ids_of(40, seed=4)) == 1  # the latest is still there
    assert checked.admit(ids_of(40, seed=0)) == 40  # the oldest is not


def test_the_block_never_holds_more_slots_than_one_moment_needed_by_the_length_of_another():
    rows = rows_of()
    checked = Checked(rows)
    checked.admit(*[ids_of(10)] * 40)
    checked.drop(*range(1, 40))
    checked.admit(ids_of(500, seed=1))
    assert rows.slots.slots == 8
    assert rows.slots.length == 512  # 501 rounded up to 64


def test_copies_between_slots_that_overlap_happen_as_if_at_once():
    slots = rows_of().slots
    slots.fit(3, 4, rows=0)
    for block in slots.blocks.values():
        block[:] = torch.arange(8.0)[None, :, None, None, None]
    slots.copy([0, 1], [1, 2], 4)
    for block in slots.blocks.values():
        assert block[0, :3, 0, 0, 0].tolist() == [0, 0, 1]
    assert slots.view(2, 3)[0].shape[1] == 3


def test_similar_lengths_are_computed_together():
    # 10 and 12 are alike; 40 is more than 2 * 10 + 8; 40 and 40 would make 80 tokens
    rest = {b"a": 40, b"b": 10, b"c": 12, b"d": 40}
    assert similar(rest, 64) == [[b"b", b"c"], [b"a"], [b"d"]]
    assert similar(rest, 80) == [[b"b", b"c"], [b"a", b"d"]]


def test_what_is_known_of_many_long_prompts_is_found_without_a_model():
    rows = rows_of(kept_bytes=1 << 40)
    base = np.random.default_rng(0).integers(0, 1000, 2000)
    for tail in range(70):  # more than are looked at one by one
        rows.prefixes.add(np.append(base, [tail] * 20), [torch.zeros(1)])
    saved, length = rows._known(np.append(base, [60] * 31))
    assert not isinstance(saved, int | None)
    assert length == 2020
    assert saved.ids[-1] == 60
