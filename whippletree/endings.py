"""How a run of a harness really ended: what it said of itself, with what the gateway knows of it.

Many harnesses say that they are done when they were not: a reply that was cut for length passes for the answer, a call
that nobody could read for text. Such a run is `truncated`, and its channels are capped, so that it is never rewarded as
one that finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from whippletree.gateway.sessions import Session
from whippletree.gateway.store import StoreError
from whippletree.harness.outcome import Outcome, failure
from whippletree.types import Rollout, Turn

CAPPED = "whippletree/capped"  # in a rollout's info: what its channels were before they were capped


def judged(outcome: Outcome, session: Session, turns: Sequence[Turn], *, takes_cut_replies: bool = False) -> Outcome:
    """What a harness said of its run, with what the gateway knows of it: whose fault a failure was, if anyone's.

    Raises:
        StoreError: it failed as the disk did not take a reply. That is no fault of the rollout, which stays open, so
            that a resumed run begins it anew.
    """
    if outcome.ending == "failed" and StoreError.__name__ in session.failure:
        raise StoreError(session.failure)
    if outcome.ending == "failed" and session.truncated and turns:  # a limit of ours, not a fault of the harness
        return replace(outcome, ending="truncated", blame=None, reason=session.truncated)
    if outcome.ending == "failed" and session.failure:
        return replace(outcome, blame="engine", reason=session.failure)
    if outcome.ending == "failed" and not session.truncated:
        return outcome
    if not turns:
        why = session.truncated or "the harness ended without a single call to the policy"
        return failure(why, info=outcome.info)
    try:
        json.dumps(outcome.info)
    except (TypeError, ValueError) as error:
        return failure(f"what the harness found must be JSON, as it is kept in the store, but {error}")
    if outcome.ending == "done" and (why := session.truncated or quiet_end(turns, takes_cut_replies=takes_cut_replies)):
        return replace(outcome, ending="truncated", reason=why)
    return outcome


def quiet_end(turns: Sequence[Turn], *, takes_cut_replies: bool = False) -> str:
    """Why a run whose harness says that it is done cannot be; "" if nothing speaks against it.

    What counts is the last reply of the main thread that was read to its end. Where it was cut for length, unless the
    harness `takes_cut_replies`, calls a tool that there is not, or is a call that cannot be read, the harness stopped
    where the model had not.
    """
    read = [turn for turn in turns if turn.kind == "main" and turn.finish_reason != "abandoned"]
    if not read:
        return "no reply to the main thread was read to its end"
    last = read[-1]
    if last.finish_reason == "length" and not takes_cut_replies:
        return (
            f"its last reply was cut after {len(last.reply_ids)} tokens, and the harness took it for whole; where that "
            f'is as it should be: harness.length_stop = "done"'
        )
    if last.info.get("malformed"):
        return "its last reply held a tool call that cannot be read, and the harness took it for the answer"
    if unknown := last.info.get("unknown_tools"):
        return f"its last reply called {', '.join(unknown)}, which the harness does not have, and that ended it"
    return ""


def capped(rollout: Rollout, most: float) -> Rollout:
    """The rollout, none of whose channels is above `most` if it was truncated; what they were is kept in its info."""
    above = {name: x for name, x in rollout.rewards.items() if x is not None and x > most}
    if rollout.ending != "truncated" or not above:
        return rollout
    rewards = {name: most if name in above else x for name, x in rollout.rewards.items()}
    return replace(rollout, rewards=rewards, info={**rollout.info, CAPPED: above})
