from __future__ import annotations

import math

import pytest
import torch

from whippletree.tree.head import BLOCK, entropies, token_logps

# several tokens at a place, one twice, none at place 2, not in order; two temperatures
PLACE_N, ID_N = torch.tensor([3, 0, 0, 1, 3, 3]), torch.tensor([1, 2, 4, 0, 5, 1])
TEMPERATURE_P = torch.tensor([1.0, 0.5, 1.0, 2.0])


def _logits(scale=3.0, words=7, dtype=torch.float32):
    return (torch.randn(4, words, generator=torch.Generator().manual_seed(0)) * scale).to(dtype).requires_grad_()


def test_log_probs_and_their_gradient_by_hand():
    # logits 0, ln 3 at temperature 1/2: squares 1 and 9, so p = 0.1, 0.9; d log p_1 / d logits = 2 (0 - 0.1, 1 - 0.9)
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    logp = token_logps(logits, torch.tensor([0.5]), torch.tensor([0]), torch.tensor([1]))
    logp.backward()
    torch.testing.assert_close(logp, torch.tensor([math.log(0.9)]))
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.2, 0.2]]))


def test_an_entropy_and_its_gradient_by_hand():
    # p = 1/2, 1/4, 1/4: H = 1.5 ln 2; dH/dz = -p (ln p + H) = -(1/2)(0.5 ln 2), +(1/4)(0.5 ln 2) twice
    logits = torch.tensor([[math.log(2), 0.0, 0.0]], requires_grad=True)
    entropy = entropies(logits, torch.ones(1))
    entropy.backward()
    torch.testing.assert_close(entropy, torch.tensor([1.5 * math.log(2)]))
    torch.testing.assert_close(logits.grad, math.log(2) * torch.tensor([[-1 / 4, 1 / 8, 1 / 8]]))


@pytest.mark.parametrize("words", [7, BLOCK["cpu"] // 2 - 1])  # one block, and blocks of two places
def test_both_agree_with_torch_whatever_shares_a_place(words):
    ours, theirs = _logits(words=words), _logits(words=words)
    weight_N, weight_P = torch.tensor([1.0, -2, 3, 0.5, 1, 7]), torch.tensor([1.0, 2, -1, 3])
    logp_N, entropy_P = token_logps(ours, TEMPERATURE_P, PLACE_N, ID_N), entropies(ours, TEMPERATURE_P)
    logp_PV = (theirs / TEMPERATURE_P[:, None]).log_softmax(-1)
    torch.testing.assert_close(logp_N, logp_PV[PLACE_N, ID_N])
    torch.testing.assert_close(entropy_P, -(logp_PV.exp() * logp_PV).sum(-1), rtol=1e-4, atol=1e-4)
    ((logp_N * weight_N).sum() + (entropy_P * weight_P).sum()).backward()
    ((logp_PV[PLACE_N, ID_N] * weight_N).sum() - (logp_PV.exp() * logp_PV).sum(-1) @ weight_P).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_gradient_of_a_sure_token_is_rounded_after_the_difference():
    # p = 1 / (1 + e^-9) in bfloat16 is 1, so 1 - p would be 0 or 2^-8; it is 1.2e-4
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    token_logps(logits, torch.ones(1), torch.tensor([0]), torch.tensor([0])).backward()
    sure = 1 / (1 + math.exp(9))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.float(), torch.tensor([[sure, -sure]]), rtol=2**-8, atol=0)


def test_a_word_that_is_ruled_out_has_no_part_in_either():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logp = token_logps(logits, torch.ones(1), torch.tensor([0]), torch.tensor([0]))
    entropy = entropies(logits, torch.ones(1))
    torch.testing.assert_close(torch.stack([logp, entropy]), math.log(2) * torch.tensor([[-1.0], [1.0]]))
    (logp + entropy).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_no_places_give_no_numbers():
    none = torch.empty(0, 5, requires_grad=True)
    at = torch.empty(0, dtype=torch.int64)
    assert len(token_logps(none, torch.empty(0), at, at)) == len(entropies(none, torch.empty(0))) == 0
    token_logps(none, torch.empty(0), at, at).sum().backward()
