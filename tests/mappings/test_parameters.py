"""The catalogue of canonical parameters, and entries of a table's own."""

from __future__ import annotations

from typing import Any

import pytest

from mappings.axes import parse_axes
from mappings.parameters import REPLICATED, catalogue, parse_parameter
from tests.converter.planned import config_of

GOOD: dict[str, Any] = {"name": "layers.{layer}.mlp.x", "axes": "ffn hidden", "cut": "ffn", "stage": "layer"}


def test_a_good_entry_is_read() -> None:
    parameter, problems = parse_parameter(GOOD | {"role": "head"}, "mine.toml")
    assert not problems
    assert parameter is not None
    assert (parameter.name, parameter.axes, parameter.cut, parameter.stage, parameter.role, parameter.cut_axis) == (
        "layers.{layer}.mlp.x", parse_axes("ffn hidden"), "ffn", "layer", "head", 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "cut", "index"),
    [
        ("vocab hidden", "vocab", 0),
        ("hidden (heads head_dim)", "heads", 1),
        ("experts ((heads head_dim) hidden) ffn", "heads", 1),
        ("hidden", REPLICATED, None),
    ],
)
def test_the_cut_axis_is_the_one_whose_outermost_atom_is_cut(axes: str, cut: str, index: int | None) -> None:
    parameter, problems = parse_parameter(GOOD | {"axes": axes, "cut": cut}, "")
    assert not problems
    assert parameter is not None
    assert parameter.cut_axis == index


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": None}, "'name' is missing"),
        ({"name": ""}, "'name' is missing"),
        ({"axes": 3}, "'axes' is missing or not a text"),
        ({"cut": ["ffn"]}, "'cut' is missing or not a text"),
        ({"stage": None}, "'stage' is missing"),
        ({"split": 1}, "unknown key 'split'"),
        ({"axes": "(ffn hidden"}, "expected ')'"),
        ({"axes": "()"}, "names no axis"),
        ({"axes": "[a: ffn | b: hidden]"}, "a canonical parameter is a single tensor"),
        ({"axes": "(heads [a: ffn | b: hidden])"}, "a canonical parameter is a single tensor"),
        ({"cut": "hidden", "axes": "(ffn hidden)"}, "cut 'hidden' is not the outermost axis"),
        ({"cut": "heads"}, "cut 'heads' is not the outermost axis"),
        ({"stage": "middle"}, "stage 'middle' is unknown"),
        ({"stage": "first"}, "goes with a name that has {layer}"),
        ({"name": "mlp.x"}, "goes with a name that has {layer}"),
        ({"name": "layers.{layer}.{head}.x"}, "unknown placeholder"),
        ({"name": "layers.{layer}.mlp-x"}, "is no parameter's name"),
        ({"name": "layers.{layer}..x"}, "is no parameter's name"),
        ({"name": "layers.{layer}." + "x" * 600}, "is no parameter's name"),
        ({"name": "layers.{layer}.x\n"}, "is no parameter's name"),
        ({"role": "tail"}, "role 'tail' is unknown"),
        ({"role": ["head"]}, "is unknown"),
    ],
)
def test_a_mistake_is_named_with_place_and_mend(changes: dict[str, Any], words: str) -> None:
    entry = {key: value for key, value in (GOOD | changes).items() if value is not None}
    _, problems = parse_parameter(entry, "mine.toml, parameter 1")
    assert [problem for problem in problems if words in problem.what], problems
    assert all(problem.where == "mine.toml, parameter 1" and problem.mend for problem in problems)


def test_every_parameter_of_the_catalogue_is_declared_below_each_scope_alike() -> None:
    plain = {name for name in catalogue() if not name.startswith("bert.")}
    for scope in ("bert.", "bert.encoder."):
        for name in plain:
            parameter = catalogue()[scope + name]
            assert parameter.name == scope + name
            assert (parameter.axes, parameter.cut, parameter.stage) == (
                catalogue()[name].axes,
                catalogue()[name].cut,
                catalogue()[name].stage,
            )
    assert len(catalogue()) == 3 * len(plain)


def test_a_model_knows_the_size_of_every_axis_of_the_catalogue() -> None:
    sizes = config_of(experts=2, expert_ffn=4, token_types=2).axis_sizes()
    for parameter in catalogue().values():
        assert all(size > 0 for size in parameter.axes.shape(sizes))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("layers.{layer}.attention.o_proj.bias", REPLICATED),
        ("layers.{layer}.mlp.down_proj.bias", REPLICATED),
        ("layers.{layer}.attention.o_proj.weight", "heads"),
        ("layers.{layer}.mlp.down_proj.weight", "ffn"),
        ("layers.{layer}.attention.q_norm.gamma", REPLICATED),
        ("layers.{layer}.attention.k_proj.bias", "kv_heads"),
    ],
)
def test_the_bias_of_a_row_parallel_layer_is_whole_on_every_rank(name: str, cut: str) -> None:
    """Cut, it would be added tp times, or too little of it."""
    assert catalogue()[name].cut == cut
