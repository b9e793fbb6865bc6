"""Damaged and hostile files on the command line: each is refused in one screen or converted rightly, and nothing is written elsewhere."""

from __future__ import annotations

import copy
import json
import resource
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.converter.command_line import assert_same_folder, assert_same_tensors, files_of, ms_convert
from tests.converter.stored_bytes import damaged
from tests.tiny_models import save_tiny

EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
MOST_MEMORY = 400 << 10  # KiB that all examples together may add to the process
INDEX = "model.safetensors.index.json"
Content = dict[str, bytes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """A model of a few kilobytes with an index, as name -> bytes."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    return content_of(save_tiny(tmp_path_factory.mktemp("fuzz") / "model", "llama-gqa", max_shard_size="8KB", **sizes))


@pytest.fixture(scope="module", params=["safetensors", "ckpt"])
def slices(request: pytest.FixtureRequest, model: Content, tmp_path_factory: pytest.TempPathFactory) -> Content:
    """Its rank tree, as name -> bytes."""
    root = tmp_path_factory.mktemp("fuzz")
    source = written(model, root / "model")
    assert ms_convert("hf2ms", source, "-o", root / "slices", "--tp", 2, "--pp", 2, "--format", request.param).code == 0
    return content_of(root / "slices")


@pytest.fixture(scope="module", autouse=True)
def _memory_is_bounded() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY


def content_of(folder: Path) -> Content:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def written(content: Content, folder: Path) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**40, 0.5, 1e308, float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "..",
    "a/../../x", "\ud800", "\x1b[31m", "\0", "ä" * 5000, [], [[]], [1] * 2000, {}, {"": {}}, [None], "F32", "llama", "model.norm.weight",
]  # fmt: skip

odd = st.sampled_from(ODD).map(copy.deepcopy)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(entries):
        yield value, key
        yield from places(item)


@st.composite
def edited(draw: st.DrawFn, original: bytes) -> bytes:
    """JSON with some of its values replaced, moved, repeated or taken out; now and then damaged as bytes besides."""
    value = copy.deepcopy(json.loads(original))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(places({"": value}))))
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "swap"])):
            case "remove" if container[key] is not value:
                del container[key]
            case "add" if isinstance(container[key], dict):
                container[key][draw(st.sampled_from(["x", "", "../x", "__metadata__", "a.0.b"]))] = draw(odd)
            case "add" if isinstance(container[key], list):
                container[key].append(draw(odd))
            case "swap" if isinstance(container, dict) and container[key] is not value:
                other = draw(st.sampled_from(sorted(container)))
                container[key], container[other] = container[other], container[key]
            case _:
                if container[key] is value:
                    value = draw(odd)
                else:
                    container[key] = draw(odd)
    return json.dumps(value).encode()


def either(original: bytes, until: int = 4000) -> st.SearchStrategy[bytes]:
    return st.one_of(edited(original), damaged(original, until))


@st.composite
def header_edited(draw: st.DrawFn, original: bytes) -> bytes:
    """A safetensors file whose header was edited as JSON, its length mended so that the rest is found."""
    start = 8 + int.from_bytes(original[:8], "little")
    header = draw(edited(original[8:start]))
    return len(header).to_bytes(8, "little") + header + original[start:]


def converts_rightly_or_is_refused(content: Content, compare: Callable[[Path, Path], None], *options: object) -> None:
    """hf2ms, and ms2hf if that succeeds: what comes back must be what went in."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = written(content, root / "deep" / "model")
        ran = ms_convert("hf2ms", source, "-o", root / "deep" / "out", "--tp", 2, *options)
        assert ran.code in (0, 1) and (ran.code == 0 or ran.err.startswith("refused:"))
        assert ms_convert("inspect", source).code in (0, 1)
        if ran.code == 0:
            back = ms_convert("ms2hf", root / "deep" / "out", "-o", root / "deep" / "back")
            assert back.code == 0, back.err
            compare(source, root / "deep" / "back")
        else:
            assert not (root / "deep" / "out").exists()
        assert {path.name for path in root.iterdir()} == {"deep"}
        assert {path.name for path in (root / "deep").iterdir()} <= {"model", "out", "back"}
        assert content_of(source) == content


@EXAMPLES
@given(data=st.data())
def test_a_damaged_config(data: st.DataObject, model: Content) -> None:
    converts_rightly_or_is_refused(model | {"config.json": data.draw(either(model["config.json"]))}, assert_same_folder)


@EXAMPLES
@given(data=st.data())
def test_a_damaged_index(data: st.DataObject, model: Content) -> None:
    converts_rightly_or_is_refused(model | {INDEX: data.draw(either(model[INDEX]))}, assert_same_folder)


@EXAMPLES
@given(data=st.data())
def test_a_damaged_weight_file(data: st.DataObject, model: Content) -> None:
    name = data.draw(st.sampled_from(sorted(name for name in model if name.endswith(".safetensors"))))
    changed = data.draw(st.one_of(header_edited(model[name]), damaged(model[name], 1500)))
    file_format = data.draw(st.sampled_from(["safetensors", "ckpt"]))
    converts_rightly_or_is_refused(model | {name: changed}, assert_same_tensors, "--format", file_format)


@EXAMPLES
@given(data=st.data())
def test_a_damaged_rule_table(data: st.DataObject, model: Content) -> None:
    table = files("mappings").joinpath("families/llama.toml").read_bytes()
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data.draw(damaged(table, len(table))))
        file.flush()
        converts_rightly_or_is_refused(model, assert_same_folder, "--rules", file.name)
        assert ms_convert("rules", "--rules", file.name).code in (0, 1)


def comes_back_rightly_or_is_refused(content: Content, model: Content, compare: Callable[[Path, Path], None]) -> None:
    """ms2hf and inspect of a damaged tree."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tree = written(content, root / "deep" / "slices")
        ran = ms_convert("ms2hf", tree, "-o", root / "deep" / "back")
        assert ran.code in (0, 1) and (ran.code == 0 or ran.err.startswith("refused:"))
        assert ms_convert("inspect", tree).code in (0, 1)
        assert ms_convert("inspect", tree / "rank_0" / next(iter(files_of(tree / "rank_0")))).code in (0, 1)
        if ran.code == 0:
            compare(written(model, root / "expected"), root / "deep" / "back")
        else:
            assert not (root / "deep" / "back" / "config.json").exists()
        assert {path.name for path in root.iterdir()} <= {"deep", "expected"}
        assert {path.name for path in (root / "deep").iterdir()} <= {"slices", "back"}
        assert content_of(tree) == content


def nothing(_: Path, __: Path) -> None:
    """An edited manifest may tell of another model; what it says is then what is written."""


@EXAMPLES
@given(data=st.data())
def test_a_damaged_manifest(data: st.DataObject, slices: Content, model: Content) -> None:
    comes_back_rightly_or_is_refused(slices | {"manifest.json": data.draw(either(slices["manifest.json"], 20_000))}, model, nothing)


@EXAMPLES
@given(data=st.data())
def test_a_damaged_rank_file(data: st.DataObject, slices: Content, model: Content) -> None:
    name = data.draw(st.sampled_from(sorted(name for name in slices if name.startswith("rank_"))))
    strategy = damaged(slices[name], len(slices[name]))
    changed = data.draw(st.one_of(header_edited(slices[name]), strategy) if name.endswith(".safetensors") else strategy)
    comes_back_rightly_or_is_refused(slices | {name: changed}, model, assert_same_folder)


@EXAMPLES
@given(data=st.data())
def test_a_damaged_record_of_progress(data: st.DataObject, model: Content) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source, out = written(model, root / "model"), root / "deep" / "out"
        assert ms_convert("hf2ms", source, "-o", out, "--tp", 2, "--ranks", 0).code == 0
        record = out / ".ms-convert" / data.draw(st.sampled_from(["run.json", "file-rank_0-checkpoint_0.safetensors.json"]))
        record.write_bytes(data.draw(either(record.read_bytes())))
        ran = ms_convert("hf2ms", source, "-o", out, "--tp", 2)
        if record.name != "run.json":
            assert ran.code == 0
        if ran.code == 0:
            assert ms_convert("ms2hf", out, "-o", root / "deep" / "back").code == 0
            assert_same_folder(source, root / "deep" / "back")
        else:
            assert "--overwrite" in ran.err
        assert {path.name for path in root.iterdir()} == {"model", "deep"}
