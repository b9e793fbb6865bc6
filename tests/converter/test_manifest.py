"""manifest.json: written whole, read back equal, and refused in every other state without harm."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from converter.manifest import MAX_ELEMENTS, is_plain_relative, read_manifest, write_manifest
from converter.ms2hf import HFOptions, plan_restoration
from mappings.errors import Refused
from tests.conftest import TinyFolder

MAX_PEAK_BYTES = 48 << 20
"""What a hostile manifest of some kilobytes may make the reader allocate; a good one takes 2 MB."""


@pytest.fixture(scope="module")
def tree(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest") / "slices"
    source = tiny_folder("llama-uneven-vocab-tied", num_hidden_layers=2, tokenizer=True)
    convert(plan_conversion(source, RankTreeOptions(tp=2, pp=2)), folder)
    return folder


@pytest.fixture(scope="module")
def good(tree: Path) -> Any:
    return json.loads((tree / "manifest.json").read_text(encoding="utf-8"))


@contextmanager
def replaced(tree: Path, data: Any) -> Iterator[None]:
    """The tree with another manifest, for a while."""
    path = tree / "manifest.json"
    original = path.read_bytes()
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(original)


def refusal(tree: Path, data: Any) -> str:
    with replaced(tree, data), pytest.raises(Refused) as caught:
        read_manifest(tree)
    assert all(str(tree) in problem.where and problem.mend for problem in caught.value.problems)
    return str(caught.value)


def changed(good: Any, change: Callable[[Any], object]) -> Any:
    data = copy.deepcopy(good)
    change(data)
    return data


def test_a_manifest_is_read_back_as_it_was_written(tree: Path, good: Any, tmp_path: Path) -> None:
    manifest = read_manifest(tree)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8")) == good
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_it_states_what_a_person_would_check_by_hand(tree: Path) -> None:
    manifest = read_manifest(tree)
    assert manifest.layout.layout().to_json() == {
        "tp": 2, "pp": 2, "dp": 1, "layers_per_stage": [1, 1], "vocab": 199, "padded_vocab": 256, "rank_order": "pp-dp-tp",
    }  # fmt: skip
    assert [(file.rank, file.stage, file.data, file.tensor, file.layers) for file in manifest.files] == [
        (0, 0, 0, 0, (0,)), (1, 0, 0, 1, (0,)), (2, 1, 0, 0, (1,)), (3, 1, 0, 1, (1,)),
    ]  # fmt: skip
    for file in manifest.files:
        assert (tree / file.path).stat().st_size == file.size
    assert {side.name for side in manifest.source.side_files} >= {"config.json", "1_Pooling/config.json", "README.md"}
    assert (manifest.model.vocab, manifest.model.padded_vocab) == (199, 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(layout_version=2), "layout version 2, this tool reads 1"),
        (lambda data: data.pop("layout_version"), "layout version null"),
        (lambda data: data.update(format="npz"), "manifest.format is 'npz'"),
        (lambda data: data["layout"].update(tp=0), "tp 0, pp 2, dp 1 is no layout"),
        (lambda data: data["layout"].update(tp=2**30, pp=2**30), "is no layout"),
        (lambda data: data["layout"].update(tp=4), "the files are not one for each rank"),
        (lambda data: data["layout"].update(layers_per_stage=[2]), "does not split the model's layers"),
        (lambda data: data["layout"].update(layers_per_stage=[3, -1]), "does not split the model's layers"),
        (lambda data: data["layout"].update(layers_per_stage=[2, 0]), "does not split the model's layers"),
        (lambda data: data["layout"].update(vocab=200), "the vocabulary sizes do not fit"),
        (lambda data: data["layout"].update(padded_vocab=198), "the vocabulary sizes do not fit"),
        (lambda data: data["layout"].update(padded_vocab=257), "the vocabulary sizes do not fit"),
        (lambda data: data["layout"].update(padded_vocab=258), "different padded vocabularies"),
        (lambda data: data["model"].update(layers=2**40), "sizes are out of range"),
        (lambda data: data["model"].update(kv_heads=0), "sizes are out of range"),
        (lambda data: data["model"].update(experts=2**40), "sizes are out of range"),
        (lambda data: data["files"].pop(), "the files are not one for each rank"),
        (lambda data: data["files"].reverse(), "the files are not one for each rank, in order"),
        (lambda data: data["files"][1].update(rank=0), "the files are not one for each rank"),
        (lambda data: data["files"][1].update(tensor=0), "wrong coordinates for rank 1"),
        (lambda data: data["files"][2].update(layers=[0]), "wrong coordinates for rank 2"),
        (lambda data: data["files"][1].update(path="rank_0/checkpoint_0.safetensors"), "is named for two ranks"),
        (lambda data: data["files"][1].update(path="../rank_1/checkpoint_1.safetensors"), "is no rank file's path"),
        (lambda data: data["files"][1].update(path="/etc/passwd"), "is no rank file's path"),
        (lambda data: data["files"][1].update(path="rank_1/checkpoint_1.ckpt"), "is no rank file's path"),
        (lambda data: data["files"][1].update(path="rank_١/checkpoint_1.safetensors"), "is no rank file's path"),
        (lambda data: data["files"][1]["tensors"].append(data["files"][1]["tensors"][0]), "twice"),
        (lambda data: data["files"][1]["tensors"][0].update(dtype="F33"), "no such tensor"),
        (lambda data: data["files"][1]["tensors"][0].update(shape=[-1, 5]), "no such tensor"),
        (lambda data: data["files"][1]["tensors"][0].update(shape=[MAX_ELEMENTS, 2]), "no such tensor"),
        (lambda data: data["files"][1]["tensors"][0].update(shape=[1] * 1000), "no such tensor"),
        (lambda data: data["files"][1]["tensors"][0].update(name="a\x1b[2J"), "is no tensor's name"),
        (lambda data: data["files"][1]["tensors"][0].update(name="x" * 5000), "is no tensor's name"),
        (lambda data: data["source"]["files"][0]["tensors"].append(data["source"]["files"][0]["tensors"][0]), "the source has two tensors"),
        (lambda data: data["source"]["files"][0].update(name="../model.safetensors"), "is no plain file name"),
        (lambda data: data["source"]["files"][0].update(name="a/model.safetensors"), "is no plain file name"),
        (lambda data: data["source"]["files"][0].update(name="config.json"), "the source has two files"),
        (lambda data: data["source"]["side_files"][0].update(name="/etc/passwd"), "is no relative path below huggingface/"),
        (lambda data: data["source"]["side_files"][0].update(name="a/../../b"), "is no relative path below huggingface/"),
        (lambda data: data["source"].update(index="model.safetensors.index.json"), "is not among the side files"),
        (lambda data: data["source"].update(side_files=[]), "'config.json' is not among the side files"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: Callable[[Any], object], words: str, tree: Path, good: Any) -> None:
    assert words in refusal(tree, changed(good, change))


def test_many_contradictions_are_one_screen(tree: Path, good: Any) -> None:
    def spoil(data: Any) -> None:
        for file in data["files"]:
            for tensor in file["tensors"]:
                tensor["dtype"] = "X"

    assert refusal(tree, changed(good, spoil)).count("no such tensor") == 40


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"layout_version": 1}', '{"layout_version": ' + "9" * 5000 + "}", "\ufeff{}"],
)
def test_what_is_no_manifest_is_refused(text: str, tree: Path) -> None:
    assert len(refusal(tree, text)) < 1000


def test_a_folder_without_a_manifest_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not a finished output of ms-convert"):
        read_manifest(tmp_path)
    with pytest.raises(Refused, match="no such folder"):
        read_manifest(tmp_path / "nowhere")


def test_a_manifest_that_is_too_large_or_elsewhere_is_not_opened(tree: Path, tmp_path: Path) -> None:
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 30)
    with opened() as paths, pytest.raises(Refused, match="larger than 512 MiB"):
        read_manifest(tmp_path)
    assert paths == []
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "manifest.json").symlink_to(tree / "manifest.json")
    with opened() as paths, pytest.raises(Refused, match="a link that leads out of the folder"):
        read_manifest(tmp_path / "inner")
    assert paths == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("config.json", True), ("1_Pooling/config.json", True), ("模型 说明.md", True), ("a..b/.c", True), ("", False), (".", False),
        ("..", False), ("a/../b", False), ("/a", False), ("a/", False), ("a//b", False), ("a\\b", False), ("a\0b", False), ("a\nb", False),
        ("\ud800", False), ("x" * 256, False), ("x/" * 600 + "x", False),
    ],
)  # fmt: skip
def test_only_a_relative_path_without_tricks_is_plain(name: str, plain: bool) -> None:
    assert is_plain_relative(name) is plain


class _Opened:
    """Every path that Python opens, as the interpreter's own audit reports it, while `paths` is set."""

    paths: list[str] | None = None

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is not None and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self.paths.append(os.fsdecode(arguments[0]))


_opened = _Opened()
sys.addaudithook(_opened.hook)


@contextmanager
def opened() -> Iterator[list[str]]:
    _opened.paths = []
    try:
        yield _opened.paths
    finally:
        _opened.paths = None


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**61, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd",
    "rank_0/../../../etc/passwd", "rank_9999999/checkpoint_0.safetensors", "rank_0/checkpoint_0.safetensors", "\ud800", "\x1b[2J",
    "{layer}", "F32", "I64", "F8_E4M3", "layers.0.mlp_norm.gamma", [], [0], [2**60, 2**60], [-1], ["x"], [[[]]], {}, {"x": 1}, {"a": "b"},
]  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[float, ...]]:
    """Where to go (fractions of each container's length), and what to do there."""
    return [
        (draw(st.integers(0, 3)), draw(st.integers(0, len(JUNK) - 1)), *(draw(st.floats(0, 1)) for _ in range(8)))
        for _ in range(draw(st.integers(1, 3)))
    ]


def mutated(good: Any, steps: list[tuple[float, ...]]) -> Any:
    data = copy.deepcopy(good)
    for action, junk, *turns in steps:
        place: Any = data
        key: Any = "model"
        for turn in turns:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = keys[min(int(turn * len(keys)), len(keys) - 1)]
            if not isinstance(place[key], (dict, list)) or not place[key]:
                break
            if turn != turns[-1]:
                place = place[key]
        if not place:
            continue
        if action == 0 and key in (place if isinstance(place, dict) else range(len(place))):
            del place[key]
        elif action == 1 and isinstance(place, list):
            place.append(copy.deepcopy(place[-1]))
        elif isinstance(place, dict) or key in range(len(place)):
            place[key] = copy.deepcopy(JUNK[int(junk)])
    return data


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=mutations())
def test_a_broken_manifest_is_refused_or_harmless(steps: list[tuple[float, ...]], tree: Path, good: Any) -> None:
    message = ""
    with replaced(tree, mutated(good, steps)):
        tracemalloc.start()
        try:
            with opened() as paths:
                plan_restoration(tree, HFOptions())
        except Refused as refused:
            message = str(refused)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert message.replace("\n", "").isprintable()
    assert len(message) < 50_000
    library = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2] / "mappings"))
    assert [path for path in paths if not path.startswith((str(tree), *library))] == []
    assert peak < MAX_PEAK_BYTES


@pytest.mark.parametrize(
    ("sizes", "experts"), [({"layers": 1_000}, False), ({"layers": 10_000, "experts": 100_000, "expert_ffn": 8}, True)]
)
def test_a_small_manifest_cannot_name_millions_of_tensors(
    sizes: dict[str, int], experts: bool, tree: Path, good: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mappings.expand.MAX_NAMES", 20_000)
    data = changed(good, lambda data: data["model"].update(sizes))
    data["layout"].update(tp=1, pp=1, dp=1, layers_per_stage=[sizes["layers"]])
    data["files"] = [data["files"][0] | {"layers": list(range(sizes["layers"]))}]
    if experts:
        data["table"] += '\n[[rule]]\nhf = "e.{layer}.{expert}"\nms = "layers.{layer}.mlp.experts.up_proj"\n'
    with replaced(tree, data), pytest.raises(Refused) as caught:
        plan_restoration(tree, HFOptions())
    assert "has too many tensors" in str(caught.value) if experts else "does not hold the model" in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_a_table_in_a_manifest_is_checked_like_any_other(tree: Path, good: Any, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "slices")
    for text in ("rule = 3", "x = " + "9" * 5000, "x" + ".x" * 10_000 + " = 1", good["table"] + "\nhidden = " + "(" * 500):
        with replaced(tmp_path / "slices", good | {"table": text}), pytest.raises(Refused) as caught:
            plan_restoration(tmp_path / "slices", HFOptions())
        assert "manifest.json: table" in str(caught.value)
