"""What MindSpore's parallel compiler made of the trainer's cell, for each case: how it cut every parameter, and what it communicates.

MindSpore's answers are kept (tests/semi_auto/golden.py); one test compiles afresh where the tools are there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from converter.layout import make_layout
from converter.strategies import stage_layouts
from converter.strategy_format import ParameterLayout
from mappings.errors import Refused
from model.shard import shard_decoder
from model.stage import Stage, build_stage
from tests.semi_auto.cases import CASES, LLAMA, Case
from tests.semi_auto.communication_table import rows
from tests.semi_auto.compiling import Communication, can_compile, compile_on_stubs, sorted_layouts
from tests.semi_auto.declared import declared_strategies
from tests.semi_auto.golden import read_declared, read_golden
from tests.semi_auto.test_executed import check_step

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
POSITIONS = "embedding.positions.embedding_table"
TABLE = "embedding.tokens.embedding_table"


def expected_layouts(case: Case, stage: int) -> list[ParameterLayout]:
    """Our converter's, with the two things that MindSpore does otherwise.

    Learned positions are only ever sliced, which is no operator of the batch: there MindSpore arranges the devices in one row. And it keeps
    a tied table on the first stage and sends it to the last in each step, while a rank tree has it on both, for MindSpore's own tools.
    """
    ours = stage_layouts(case, case.layout, stage, optimizer_sharding=case.optimizer_sharding)
    kept = [layout for layout in ours if not (layout.name == TABLE and stage)]
    return [replace(layout, device_matrix=(math.prod(layout.device_matrix),)) if layout.name == POSITIONS else layout for layout in kept]


@EVERY_CASE
def test_what_was_kept_is_of_the_strategies_that_are_declared_now(case: Case) -> None:
    """MindSpore's answers say nothing of other strategies: after a change of these, `python -m tests.semi_auto.golden`."""
    assert declared_strategies(case) == read_declared(case)


@EVERY_CASE
def test_mindspore_cuts_every_parameter_and_its_state_as_our_strategy_files_say(case: Case) -> None:
    kinds = ["", "adam_m.", "adam_v.", *["accu_grads."] * (case.micro_batches > 1)]
    compiled = read_golden(case)
    assert set(compiled.strategies) == set(range(case.pp))
    for stage, strategy in compiled.strategies.items():
        expected = [replace(layout, name=kind + layout.name) for kind in kinds for layout in expected_layouts(case, stage)]
        assert sorted_layouts(strategy) == sorted(expected, key=lambda layout: layout.name)


def needed(case: Case, stage: int) -> Counter[tuple[str, tuple[int, ...], str]]:
    """What the scheme needs of activations in a step: (kind, ranks, place) -> count.

    Forward, for each micro-batch: two sums a layer over the tensor-parallel ranks, one of the looked-up rows, and in the loss the
    maximum, the sum of exponentials and the label's logit; and the loss is summed over data-parallel ranks. Backward: in Megatron's
    form the inputs of column-parallel layers have their gradients summed. In MindSpore's the gradient of a sum is a sum, which comes to
    as many; in between, what tensor-parallel ranks hold of a gradient is a share of it.
    """
    layers, first, last = case.layout.layers_per_stage[stage], stage == 0, stage == case.pp - 1
    group = tuple(case.layout.rank(stage, 0, tensor) for tensor in range(case.tp))
    data = tuple(case.layout.rank(stage, data, 0) for data in range(case.dp))
    found = {
        ("AllReduce sum", group, "attention/o_proj"): layers,
        ("AllReduce sum", group, "mlp/down_proj"): layers,
        ("AllReduce sum", group, "embedding"): int(first),
        ("AllReduce sum", group, "cross_entropy"): 2 * last,
        ("AllReduce max", group, "cross_entropy"): int(last),
        ("AllReduce sum", group, "backward"): 2 * layers + first + 2 * last,
        ("AllReduce sum", data, "cross_entropy"): int(last and case.dp > 1),
    }
    counted = Counter({key: count * case.copies for key, count in found.items() if count})
    if case.dp > 1 and case.micro_batches > 1:  # the gradient of a scalar, the same for all micro-batches; with one it is a constant
        counted["AllReduce sum", data, "backward"] = 1
    return counted


def place_of(item: Communication) -> str:
    """The compiler merges equal operators of the backward pass, whichever layer they are of, so those have no place."""
    if item.backward:
        return "backward"
    ends = [name for name in ("embedding", "cross_entropy") if name in item.scope]
    return ends[0] if ends else "/".join(item.scope[3:5])


def outside_of_stages(item: Communication) -> bool:
    """The norm of the gradient, the batch that is cut into micro-batches, and what goes from stage to stage."""
    return item.scope[:1] == ("norm",) or "micro_inputs" in item.scope or item.kind in ("Send", "Receive")


@EVERY_CASE
def test_activations_are_communicated_as_the_scheme_needs_and_not_once_more(case: Case) -> None:
    for stage, counted in read_golden(case).communication.items():
        seen: Counter[tuple[str, tuple[int, ...], str]] = Counter()
        for item, count in counted.items():
            if not item.weights and not outside_of_stages(item):
                seen[item.kind, item.ranks, place_of(item)] += count
        assert seen == needed(case, stage)


@EVERY_CASE
def test_only_a_batch_that_is_both_divided_and_accumulated_is_gathered(case: Case) -> None:
    """Before it cuts the batch into micro-batches the compiler gathers it: int32 ids and labels, once a step."""
    for counted in read_golden(case).communication.values():
        gathered = sum(count for item, count in counted.items() if "micro_inputs" in item.scope)
        assert gathered == (2 if case.dp > 1 and case.micro_batches > 1 else 0)


@EVERY_CASE
def test_what_goes_from_stage_to_stage_is_one_activation_and_one_gradient_a_micro_batch(case: Case) -> None:
    for stage, counted in read_golden(case).communication.items():
        sent = Counter[tuple[str, bool]]()
        for item, count in counted.items():
            if item.kind in ("Send", "Receive"):
                sent[item.kind, item.backward] += count
        neighbours = (case.pp > 1) * (case.micro_batches + case.config.tied)  # a tied table goes along, once a step
        ways = (("Send", False), ("Receive", True)) if stage == 0 else (("Receive", False), ("Send", True))
        assert sent == Counter({way: neighbours for way in ways if neighbours})


@EVERY_CASE
def test_every_gradient_is_summed_once_a_step_over_all_ranks_that_hold_the_parameter(case: Case) -> None:
    for stage, counted in read_golden(case).communication.items():
        summed = "ReduceScatter" if case.optimizer_sharding else "AllReduce sum"
        sizes = Counter[int]()
        for item, count in counted.items():
            if item.weights and item.kind == summed:
                sizes[len(item.ranks)] += count
        expected = Counter[int]()
        for layout in expected_layouts(case, stage):
            whole = all(axis == -1 for axis in layout.tensor_map)
            holders = case.dp * (case.tp if whole else 1)
            if holders > 1:
                expected[holders] += 1
                # Computed in float32, a tied table has no cast that its two uses share: the gradient of each is summed by itself
                expected[holders] += layout.name == TABLE and case.config.tied and case.pp == case.micro_batches == 1 and not case.ascend
        assert sizes == expected


def without_cells(counted: Counter[Communication]) -> Counter[tuple[str, tuple[int, ...], bool, bool]]:
    """The counts without the names of cells, which an edit of a cell changes while the communication stays."""
    found: Counter[tuple[str, tuple[int, ...], bool, bool]] = Counter()
    for item, count in counted.items():
        found[item.kind, item.ranks, item.backward, item.weights] += count
    return found


def test_the_table_counts_two_sums_a_layer_each_way() -> None:
    by_case = {row[0]: row for row in rows()}
    assert by_case["llama-dp2-tp2"][1:3] == ("2", "2")
    assert by_case["llama-dp2-tp2-ascend"][1:] == by_case["llama-dp2-tp2"][1:]


def test_kv_heads_that_tp_does_not_divide_are_refused() -> None:
    decoder = build_stage(replace(LLAMA, kv_heads=2), Stage(range(2)))
    with pytest.raises(Refused, match="cannot cut") as caught:
        shard_decoder(decoder, 1, 4)
    assert "2 KV heads" in str(caught.value)
    assert make_layout(LLAMA, Case("llama").expansion, tp=8, pp=1).tp == 8  # which explicit collectives can


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(), reason="needs gcc, nm and the GPU plugin of MindSpore's wheel")
def test_mindspore_still_says_what_was_kept_and_its_graph_is_the_step_of_one_process(tmp_path: Path) -> None:
    case = CASES["llama-dp2-tp2-sharded"]
    fresh, kept = compile_on_stubs(case, tmp_path / "job"), read_golden(case)
    assert sorted_layouts(fresh.strategies[0]) == sorted_layouts(kept.strategies[0])
    assert without_cells(fresh.communication[0]) == without_cells(kept.communication[0])
    check_step(case, tmp_path / "job")
