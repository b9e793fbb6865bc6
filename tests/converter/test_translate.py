"""A checkpoint that was translated is the one that hf2ms makes of the Hugging Face folder: same names, same bytes, same way back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from converter.canonical import parameters_of_source, parameters_of_tree
from converter.hf_folder import read_hf_folder
from converter.rank_tree import read_rank_tree
from converter.source_model import understand
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, assert_same_tensors, done, refused, same_bits, tensors_of
from tests.converter.test_foreign import by_hand, write_ranks
from tests.tiny_models import save_tiny

ROUTES = {
    "names alone": ("llama-gqa", "ms-convert", (2, 1), "mindformers", (2, 1)),
    "fused to separate": ("llama-gqa", "mindformers-legacy@1.3-fused", (2, 1), "mindformers-legacy@1.3", (2, 1)),
    "fused per rank to interleaved": ("qwen2", "mindformers-legacy@1.3-fused", (4, 1), "mindformers", (2, 2)),
    "interleaved to fused per rank": ("qwen2", "mindformers", (2, 2), "mindformers@2.0-contiguous", (4, 1)),
    "fused per rank, other ranks": ("qwen3", "mindformers@2.0-contiguous", (4, 2), "mindformers@2.0-contiguous", (2, 1)),
    "three ranks to two": ("llama-six", "mindformers@2.0-contiguous", (3, 1), "mindformers@2.0-contiguous", (2, 1)),
    "two ranks to three": ("llama-six", "mindformers-legacy@1.8-fused", (2, 1), "mindformers@2.0-contiguous", (3, 1)),
    "to the bundled model, padded": ("llama-uneven-vocab-tied", "mindformers", (2, 1), "ms-convert", (4, 2)),
    "from a padded vocabulary": ("llama-uneven-vocab-tied", "ms-convert", (2, 2), "mindformers-legacy", (1, 1)),
    "shared KV heads": ("llama-gqa-2", "ms-convert", (8, 1), "mindformers", (2, 1)),
    "to shared KV heads": ("llama-gqa-2", "mindformers@2.0-contiguous", (2, 1), "ms-convert", (8, 1)),
    "gpt2": ("gpt2", "mindformers-legacy@1.3", (2, 2), "ms-convert", (4, 1)),
    "bert": ("bert-pretraining", "ms-convert", (2, 2), "mindformers-legacy@1.3", (2, 1)),
}


def folder_of(variant: str, tiny_folder: TinyFolder) -> Path:
    if variant == "llama-six":
        return tiny_folder("llama-gqa", num_attention_heads=12, num_key_value_heads=6, hidden_size=96, vocab_size=258)
    return tiny_folder(variant)


def assert_same_slices(tree: Path, other: Path) -> None:
    """Every rank's file holds the same tensors, bit for bit."""
    files = [sorted(path.relative_to(place).as_posix() for path in place.rglob("*.safetensors")) for place in (tree, other)]
    assert files[0] == files[1] and files[0]
    for name in files[0]:
        first, second = (load_file(place / name) for place in (tree, other))
        assert first.keys() == second.keys()
        assert all(first[key].tobytes() == second[key].tobytes() and first[key].dtype == second[key].dtype for key in first), name


@pytest.mark.parametrize("route", ROUTES)
def test_a_translation_is_what_hf2ms_makes(route: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    variant, first, (tp, pp), second, (new_tp, new_pp) = ROUTES[route]
    source = folder_of(variant, tiny_folder)
    done("hf2ms", source, "-o", tmp_path / "first", "--tp", tp, "--pp", pp, "--target", first)
    done("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", second, "--tp", new_tp, "--pp", new_pp)
    done("hf2ms", source, "-o", tmp_path / "direct", "--tp", new_tp, "--pp", new_pp, "--target", second)
    assert_same_slices(tmp_path / "second", tmp_path / "direct")
    assert_same_folder(tmp_path / "second/strategy", tmp_path / "direct/strategy")
    done("ms2hf", tmp_path / "second", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")
    done("verify", source, tmp_path / "second")


@pytest.mark.parametrize(("variant", "target"), [("qwen2", "mindformers@2.0-contiguous"), ("gpt2", "mindformers-legacy@1.3")])
def test_the_bundled_model_gets_canonical_parameters_of_a_tree_in_other_names(
    variant: str, target: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant)
    done("hf2ms", source, "-o", tmp_path / "tree", "--tp", 2, "--pp", 2, "--target", target)
    found = dict(parameters_of_tree(read_rank_tree(tmp_path / "tree")))
    expected = dict(parameters_of_source(understand(read_hf_folder(source))))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("disk", ["unified", "mindformers2"])
def test_a_translation_between_disk_layouts(disk: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen3")
    done("hf2ms", source, "-o", tmp_path / "first", "--tp", 2, "--target", "mindformers@2.0-contiguous", "--layout", disk)
    done("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers", "--layout", disk)
    done("hf2ms", source, "-o", tmp_path / "direct", "--tp", 2, "--target", "mindformers", "--layout", disk)
    assert_same_slices(tmp_path / "second", tmp_path / "direct")
    done("ms2hf", tmp_path / "second", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_a_run_of_mindformers_moves_to_another_version_without_hugging_face(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa", tokenizer=True)
    write_ranks(tmp_path / "run", by_hand(source, "llama-gqa", "mindformers-legacy@1.3-fused", 4), tp=4, dp=2, sharded=True)
    known = ("--from", "mindformers-legacy@1.3-fused", "--config", source)
    done("translate", tmp_path / "run", "-o", tmp_path / "new", *known, "--target", "mindformers", "--tp", 2, "--pp", 2)
    done("hf2ms", source, "-o", tmp_path / "direct", "--tp", 2, "--pp", 2, "--target", "mindformers")
    assert_same_slices(tmp_path / "new", tmp_path / "direct")
    done("ms2hf", tmp_path / "new", "-o", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_what_hf2ms_cast_stays_cast_and_comes_back_in_its_own_type(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "qwen2")
    done("hf2ms", source, "-o", tmp_path / "first", "--tp", 2, "--dtype", "bf16")
    done("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "second/rank_0").values()} == {torch.bfloat16}
    done("ms2hf", tmp_path / "second", "-o", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    for name, tensor in tensors_of(source).items():
        assert same_bits(back[name], tensor.bfloat16().float()), name


def test_dropped_and_repeated_tensors_are_remembered(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("bert-pretraining", max_shard_size="100KB", tokenizer=True)
    done("hf2ms", source, "-o", tmp_path / "first", "--tp", 2)
    done("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers-legacy@1.3", "--format", "ckpt")
    done("ms2hf", tmp_path / "second", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_a_damaged_slice_is_found_before_anything_is_written(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    done("hf2ms", tiny_folder("llama-gqa"), "-o", tmp_path / "first", "--tp", 2)
    path = tmp_path / "first/rank_1/checkpoint_1.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    message = refused("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers")
    assert "is not what the manifest recorded" in message and not list(tmp_path.glob("second/rank_*/*"))


def test_the_same_translation_again_has_nothing_to_do_and_another_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    done("hf2ms", tiny_folder("llama-gqa"), "-o", tmp_path / "first", "--tp", 2)
    command = ("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers")
    done(*command)
    assert "nothing to do" in done(*command).out
    refused("translate", tmp_path / "first", "-o", tmp_path / "second", "--target", "mindformers-legacy")
    refused("translate", tmp_path / "first", "-o", tmp_path / "first/inside", "--target", "mindformers")
