from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from whippletree.evidence import ServedScorer, forward_kl, jensen_shannon, outcomes, outcomes_of, reverse_kl
from whippletree.gateway.server import serve
from whippletree.models.tiny import VOCABULARY, tiny_model
from whippletree.tree.packed import Layout
from whippletree.tree.scorer import PackedScorer
from whippletree.types import Batch, Reader, Rollout, Scored, Task, Turn

INF, NAN = math.inf, math.nan

# ---- how far apart ----------------------------------------------------------------------------------------------


def log(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def test_divergences_of_two_outcomes_by_hand() -> None:
    student, teacher = log([0.5, 0.5]), log([0.8, 0.2])
    # .8 ln(.8/.5) + .2 ln(.2/.5) = .376003 - .183258; .5 ln(.5/.8) + .5 ln(.5/.2) = -.235002 + .458145
    assert forward_kl(student, teacher).item() == pytest.approx(0.192745, abs=1e-6)
    assert reverse_kl(student, teacher).item() == pytest.approx(0.223144, abs=1e-6)
    # M = (.65, .35): half of .5 ln(.5/.65) + .5 ln(.5/.35) = .047155, and of .8 ln(.8/.65) + .2 ln(.2/.35) = .054189
    assert jensen_shannon(student, teacher).item() == pytest.approx(0.050672, abs=1e-6)


def test_the_tail_counts_as_one_outcome() -> None:
    student, teacher = log([0.6, 0.3, 0.07, 0.03]), log([0.2, 0.5, 0.2, 0.1])
    # .6 ln 3 + .3 ln .6 + .07 ln .35 + .03 ln .3 = .659167 - .153248 - .073488 - .036119
    assert reverse_kl(student, teacher).item() == pytest.approx(0.396313, abs=2e-6)
    # the last two together: .1 ln(.1/.3) = -.109861 in place of -.109607
    assert reverse_kl(log([0.6, 0.3, 0.1]), log([0.2, 0.5, 0.3])).item() == pytest.approx(0.396058, abs=2e-6)


def test_the_weight_is_the_share_of_the_teacher() -> None:
    student, teacher = log([1.0, 0.0]), log([0.0, 1.0])
    # they share nothing: M = (.75, .25), .75 ln(1/.75) + .25 ln(1/.25) = .215762 + .346574, the entropy of the weight
    assert jensen_shannon(student, teacher, weight=0.25).item() == pytest.approx(0.562335, abs=1e-6)
    for weight in (0.0, 1.0, NAN):
        with pytest.raises(ValueError, match="between 0 and 1"):
            jensen_shannon(student, teacher, weight=weight)


def test_what_only_one_holds_possible_is_infinitely_far_and_what_neither_does_counts_nothing() -> None:
    half, sure = log([0.5, 0.5, 0.0]), log([1.0, 0.0, 0.0])
    assert reverse_kl(half, sure).item() == INF
    assert reverse_kl(sure, half).item() == pytest.approx(math.log(2))
    assert jensen_shannon(half, sure).item() < math.log(2)


DIVERGENCES: list[Callable[..., Tensor]] = [forward_kl, reverse_kl, jensen_shannon]
rows = st.lists(st.floats(-8, 8), min_size=6, max_size=6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(student=rows, teacher=rows, kept=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_a_divergence_is_never_negative_and_a_tail_never_adds_to_it(
    divergence: Callable[..., Tensor], student: list[float], teacher: list[float], kept: int
) -> None:
    p, q = (torch.tensor([x], dtype=torch.float64).log_softmax(-1) for x in (student, teacher))

    def coarse(logp: Tensor) -> Tensor:
        return torch.cat([logp[:, :kept], logp[:, kept:].logsumexp(1, keepdim=True)], dim=1)

    whole, part = divergence(p, q).item(), divergence(coarse(p), coarse(q)).item()
    assert -1e-12 <= part <= whole + 1e-12
    if kept == 6:  # nothing is left for the tail
        assert part == pytest.approx(whole, abs=1e-12)
    assert divergence(p, p).item() == pytest.approx(0.0, abs=1e-12)


def test_missing_is_nan_and_moves_nothing_else() -> None:
    for divergence in DIVERGENCES:
        student = torch.zeros(3, 2, requires_grad=True)
        teacher = log([0.8, 0.2], [NAN, NAN], [0.5, 0.5])
        found = divergence(student.log_softmax(-1), teacher)
        assert found.isnan().tolist() == [False, True, False]
        torch.where(found.isnan(), 0.0, found).sum().backward()
        assert student.grad is not None
        assert student.grad.isfinite().all()
        assert student.grad[0].abs().sum() > 0
        assert student.grad[1:].abs().max() < 1e-7  # missing, and equal


def test_the_gradients_by_hand() -> None:
    teacher = log([0.8, 0.2])

    def gradient(divergence: Callable[..., Tensor]) -> list[float]:
        logits = torch.zeros(1, 2, requires_grad=True)
        divergence(logits.log_softmax(-1), teacher).sum().backward()
        assert logits.grad is not None
        return logits.grad[0].tolist()

    assert gradient(forward_kl) == pytest.approx([-0.3, 0.3])  # p - q
    # p (ln(p / q) - KL): .5 (ln .625 - .223144) = -.5 ln 2
    assert gradient(reverse_kl) == pytest.approx([-0.346574, 0.346574], abs=1e-6)
    # (1 - w) p (ln(p / M) - KL(p || M)), w = .5: .25 (ln(.5/.65) - .047155) = -.077380
    assert gradient(jensen_shannon) == pytest.approx([-0.077380, 0.077380], abs=1e-6)


# ---- a student's outcomes ---------------------------------------------------------------------------------------


def batch(**extra: Tensor) -> Batch:
    turn = Turn("", (1,), (2, 0), (-1.0, -1.0), 0, "stop")
    return Batch.of([Rollout("a", Task("t"), "g", (turn,), {"reward": 1.0})]).with_extra(**extra)


LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0], [1.0, 1.0, -3.0, 0.25]])


def test_a_student_is_read_at_the_teachers_ids() -> None:
    found = batch(
        top_id_t_NM=torch.tensor([[3, 1], [0, 2]]),
        top_logp_t_NM=log([0.5, 0.25], [0.125, 0.5]),
        log_tail_t_N=torch.tensor([0.25, 0.375]).log(),
    )
    torch.testing.assert_close(outcomes(found, "t").exp(), torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]))
    p = LOGITS.softmax(-1)
    # beside ids 3 and 1 stand 0 and 2; beside 0 and 2 stand 1 and 3
    expected = torch.stack(
        [torch.stack([p[0, 3], p[0, 1], p[0, 0] + p[0, 2]]), torch.stack([p[1, 0], p[1, 2], p[1, 1] + p[1, 3]])]
    )
    torch.testing.assert_close(outcomes_of(LOGITS, found, "t").exp(), expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_gradient_through_a_tail_is_that_of_finite_differences(divergence: Callable[..., Tensor]) -> None:
    found = batch(
        top_id_t_NM=torch.tensor([[3, 1], [0, 2]]),
        top_logp_t_NM=log([0.5, 0.25], [0.125, 0.5]).double(),
        log_tail_t_N=torch.tensor([0.25, 0.375]).log().double(),
    )
    logits = LOGITS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: divergence(outcomes_of(z, found, "t"), outcomes(found, "t")), logits)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_all_ids_with_an_empty_tail_are_the_full_distribution(divergence: Callable[..., Tensor]) -> None:
    logp_NV = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]).log()
    ids = torch.tensor([[2, 0, 1, 3], [0, 1, 2, 3]])
    tail = torch.full((2,), -INF)
    top = batch(top_id_t_NM=ids, top_logp_t_NM=logp_NV.gather(1, ids), log_tail_t_N=tail)
    full = batch(logp_t_NV=logp_NV)
    losses, gradients = [], []
    for found in (top, full):
        logits = LOGITS.clone().requires_grad_()
        losses.append(divergence(outcomes_of(logits, found, "t"), outcomes(found, "t")))
        losses[-1].sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_distribution_that_no_evidence_found_is_refused() -> None:
    with pytest.raises(ValueError, match="reads the column 'top_logp_t_NM'"):
        outcomes(batch(), "t")


# ---- behind a server --------------------------------------------------------------------------------------------


@dataclass
class Served:
    """The completions of a vLLM server, as far as they give log-probs of a prompt. It fails as it is told to."""

    model: Any = field(default_factory=tiny_model)
    longest: int = 64
    busy: int = 0  # how many requests are turned away before one is taken
    fails: tuple[int, ...] = ()  # a request with this token fails
    change: Callable[[Any], Any] = lambda answer: answer
    asked: list[Any] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers = dict(request.headers)
        ids, most = body["prompt"], body["prompt_logprobs"]
        if body["model"] != "teacher":
            return JSONResponse({"error": {"message": "The model `x` does not exist."}}, 404)
        if len(ids) + body["max_tokens"] > self.longest:
            return JSONResponse({"error": {"message": "This model's maximum context length is 64 tokens."}}, 400)
        if self.busy or set(ids) & set(self.fails):
            self.busy -= bool(self.busy)
            return JSONResponse({"error": {"message": "overloaded"}}, 503)
        with torch.no_grad():
            logp_TV = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # at temperature 1, always
        places: list[Any] = [None]
        for token, logp_V in zip(ids[1:], logp_TV, strict=False):
            rank_V = logp_V.argsort(descending=True).argsort() + 1
            chosen = dict.fromkeys([token, *logp_V.topk(min(most, VOCABULARY)).indices.tolist()])
            said = lambda i, p=logp_V, r=rank_V: {"logprob": max(p[i].item(), -9999.0), "rank": r[i].item()}  # noqa: E731
            places.append({str(i): {**said(i), "decoded_token": chr(i)} for i in chosen})
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": places}
        return JSONResponse(self.change({"object": "text_completion", "choices": [choice]}))


@asynccontextmanager
async def serving(server: Served, **options: Any) -> AsyncIterator[ServedScorer]:
    app = Starlette(routes=[Route("/v1/completions", server.completions, methods=["POST"])])
    async with serve(app) as url:
        yield ServedScorer(f"{url}/v1", **{"model": "teacher", "wait": 0.0, **options})


# a turn that goes on from the first, one after another prompt, an empty reply
TURNS = [
    ((10, 11, 12), (13, 14), 1.0),
    ((10, 11, 12, 13, 14, 20), (21, 22, 23), 1.0),
    ((10, 11), (15,), 0.0),
    ((10, 11), (), 1.0),
]
NAMES = ("logp_N", "id_NM", "logp_NM", "tail_N")


def same(a: Scored | None, b: Scored | None) -> None:
    assert a
    assert b
    for name in NAMES:
        assert getattr(a, name).dtype == getattr(b, name).dtype
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["sampled", 1, 5])
async def test_a_server_gives_what_the_same_model_gives_here(kind: Any) -> None:
    server = Served()
    here = await PackedScorer(server.model, Layout("one"), temperature=1.0, token_budget=64).score(TURNS, kind)
    async with serving(server) as scorer:
        assert isinstance(scorer, Reader)
        for ours, theirs in zip(here, await scorer.score(TURNS, kind), strict=True):
            same(ours, theirs)
    # the first turn stands in the second: two requests for three replies
    assert sorted(body["prompt"] for body in server.asked) == [[10, 11, 12, 13, 14, 20, 21, 22, 23], [10, 11, 15]]
    assert {body["prompt_logprobs"] for body in server.asked} == {0 if kind == "sampled" else kind}
    assert dict(scorer.counts) == {"requests": 2, "turns": 4, "missing": 0}


async def test_more_than_the_vocabulary_is_all_of_it_with_nothing_left() -> None:
    async with serving(Served()) as scorer:
        found = (await scorer.score(TURNS, VOCABULARY + 5))[0]
    assert found
    assert found.logp_NM.shape == (2, VOCABULARY)
    assert found.tail_N.tolist() == [-INF, -INF]
    torch.testing.assert_close(found.logp_NM.exp().sum(1), torch.ones(2))


async def test_a_probability_of_0_is_minus_infinity() -> None:
    def never(answer: Any) -> Any:
        answer["choices"][0]["prompt_logprobs"][3] = {"13": {"logprob": -9999.0}, "5": {"logprob": 0.0}}
        return answer

    async with serving(Served(change=never)) as scorer:
        found = (await scorer.score([((10, 11, 12), (13,), 1.0)], 1))[0]
    assert found
    assert found.logp_N.tolist() == [-INF]
    assert (found.id_NM.tolist(), found.logp_NM.tolist()) == ([[5]], [[0.0]])
    assert math.isfinite(found.tail_N.item())  # float32 cannot say that nothing is left


async def test_a_turn_that_fails_is_missing_and_the_others_are_not() -> None:
    long = (tuple(range(5, 70)), (7,), 1.0)
    async with serving(Served(fails=(15,)), attempts=2) as scorer:
        found = await scorer.score([*TURNS, long])
        assert [scored is None for scored in found] == [False, False, True, False, True]
        assert scorer.counts["missing"] == 2
        assert "503" in scorer.reason or "maximum context length" in scorer.reason
        logps = await scorer.logps([turn[:2] for turn in TURNS])
    assert [logp.isnan().tolist() for logp in logps] == [[False] * 2, [False] * 3, [True], []]


async def test_a_busy_server_is_asked_again() -> None:
    server = Served(busy=2)
    async with serving(server, at_once=1, key="secret") as scorer:
        assert None not in await scorer.score(TURNS)
    assert len(server.asked) == 4
    assert server.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(scorer)


async def test_a_server_that_answers_nothing_ends_the_step_with_its_reason() -> None:
    async with serving(Served(), model="x") as scorer:
        with pytest.raises(ConnectionError, match=r"none of 2 requests for log-probs: 404.*does not exist"):
            await scorer.score(TURNS)
        assert scorer.counts["requests"] == 2  # what is refused for good is not asked again
    gone = ServedScorer(scorer.url, "teacher", attempts=2, wait=0.0)
    with pytest.raises(ConnectionError, match="ConnectError"):
        await gone.score(TURNS)
    assert await gone.score([]) == []  # nothing to ask, nobody asked


@pytest.mark.parametrize("kind", ["full", [torch.zeros(2, 1).long()], 0])
async def test_what_a_server_cannot_give_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"was asked for ('full'|given ids|0)$"):
        await ServedScorer("http://nowhere", "x").score(TURNS[:1], kind)


@pytest.mark.parametrize("turn", [((1,), (2,), 0.7), ((), (2,), 1.0)])
async def test_another_temperature_or_no_prompt_is_refused(turn: Any) -> None:
    with pytest.raises(ValueError, match="at temperature 1 and need a prompt, but turn 1 was sampled at"):
        await ServedScorer("http://nowhere", "x").score([TURNS[0], turn])


async def test_a_server_that_ignores_the_question_or_gives_logits_is_found_out() -> None:
    def forgets(answer: Any) -> Any:
        del answer["choices"][0]["prompt_logprobs"]
        return answer

    def logits(answer: Any) -> Any:
        for place in answer["choices"][0]["prompt_logprobs"][1:]:
            for said in place.values():
                said["logprob"] += 9.0
        return answer

    async with serving(Served(change=forgets)) as scorer:
        with pytest.raises(ValueError, match="`prompt_logprobs` for each of"):
            await scorer.score(TURNS)
    async with serving(Served(change=logits)) as scorer:
        with pytest.raises(ValueError, match="gives logits"):
            await scorer.score(TURNS, 3)
