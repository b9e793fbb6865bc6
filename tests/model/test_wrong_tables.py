"""A rule table with a mistake converts there and back, bit for bit. Only running the model finds it, and must name the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done
from tests.model.verifying import convert, outcome, replaced, rule, swapped, table_text, verify, write_table


@dataclass(frozen=True)
class Mistake:
    """A table of `family` with a mistake, a tiny model that it still fits, and the state that is the first to be wrong."""

    family: str
    variant: str
    make: Callable[[str], str]
    first: str


def _attention(projection: str) -> str:
    return f'ms = "layers.{{layer}}.attention.{projection}_proj.weight"'


def _mlp(projection: str) -> str:
    return f'ms = "layers.{{layer}}.mlp.{projection}_proj.weight"'


def _interleaved(text: str) -> str:
    """Query and key rows read as pairs of neighbours, as GPT-NeoX's and Meta's own Llama files hold them."""
    for projection, heads in (("q", "heads"), ("k", "kv_heads")):
        line = _attention(projection)
        text = replaced(text, line, f'hf_axes = "({heads} half_dim pair) hidden"\n{line}')
    return text


def _in_one_layer(text: str) -> str:
    """Query and key exchanged in layer 2 alone."""
    for projection, other in (("q", "k"), ("k", "q")):
        hf = f"model.layers.{{layer}}.self_attn.{projection}_proj.weight"
        right = f"layers.{{layer}}.attention.{projection}_proj.weight"
        wrong = f"layers.{{layer}}.attention.{other}_proj.weight"
        ranges = [rule(hf, right, "to_layer = 2"), rule(hf, wrong, "from_layer = 2", "to_layer = 3"), rule(hf, right, "from_layer = 3")]
        text = replaced(text, rule(hf, right), "\n".join(ranges))
    return text


def _approximate_gelu(text: str) -> str:
    """So near that the error of the first layer alone is still allowed."""
    text = replaced(text, 'activation = { key = "hidden_act", map = "activation" }', 'activation = { value = "gelu_tanh" }')
    return replaced(text, "[config.ignored]\n", '[config.ignored]\nhidden_act = "they are all alike"\n')


MISTAKES = {
    "query and key exchanged": Mistake("llama", "llama", lambda text: swapped(text, _attention("q"), _attention("k")), "layers.0"),
    "value and key exchanged": Mistake("llama", "llama-gqa", lambda text: swapped(text, _attention("v"), _attention("k")), "layers.0"),
    "rotary rows taken for interleaved": Mistake("llama", "llama-gqa", _interleaved, "layers.0"),
    "gate and up exchanged": Mistake("llama", "llama-gqa", lambda text: swapped(text, _mlp("gate"), _mlp("up")), "layers.0"),
    "the two norms exchanged": Mistake(
        "llama",
        "llama-gqa",
        lambda text: swapped(text, 'ms = "layers.{layer}.attention_norm.gamma"', 'ms = "layers.{layer}.mlp_norm.gamma"'),
        "layers.0",
    ),
    "a norm off by one": Mistake(
        "llama", "llama-gqa", lambda text: replaced(text, "\n[config]\n", "\n[config]\nnorm_offset = { value = 1.0 }\n"), "layers.0"
    ),
    "query and key exchanged in one layer": Mistake("llama", "llama", _in_one_layer, "layers.2"),
    "a square matrix not transposed": Mistake(
        "gpt2", "gpt2-inner", lambda text: replaced(text, 'hf_axes = "(heads head_dim) hidden"\n', ""), "layers.0"
    ),
    "a fused query, key, value cut in another order": Mistake(
        "gpt2",
        "gpt2-inner",
        lambda text: replaced(
            text,
            "[q: heads head_dim | k: kv_heads head_dim | v: kv_heads head_dim]",
            "[k: kv_heads head_dim | q: heads head_dim | v: kv_heads head_dim]",
            times=2,
        ),
        "layers.0",
    ),
    "query and key norms exchanged": Mistake(
        "qwen3",
        "qwen3",
        lambda text: swapped(text, 'ms = "layers.{layer}.attention.q_norm.gamma"', 'ms = "layers.{layer}.attention.k_norm.gamma"'),
        "layers.0",
    ),
    "the embedding's gamma and beta exchanged": Mistake(
        "bert", "bert", lambda text: swapped(text, 'ms = "bert.embedding.norm.gamma"', 'ms = "bert.embedding.norm.beta"'), "embedding"
    ),
    "the head's gamma and beta exchanged": Mistake(
        "bert", "bert-mlm", lambda text: swapped(text, 'ms = "mlm_head.norm.gamma"', 'ms = "mlm_head.norm.beta"'), "logits"
    ),
    "an activation that is nearly the right one": Mistake("bert", "bert", _approximate_gelu, "layers.1"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_table_is_caught_and_the_layer_named(mistake: Mistake, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(mistake.variant)
    table = write_table(tmp_path, mistake.make(table_text(mistake.family)))
    slices = convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2, "--rules", table)
    facts = verify(source, slices, "--rules", table, "--forward")
    holds = outcome(facts)
    assert holds["coverage"] and holds["weights"], "the mistake must be one that a comparison through the same table cannot see"
    assert not holds["forward"]
    assert facts["forward"]["first_divergence"]["name"] == mistake.first
    assert f"diverges first at {mistake.first}:" in next(check["summary"] for check in facts["checks"] if check["name"] == "forward")


def test_a_wrong_table_comes_back_bit_for_bit_all_the_same(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    mistake = MISTAKES["query and key exchanged"]
    source, table = tiny_folder(mistake.variant), write_table(tmp_path, mistake.make(table_text(mistake.family)))
    slices = convert(source, tmp_path / "slices", "--tp", 2, "--rules", table)
    done("ms2hf", slices, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_a_tree_made_with_a_wrong_table_differs_from_what_the_bundled_one_gives(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    mistake = MISTAKES["query and key exchanged in one layer"]
    source, table = tiny_folder(mistake.variant), write_table(tmp_path, mistake.make(table_text(mistake.family)))
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2, "--rules", table))
    assert outcome(facts) == {"coverage": True, "not carried": True, "weights": False, "description": True}
    wrong = {(item["name"], item["file"]) for item in facts["weights"]["differences"]}
    names = ("layers.2.attention.q_proj.weight", "layers.2.attention.k_proj.weight")
    assert wrong == {(name, f"rank_{rank}/checkpoint_{rank}.safetensors") for name in names for rank in (2, 3)}
    assert any("another rule table" in note for note in facts["notes"])
