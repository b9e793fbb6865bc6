"""Name patterns, and the folding of long lists for a person."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappings.names import fill, fold_names, number_free, placeholders

segments = st.sampled_from(["layers", "experts", "w", "0", "7", "10", "007", "a0", "{}", "{layer}", "٣", "{0..1}"])
names = st.lists(segments, min_size=1, max_size=5).map(".".join)


def unfolded(text: str) -> set[str]:
    """Every name that a folded text stands for: `{0..2,5}` is 0, 1, 2 and 5."""
    pieces = re.split(r"\{([0-9][0-9.,]*)\}", text)
    choices: list[list[str]] = []
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            choices.append([piece])
        else:
            runs = [run.split("..") for run in piece.split(",")]
            choices.append([str(number) for run in runs for number in range(int(run[0]), int(run[-1]) + 1)])
    return {"".join(chosen) for chosen in itertools.product(*choices)}


def test_placeholders_are_found_in_order_and_filled() -> None:
    pattern = "model.layers.{layer}.mlp.experts.{expert}.w1"
    assert placeholders(pattern) == ("layer", "expert")
    assert fill(pattern, layer=3, expert=12) == "model.layers.3.mlp.experts.12.w1"
    assert fill("lm_head.weight", layer=None, expert=None) == "lm_head.weight"


def test_a_name_and_its_pattern_are_equal_without_numbers() -> None:
    assert number_free("h.{layer}.attn.c_attn.bias") == number_free("h.11.attn.c_attn.bias")
    assert number_free("h.{layer}.attn.bias") != number_free("h.11.attn.c_attn.bias")
    assert number_free("model.layers.3") == number_free("model.layers.{layer}")
    assert number_free("wte2.weight") == "wte2.weight"


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 9), min_size=1))
def test_every_name_of_a_grid_is_folded_into_one_text(layers: set[int], experts: set[int]) -> None:
    grid = {f"model.layers.{layer}.experts.{expert}.w" for layer in layers for expert in experts}
    (folded,) = fold_names(sorted(grid))
    assert unfolded(folded) == grid


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_a_folded_text_that_says_more_than_its_names_gives_their_count(numbers: set[tuple[int, int]]) -> None:
    given_names = {f"layers.{layer}.experts.{expert}" for layer, expert in numbers}
    (folded,) = fold_names(sorted(given_names))
    text, _, count = folded.partition(" (")
    assert unfolded(text) >= given_names
    if unfolded(text) != given_names:
        assert count == f"{len(given_names)} names)"
    else:
        assert not count


@given(st.lists(names))
def test_any_names_fold_and_keep_the_order_of_appearance(given_names: list[str]) -> None:
    folded = fold_names(given_names)
    assert len(folded) == len({number_free(name.replace("{", "<")) for name in given_names})
    if given_names:
        assert folded[0].split(".")[0].split(" ")[0] == given_names[0].split(".")[0]


@pytest.mark.parametrize(
    ("given_names", "folded"),
    [
        (["h.0.w", "h.1.w", "h.2.w", "h.5.w"], ["h.{0..2,5}.w"]),
        (["b", "a.3", "b", "a.4"], ["b", "a.{3..4}"]),
        (["a.7"], ["a.7"]),
        (["a.1", "a.01"], ["a.1", "a.01"]),
        (["a.9" * 6], ["a.9" * 6]),
        ([], []),
    ],
)
def test_folding(given_names: list[str], folded: list[str]) -> None:
    assert fold_names(given_names) == folded
