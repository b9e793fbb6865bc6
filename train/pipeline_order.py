"""The order in which a pipeline stage computes and communicates: one forward, one backward (1F1B).

Source: Narayanan et al., arXiv:2104.04473, section 2.2 (the non-interleaved schedule, with pipeline flush). A stage runs ahead by as many
micro-batches as there are stages behind it and then alternates, so it keeps the inputs of at most `stages - stage` micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Action = Literal["receive_forward", "forward", "send_forward", "receive_backward", "backward", "send_backward"]


@dataclass(frozen=True)
class Event:
    """One thing that a stage does, for one micro-batch. "forward" messages come from the stage before, "backward" ones from the stage
    after.
    """

    action: Action
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Event]:
    """Everything that stage `stage` of `stages` does in a step.

    Sending blocks until the neighbour receives, so neighbours must name their exchanges in the same order: between two alternations, first
    the gradient comes back, then the next activation goes forward.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    first, last = stage == 0, stage == stages - 1
    events: list[Event] = []
    for index in range(ahead):
        events += _named([None if first else "receive_forward", "forward", "send_forward"], index)
    for index in range(micro_batches - ahead):
        events += _named([None if first else "receive_forward", "forward"], index + ahead)
        events += _named([None if last else "receive_backward"], index)
        events += _named([None if last else "send_forward"], index + ahead)
        events += _named(["backward", None if first else "send_backward"], index)
    for index in range(micro_batches - ahead, micro_batches):
        events += _named(["receive_backward", "backward", None if first else "send_backward"], index)
    return events


def _named(actions: list[Action | None], micro_batch: int) -> Iterator[Event]:
    return (Event(action, micro_batch) for action in actions if action is not None)
