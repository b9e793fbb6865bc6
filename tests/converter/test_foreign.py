"""Checkpoints of MindFormers that ms-convert did not write: made here by hand with numpy, they come back as Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from converter.strategy_format import ParameterLayout, write_strategy
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_tensors, done, ms_convert, refused
from tests.converter.dialects_by_hand import CASES, Arrays

LAYERS = 4
ROWS = ("embeddings", "embedding_weight", "lm_head", "output_layer", "linear_qkv", "linear_fc1", "w_qkv", "w_gate_hidden")
COLUMNS = ("linear_proj", "linear_fc2", "wo", "w2")
"""A module's last name, of the tensors that tensor parallelism cuts."""


def cut_axis(name: str) -> int | None:
    """Which axis of these networks' tensors the ranks cut."""
    parts = name.split(".")
    if {*ROWS, "wq", "wk", "wv", "w1", "w3", "word_embeddings"} & set(parts):
        return 0
    return 1 if set(COLUMNS) & set(parts) else None


def in_stage(name: str, stage: int, stages: int) -> bool:
    """Whether a tensor is on this stage; layers are divided evenly, a tied embedding is on both ends."""
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) * stages // LAYERS == stage
    return stage == (0 if "embedding" in name else stages - 1)


def write_ranks(
    folder: Path, whole: Callable[[int], Arrays], *, tp: int, pp: int = 1, dp: int = 1, sharded: bool = False, beside: bool = True
) -> None:
    """The files of a run: `rank_{r}/` with weights and (`beside`) the optimizer's state, and a strategy file for each rank.

    With `sharded` the optimizer cuts axis 0 of every tensor once more, among the data-parallel ranks.
    """
    for rank in range(tp * pp * dp):
        stage, data, tensor = rank // (dp * tp), rank // tp % dp, rank % tp
        held = {name: array for name, array in whole(tensor).items() if in_stage(name, stage, pp)}
        layouts = []
        for name, array in held.items():
            axis = cut_axis(name) if tp > 1 else None
            layouts.append(
                ParameterLayout(
                    name,
                    (dp, tp),
                    tuple(0 if axis == other else -1 for other in range(array.ndim)),
                    *((tp, dp) if can_shard(name, sharded) else ()),
                )
            )
            if can_shard(name, sharded):
                held[name] = np.split(array, dp)[data]
        tensors = {name: np.ascontiguousarray(array) for name, array in held.items()}
        if beside:
            tensors |= {f"{kind}.{name}": array + 1 for name, array in tensors.items() for kind in ("adam_m", "adam_v")}
            tensors["global_step"] = np.array([7], np.int32)
        place = folder / "checkpoint" / f"rank_{rank}"
        place.mkdir(parents=True)
        save_file(tensors, place / f"llama_rank_{rank}-1_7.safetensors")
        (folder / "strategy").mkdir(exist_ok=True)
        (folder / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(write_strategy(layouts, stage))


def can_shard(name: str, sharded: bool) -> bool:
    """Norms are replicated over all ranks: the optimizer leaves them whole here."""
    return sharded and cut_axis(name) is not None


def by_hand(source: Path, variant: str, target: str, tp: int) -> Callable[[int], Arrays]:
    hf = load_file(source / "model.safetensors")
    return lambda tensor: CASES[variant, target](hf, LAYERS, tensor, tp, target.partition("@")[2])


@pytest.mark.parametrize(("tp", "pp", "dp", "sharded"), [(1, 1, 1, False), (2, 1, 1, False), (2, 2, 2, False), (4, 1, 2, True)])
@pytest.mark.parametrize(("variant", "target"), [case for case in CASES if case[0] in ("llama-gqa", "qwen2", "qwen3")])
def test_a_runs_rank_folders_come_back(
    variant: str, target: str, tp: int, pp: int, dp: int, sharded: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant)
    write_ranks(tmp_path / "run", by_hand(source, variant, target, tp), tp=tp, pp=pp, dp=dp, sharded=sharded)
    facts = done("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", target, "--config", source, "--json").facts
    assert_same_tensors(source, tmp_path / "back")
    ignored = {entry["why"]: entry["count"] for entry in facts["ignored"]}
    parameters = len(by_hand(source, variant, target, tp)(0))
    assert ignored == {"optimizer state": 2 * parameters, "progress": 1}


def test_what_comes_back_runs_in_transformers_and_its_tokenizer_with_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen3", tokenizer=True)
    write_ranks(tmp_path / "run", by_hand(source, "qwen3", "mindformers@2.0", 2), tp=2)
    done("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", "mindformers", "--config", source / "config.json")
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    tokens = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.no_grad():
        logits = [transformers.AutoModelForCausalLM.from_pretrained(place)(tokens).logits for place in (source, tmp_path / "back")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("target", ["mindformers-legacy@1.3-fused", "mindformers-legacy@1.8-fused", "mindformers-legacy@1.3"])
def test_whole_tensors_in_one_file_need_the_ranks_of_the_run_only_where_they_are_fused_per_rank(
    target: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """What `mindspore.unified_safetensors` makes of a run at tp 2: the ranks' slices, one after the other."""
    source = tiny_folder("llama-gqa")
    ranks = [by_hand(source, "llama-gqa", target, 2)(tensor) for tensor in range(2)]
    whole = {
        name: array if cut_axis(name) is None else np.concatenate([rank[name] for rank in ranks], axis=cut_axis(name) or 0)
        for name, array in ranks[0].items()
    }
    (tmp_path / "unified").mkdir()
    save_file(whole, tmp_path / "unified/part0.safetensors")
    command = ("ms2hf", tmp_path / "unified", "-o", tmp_path / "back", "--from", target, "--config", source)
    if target.endswith("1.3-fused"):
        message = refused(*command)
        assert "keeps each rank's part of" in message and "--source-tp N" in message
        done(*command, "--source-tp", 2)
    else:
        done(*command)
    assert_same_tensors(source, tmp_path / "back")


def test_a_padded_vocabulary_comes_back_with_the_rows_of_the_config(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-uneven-vocab")
    hf = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        hf[name] = np.concatenate([hf[name], np.full((9, 64), 5, np.float32)])
    write_ranks(tmp_path / "run", lambda tensor: CASES["llama-gqa", "mindformers@2.0"](hf, LAYERS, tensor, 2, "2.0"), tp=2)
    facts = done("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", "mindformers", "--config", source, "--json").facts
    assert any("padded to 208 rows" in note for note in facts["notes"])
    assert_same_tensors(source, tmp_path / "back")


def test_a_version_that_files_cannot_tell_from_another_is_said(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    write_ranks(tmp_path / "run", by_hand(source, "llama-gqa", "mindformers@2.0", 1), tp=1)
    facts = done("ms2hf", tmp_path / "run", "--dry-run", "--from", "mindformers", "--config", source, "--json").facts
    assert any("2.0-contiguous" in note and "other contents" in note for note in facts["notes"])


def test_the_last_of_several_checkpoints_is_the_one_that_meta_json_names(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen2")
    write_ranks(tmp_path / "run", by_hand(source, "qwen2", "mindformers-legacy@1.8", 2), tp=2)
    command = ("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", "mindformers-legacy", "--config", source)
    for rank in range(2):
        place = tmp_path / f"run/checkpoint/rank_{rank}"
        save_file({"x": np.zeros(3, np.float32)}, place / f"llama_rank_{rank}-1_3.safetensors")
    assert "2 checkpoints" in refused(*command)
    for rank in range(2):
        meta = {"last_epoch": 1, "last_step": 7, "last_ckpt_file": f"llama_rank_{rank}-1_7.safetensors"}
        (tmp_path / f"run/checkpoint/rank_{rank}/meta.json").write_text(json.dumps(meta))
    done(*command)
    assert_same_tensors(source, tmp_path / "back")


def ruin_a_replica(run: Path) -> None:
    path = run / "checkpoint/rank_1/llama_rank_1-1_7.safetensors"
    tensors = load_file(path)
    tensors["decoder.final_layernorm.weight"][3] += 1
    save_file(tensors, path)


def add_a_name(run: Path) -> None:
    path = run / "checkpoint/rank_0/llama_rank_0-1_7.safetensors"
    save_file(load_file(path) | {"decoder.mystery.weight": np.ones(3, np.float32)}, path)


def lose_a_name(run: Path) -> None:
    for rank in range(2):
        path = run / f"checkpoint/rank_{rank}/llama_rank_{rank}-1_7.safetensors"
        tensors = load_file(path)
        del tensors["decoder.layers.2.mlp.linear_fc2.weight"]
        save_file(tensors, path)


def link_a_strategy(run: Path) -> None:
    path = run / "strategy/ckpt_strategy_rank_1.ckpt"
    path.rename(run.parent / "elsewhere.ckpt")
    path.symlink_to(run.parent / "elsewhere.ckpt")


RUINS: dict[str, tuple[Callable[[Path], None], str]] = {
    "replica": (ruin_a_replica, "decoder.final_layernorm.weight differs between its replicas"),
    "no strategy": (lambda run: shutil.rmtree(run / "strategy"), "--strategy FOLDER"),
    "strategy that is a link": (link_a_strategy, "a link that leads out of the folder"),
    "name that no strategy places": (add_a_name, "decoder.mystery.weight: no strategy file says how it is cut"),
    "missing": (lose_a_name, "missing: decoder.layers.2.mlp.linear_fc2.weight"),
    "rank": (lambda run: shutil.rmtree(run / "checkpoint/rank_0"), "give all ranks from 0 on"),
    "half of the ranks": (lambda run: shutil.rmtree(run / "checkpoint/rank_1"), "missing:|has the shape"),
}


@pytest.mark.parametrize("ruin", RUINS)
def test_a_run_that_is_not_whole_is_refused(ruin: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen3")
    write_ranks(tmp_path / "run", by_hand(source, "qwen3", "mindformers@2.0", 2), tp=2)
    spoil, words = RUINS[ruin]
    spoil(tmp_path / "run")
    message = refused("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", "mindformers", "--config", source)
    assert any(word in message for word in words.split("|")), message
    assert not (tmp_path / "back/config.json").exists()


def test_another_models_config_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    write_ranks(tmp_path / "run", by_hand(source, "llama-gqa", "mindformers@2.0", 2), tp=2)
    for other, words in (("llama-mqa", "has the shape"), ("qwen3", "missing"), ("gpt2", "no network for the family gpt2")):
        message = refused("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", "mindformers", "--config", tiny_folder(other))
        assert words in message


def test_the_version_in_a_manifest_counts(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    done("hf2ms", source, "-o", tmp_path / "tree", "--tp", 2, "--target", "mindformers-legacy@1.3-fused")
    for said in ("mindformers-legacy@1.8-fused", "mindformers", "ms-convert"):
        assert "its manifest says mindformers-legacy@1.3-fused" in refused(
            "ms2hf", tmp_path / "tree", "-o", tmp_path / "no", "--from", said
        )
    done("ms2hf", tmp_path / "tree", "-o", tmp_path / "back", "--from", "mindformers-legacy")
    assert_same_tensors(source, tmp_path / "back")


def test_without_from_a_checkpoint_that_has_no_manifest_is_refused_with_the_way(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", by_hand(tiny_folder("qwen2"), "qwen2", "mindformers@2.0", 1), tp=1)
    assert "--from DIALECT --config FILE" in refused("ms2hf", tmp_path / "run", "-o", tmp_path / "back")


def test_options_that_belong_together(tmp_path: Path) -> None:
    assert ms_convert("ms2hf", tmp_path, "-o", tmp_path / "x", "--config", tmp_path).code == 2
    assert ms_convert("ms2hf", tmp_path, "-o", tmp_path / "x", "--from", "mindformers").code == 2


def test_the_folder_of_the_config_is_not_written_over(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """With --overwrite it lost its config.json before that was read."""
    source = tiny_folder("qwen2")
    write_ranks(tmp_path / "run", by_hand(source, "qwen2", "mindformers-legacy@1.8", 1), tp=1)
    home = tmp_path / "home"
    shutil.copytree(source, home, ignore=shutil.ignore_patterns("*.safetensors"))
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    command = (tmp_path / "run", "--from", "mindformers-legacy", "--config", home, "--overwrite", "-o")
    assert "config.json is read and lies in the output folder" in refused("ms2hf", *command, home)
    assert "is read and lies in the output folder" in refused("translate", *command, home, "--target", "mindformers")
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before
    done("ms2hf", *command, home / "back")
    assert_same_tensors(source, home / "back")
    done("translate", *command, home / "translated", "--target", "mindformers")


def test_options_of_a_stranger_are_not_ignored_where_there_is_a_manifest(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    done("hf2ms", tiny_folder("qwen2"), "-o", tmp_path / "tree")
    ran = ms_convert("translate", tmp_path / "tree", "-o", tmp_path / "out", "--target", "mindformers", "--config", tmp_path)
    assert ran.code == 2 and "go with --from" in ran.err


def state_of(optimizer: str, name: str) -> list[str]:
    """What the optimizers of MindFormers (1.3.2, 1.8.0, 2.0.0: core/optim) and MindSpore's own name beside a parameter."""
    kinds = {
        "AdamW": ["adam_m.", "adam_v."],
        "AdamW, fused": ["exp_avg.", "exp_avg_sq.", "max_exp_avg_sq."],
        "Came": ["exp_avg.", "exp_avg_sq_", *(f"exp_avg_{kind}_{side}_" for kind in ("sq", "insta") for side in ("row", "col"))],
        "Muon": ["muon_m.", "adam_m.", "adam_v."],
        "PmaAdamW": ["adam_m.", "adam_v.", "pma_weight_ema.", "pma_weight_sma."],
        "Adam": ["moment1.", "moment2.", "vhat."],
        "Momentum": ["moments."],
        "SGD": ["accum.", "stat."],
    }
    return [kind + name for kind in kinds[optimizer]]


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, fused", "Came", "Muon", "PmaAdamW", "Adam", "Momentum", "SGD"])
@pytest.mark.parametrize(("variant", "target"), [("qwen3", "mindformers@2.0"), ("qwen2", "mindformers-legacy@1.8")])
def test_every_optimizers_state_is_left_out_with_its_count(
    optimizer: str, variant: str, target: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant)
    write_ranks(tmp_path / "run", by_hand(source, variant, target, 1), tp=1, beside=False)
    (path,) = (tmp_path / "run/checkpoint/rank_0").iterdir()
    weights = load_file(path)
    state = {name: weights[weight] for weight in weights for name in state_of(optimizer, weight)}
    save_file({**state, **weights}, path)
    command = ("ms2hf", tmp_path / "run", "-o", tmp_path / "back", "--from", target, "--config", source, "--json")
    (ignored,) = done(*command).facts["ignored"]
    assert (ignored["why"], ignored["count"]) == ("optimizer state", len(state))
    assert_same_tensors(source, tmp_path / "back")
