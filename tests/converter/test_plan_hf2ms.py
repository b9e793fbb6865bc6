"""The plan of a rank tree: every element once, everything accounted for, and no contradiction guessed away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from converter.derived import check_not_carried
from converter.hf_folder import read_hf_folder
from converter.layout import ParallelLayout, make_layout
from converter.plan import Plan
from converter.plan_hf2ms import RankTreePlan, plan_rank_tree
from converter.source_model import SourceModel, understand
from converter.strided import check_cover
from mappings.errors import Refused
from mappings.tables import bundled_table
from tests.conftest import TinyFolder
from tests.converter.planned import Arrays
from tests.tiny_models import VARIANTS

STAGES = {1: (4,), 2: (3, 1), 3: (1, 2, 1)}


def layout_of(source: SourceModel, tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelLayout:
    stages = STAGES[pp] if source.config.layers == 4 else None
    return make_layout(source.config, source.expansion, tp=tp, pp=pp, dp=dp, layers_per_stage=stages)


def planned(source: SourceModel, tp: int = 1, pp: int = 1, dp: int = 1, **options: Any) -> RankTreePlan:
    return plan_rank_tree(source, layout_of(source, tp, pp, dp), **({"file_format": "safetensors"} | options))


def changed(
    folder: Path, target: Path, change: Callable[[Arrays], object] = lambda tensors: None, drop_keys: tuple[str, ...] = (), **config: Any
) -> Path:
    """A copy of a folder with one file, its tensors and its config changed."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    data = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    (target / "config.json").write_text(json.dumps({key: data[key] for key in data if key not in drop_keys}), encoding="utf-8")
    return target


def refusal(folder: Path, tied: bool | None = None) -> Refused:
    """How a folder is refused, from headers or, for what would not be carried, from values."""
    with pytest.raises(Refused) as caught:
        check_not_carried(understand(read_hf_folder(folder), tied=tied))
    return caught.value


def elements_read(plan: Plan) -> dict[str, np.ndarray[Any, Any]]:
    """For each source tensor, which of its elements some copy reads."""
    read: dict[str, np.ndarray[Any, Any]] = {}
    for copy in {id(copy): copy for file in plan.files for tensor in file.tensors for copy in tensor.copies}.values():
        marks = read.setdefault(copy.source.name, np.zeros(copy.source.elements, bool))
        np.lib.stride_tricks.as_strided(marks[copy.source_offset :], copy.shape, copy.source_strides)[...] = True
    return read


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_target_element_is_written_once_and_every_source_element_read(variant: str, tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder(variant)))
    for tp in (1, 2, 4):
        for pp in (1, 2, 3):
            tree = planned(source, tp, pp)
            assert [file.path for file in tree.plan.files] == [f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in range(tp * pp)]
            targets = {id(tensor): tensor for file in tree.plan.files for tensor in file.tensors}
            assert [problem for tensor in targets.values() for problem in check_cover(tensor)] == []
            read = elements_read(tree.plan)
            assert read.keys() == source.expansion.hf_shapes.keys() or {f"{source.table.prefix}{name}" for name in read} == set(
                source.expansion.hf_shapes
            )
            assert all(marks.all() for marks in read.values())


@pytest.mark.parametrize("variant", ["llama-uneven-vocab-tied", "gpt2", "qwen3", "bert-mlm"])
def test_each_stage_holds_its_layers_and_its_end_of_the_model(variant: str, tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder(variant)))
    layout = layout_of(source, 2, 3)
    tree = plan_rank_tree(source, layout, file_format="safetensors")
    parameters = source.expansion.parameters
    held: dict[int, set[str]] = {}
    for rank, file in enumerate(tree.plan.files):
        stage = layout.coordinates(rank).stage
        names = [tensor.name for tensor in file.tensors]
        assert held.setdefault(stage, set(names)) == set(names)
        assert [layer for name in names if (layer := parameters[name].layer) is not None] == sorted(
            parameters[name].layer or 0 for name in names if parameters[name].layer is not None
        )
    layers = {stage: {parameters[name].layer for name in names} - {None} for stage, names in held.items()}
    assert layers == {0: {0}, 1: {1, 2}, 2: {3}}
    twice = (held[0] & held[2]) | (held[0] & held[1]) | (held[1] & held[2])
    assert {parameters[name].parameter.role for name in twice} == ({"embedding"} if source.config.tied else set())
    assert held[0] | held[1] | held[2] == set(parameters)


def test_data_parallel_ranks_are_links_to_the_file_of_the_first(tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder("llama-gqa")))
    tree = planned(source, 2, 2, 3)
    assert dict(tree.links) == {
        f"rank_{copy}/checkpoint_{copy}.safetensors": f"rank_{first}/checkpoint_{first}.safetensors"
        for first, copies in {0: (2, 4), 1: (3, 5), 6: (8, 10), 7: (9, 11)}.items()
        for copy in copies
    }
    assert len(tree.plan.files) == 4
    assert list(tree.files_of_rank) == list(range(12))


def test_only_the_ranks_asked_for_are_planned_each_as_in_the_whole(tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder("llama-gqa")))
    whole, part = planned(source, 2, 2, 2), planned(source, 2, 2, 2, ranks=[6, 3, 3])
    assert list(part.files_of_rank) == [3, 6]
    assert part.links == ()
    assert [file.tensors for file in part.plan.files] == [whole.plan.files[1].tensors, whole.plan.files[2].tensors]
    for ranks in ([8], [-1], []):
        with pytest.raises(Refused, match="--ranks does not fit the layout") as caught:
            planned(source, 2, 2, 2, ranks=ranks)
        assert caught.value.problems[0].mend == "this layout has the ranks 0-7"


def test_headers_say_the_run_and_the_rank_and_ckpt_has_none(tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder("gpt2")))
    tree = planned(source, 2, run="abc")
    assert [dict(file.metadata)["rank"] for file in tree.plan.files] == ["0", "1"]
    assert {dict(file.metadata)["ms_convert_run"] for file in tree.plan.files} == {"abc"}
    assert all(file.metadata == () and file.format == "ckpt" for file in planned(source, 2, file_format="ckpt", run="abc").plan.files)


@pytest.mark.parametrize(("dtype", "expected"), [("keep", {"BF16", "F32"}), ("fp16", {"F16"}), ("fp32", {"F32"})])
def test_every_tensor_keeps_its_dtype_unless_another_is_asked_for(
    dtype: str, expected: set[str], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    def halve(tensors: Arrays) -> None:
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    source = understand(read_hf_folder(changed(tiny_folder("llama-gqa"), tmp_path / "half", halve)))
    tensors = [tensor for file in planned(source, 2, dtype=dtype).plan.files for tensor in file.tensors]
    assert {tensor.dtype for tensor in tensors} == expected
    if dtype == "keep":
        assert all((tensor.dtype == "F32") == ("norm" in tensor.name) for tensor in tensors)


def test_missing_unexpected_and_misshapen_tensors_are_told_at_once_and_folded(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def spoil(tensors: Arrays) -> None:
        for layer in (0, 1, 3):
            del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight.bak"] = np.ones(2, np.float32)
        tensors["x.model.norm.weight"] = tensors["model.norm.weight"].copy()
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] = np.ones((16, 64), np.float32)
            tensors[f"model.layers.{layer}.attn.bias"] = np.ones(2, np.float32)

    refused = refusal(changed(tiny_folder("llama-gqa"), tmp_path / "spoiled", spoil))
    what = [problem.what for problem in refused.problems]
    assert "missing: model.layers.{0..1,3}.mlp.up_proj.weight" in what
    assert "unexpected: model.layers.2.mlp.up_proj.weight.bak" in what
    assert "unexpected: x.model.norm.weight" in what
    assert "unexpected: model.layers.{0..3}.attn.bias" in what
    assert any(
        text.startswith("model.layers.{0..3}.self_attn.k_proj.weight has the shape [16, 64], the config says [32, 64]") for text in what
    )
    assert len(what) == 5
    assert all(problem.mend for problem in refused.problems)


def test_every_unexpected_tensor_is_in_the_refusal(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def add(tensors: Arrays) -> None:
        tensors |= {f"extra_{index}": np.ones(2, np.float32) for index in range(100)}

    problems = refusal(changed(tiny_folder("gpt2"), tmp_path / "more", add)).problems
    assert len(problems) == 100


def test_weights_in_fp8_are_refused_by_their_type(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    folder = changed(tiny_folder("llama-gqa"), tmp_path / "fp8")
    tensors = load_torch(folder / "model.safetensors")
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_torch(tensors, folder / "model.safetensors")
    what = [problem.what for problem in refusal(folder).problems]
    assert what == ["unexpected: model.layers.{0..3}.mlp.up_proj.weight_scale_inv", "model.layers.{0..3}.mlp.up_proj.weight is F8_E4M3"]


def test_a_tensor_with_and_without_its_prefix_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def double(tensors: Arrays) -> None:
        tensors["wte.weight"] = tensors["transformer.wte.weight"].copy()

    refused = refusal(changed(tiny_folder("gpt2"), tmp_path / "double", double))
    assert "'transformer.wte.weight' is there twice, with and without its prefix" in str(refused)


def test_a_table_that_serves_another_architecture_is_refused(tiny_folder: TinyFolder) -> None:
    with pytest.raises(Refused, match=r"serves Qwen2ForCausalLM, Qwen2Model, not LlamaForCausalLM"):
        understand(read_hf_folder(tiny_folder("llama-gqa")), bundled_table("qwen2"))


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", ["LlamaForCausalLM", "X"], [3], ["FalconForCausalLM"]])
def test_an_architecture_that_is_unknown_or_unclear_is_refused(architectures: Any, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    message = str(refusal(changed(tiny_folder("llama-gqa"), tmp_path / "model", architectures=architectures)))
    assert "must name the model's one class" in message or "no rule table serves the architecture 'FalconForCausalLM'" in message


def head(tensors: Arrays, value: Any = None) -> None:
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    tensors["lm_head.weight"] = tensors[embedding].copy() if value is None else value


def without_head(tensors: Arrays) -> None:
    del tensors["lm_head.weight"]


def test_an_untied_config_without_a_head_in_the_file_is_a_contradiction(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = changed(tiny_folder("qwen2"), tmp_path / "model", without_head)
    refused = refusal(folder)
    assert "config.json says that the embeddings are not tied, yet no file holds 'lm_head.weight'" in str(refused)
    assert "--tie-embeddings" in refused.problems[0].mend
    source = understand(read_hf_folder(folder), tied=True)
    assert source.config.tied
    assert "lm_head.weight" not in source.expansion.parameters
    assert "missing: lm_head.weight" in [problem.what for problem in refusal(folder, tied=False).problems]


def test_a_tied_config_with_an_equal_head_drops_it_and_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = understand(read_hf_folder(changed(tiny_folder("qwen3-tied"), tmp_path / "model", head)))
    check_not_carried(source)
    assert source.duplicates == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {tensor.name for file in planned(source, 2).plan.files for tensor in file.tensors}


@pytest.mark.parametrize("elements", [1, 16384])
def test_a_tied_config_with_another_head_is_refused_until_somebody_chooses(elements: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def other_head(tensors: Arrays) -> None:
        head(tensors)
        tensors["lm_head.weight"].reshape(-1)[-elements:] += 0.5

    folder = changed(tiny_folder("llama-tied"), tmp_path / "model", other_head)
    refused = refusal(folder)
    assert "lm_head.weight differs from model.embed_tokens.weight" in str(refused)
    assert "--no-tie-embeddings" in refused.problems[0].mend
    source = understand(read_hf_folder(folder), tied=False)
    check_not_carried(source)
    assert "lm_head.weight" in source.expansion.parameters


def test_a_head_of_another_shape_or_dtype_than_the_tied_embedding_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    for index, value in enumerate((np.ones((3, 64), np.float32), np.ones((256, 64), np.float16))):
        folder = changed(tiny_folder("gpt2"), tmp_path / str(index), lambda tensors, value=value: head(tensors, value))  # type: ignore[misc]
        assert "lm_head.weight differs from transformer.wte.weight" in str(refusal(folder))


def test_an_untied_head_that_happens_to_equal_the_embedding_is_kept(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = understand(read_hf_folder(changed(tiny_folder("llama-gqa"), tmp_path / "model", head)))
    check_not_carried(source)
    assert not source.duplicates
    assert "lm_head.weight" in source.expansion.parameters


@pytest.mark.parametrize(("pp", "holders"), [(1, [0]), (3, [0, 2])])
def test_a_tied_embedding_is_where_the_head_needs_it(pp: int, holders: list[int], tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder("llama-tied")))
    files = planned(source, 1, pp).plan.files
    embeddings = {
        rank: tensor for rank, file in enumerate(files) for tensor in file.tensors if tensor.name == "embedding.tokens.embedding_table"
    }
    assert list(embeddings) == holders
    assert len({id(tensor) for tensor in embeddings.values()}) == 1


@pytest.mark.parametrize(("value", "right"), [(-1e4, True), (-65504.0, True), (-1e3, False), (1e4, False)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_masked_bias_may_be_rounded_to_the_model_s_type(
    dtype: Any, value: float, right: bool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    def bias(tensors: Arrays) -> None:
        tensors["transformer.h.1.attn.masked_bias"] = np.array(value, dtype)

    folder = changed(tiny_folder("gpt2"), tmp_path / "model", bias)
    if right:
        check_not_carried(understand(read_hf_folder(folder)))
    else:
        assert "transformer.h.1.attn.masked_bias" in str(refusal(folder))


def test_a_wrong_derived_buffer_is_refused_and_a_right_one_listed(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def buffers(tensors: Arrays, wrong: bool) -> None:
        for layer in range(4):
            mask = np.tri(64, dtype=bool)[None, None]
            tensors[f"transformer.h.{layer}.attn.bias"] = ~mask if wrong and layer % 2 else mask
            tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)

    source = understand(read_hf_folder(changed(tiny_folder("gpt2"), tmp_path / "right", lambda tensors: buffers(tensors, False))))
    check_not_carried(source)
    assert len(source.dropped) == 8
    assert all(drop.why for drop in source.dropped.values())
    refused = refusal(changed(tiny_folder("gpt2"), tmp_path / "wrong", lambda tensors: buffers(tensors, True)))
    assert [problem.what.split(" would")[0] for problem in refused.problems] == ["transformer.h.{1,3}.attn.bias"]
