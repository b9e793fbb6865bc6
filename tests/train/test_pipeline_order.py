"""The 1F1B order, checked by playing all stages against each other with sends that block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.pipeline_order import Action, Event, one_forward_one_backward

PEER = {"send_forward": 1, "receive_backward": 1, "receive_forward": -1, "send_backward": -1}
MATCH: dict[Action, Action] = {
    "send_forward": "receive_forward",
    "receive_forward": "send_forward",
    "send_backward": "receive_backward",
    "receive_backward": "send_backward",
}


def play(orders: list[list[Event]]) -> list[tuple[int, Event]]:
    """Let every stage do its next event as soon as it can; an exchange needs both sides at that point at once."""
    at = [0] * len(orders)
    done: list[tuple[int, Event]] = []
    while True:
        moved = False
        for stage, order in enumerate(orders):
            if at[stage] == len(order):
                continue
            event = order[at[stage]]
            if event.action in ("forward", "backward"):
                at[stage] += 1
                done.append((stage, event))
                moved = True
                continue
            peer = stage + PEER[event.action]
            if at[peer] < len(orders[peer]) and orders[peer][at[peer]] == Event(MATCH[event.action], event.micro_batch):
                at[stage] += 1
                at[peer] += 1
                done += [(stage, event), (peer, orders[peer][at[peer] - 1])]
                moved = True
        if not moved:
            assert at == [len(order) for order in orders], "deadlock"
            return done


@given(st.integers(1, 7), st.integers(1, 12))
def test_stages_with_blocking_exchanges_neither_lock_nor_miss_a_micro_batch(stages: int, micro_batches: int) -> None:
    orders = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    done = play(orders)
    counts = Counter((stage, event.action) for stage, event in done)
    assert all(counts[stage, action] == micro_batches for stage in range(stages) for action in ("forward", "backward"))
    for stage, order in enumerate(orders):
        place = {event: index for index, event in enumerate(order)}
        for index in range(micro_batches):
            assert place[Event("forward", index)] < place[Event("backward", index)]
            if stage:
                assert place[Event("receive_forward", index)] < place[Event("forward", index)]
                assert place[Event("backward", index)] < place[Event("send_backward", index)]
            if stage < stages - 1:
                assert place[Event("forward", index)] < place[Event("send_forward", index)]
                assert place[Event("receive_backward", index)] < place[Event("backward", index)]


@given(st.integers(1, 7), st.integers(1, 12))
def test_a_stage_keeps_no_more_inputs_than_there_are_stages_from_it_on(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        kept, most = 0, 0
        for event in one_forward_one_backward(stage, stages, micro_batches):
            kept += {"forward": 1, "backward": -1}.get(event.action, 0)
            most = max(most, kept)
        assert most <= stages - stage


@pytest.mark.parametrize("stages", [2, 4])
def test_the_last_stage_goes_back_at_once(stages: int) -> None:
    actions = [event.action for event in one_forward_one_backward(stages - 1, stages, 3) if event.action in ("forward", "backward")]
    assert actions == ["forward", "backward"] * 3
