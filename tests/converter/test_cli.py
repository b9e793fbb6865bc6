"""The command line as a user meets it: exit codes, help, JSON, dry runs, one-screen errors, safe printing, and what it never touches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from converter import display
from converter.partial_files import hidden_temporary
from tests.conftest import TinyFolder
from tests.converter.command_line import REPOSITORY, assert_same_folder, done, files_of, in_process, ms_convert, refused
from tests.tiny_models import save_tiny

COMMANDS = ("hf2ms", "ms2hf", "inspect", "families", "rules")
FRAMEWORKS = ("mindspore", "torch", "transformers")


@pytest.fixture(scope="session")
def slices(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank tree, read-only by agreement."""
    out = tmp_path_factory.mktemp("slices") / "out"
    done("hf2ms", tiny_folder("llama-uneven-vocab-tied", tokenizer=True), "-o", out, "--tp", 2, "--pp", 2)
    return out


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after this code."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    return {name.partition(".")[0] for name in ran.stderr.splitlines()}


def test_help_imports_nothing_heavy() -> None:
    loaded = modules_after("from converter.cli import run; assert run(['--help']) == 0")
    assert "click" in loaded
    assert not loaded & {*FRAMEWORKS, "numpy", "rich", "safetensors", "ml_dtypes", "xxhash", "jinja2"}


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
def test_a_conversion_of_safetensors_imports_no_framework(file_format: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out, back = tiny_folder("llama-gqa"), tmp_path / "slices", tmp_path / "back"
    code = (
        f"from converter.cli import run\n"
        f"assert run(['hf2ms', {str(source)!r}, '-o', {str(out)!r}, '--tp', '2', '--format', {file_format!r}, '--dtype', 'bf16']) == 0\n"
        f"assert run(['ms2hf', {str(out)!r}, '-o', {str(back)!r}]) == 0\n"
        f"assert run(['inspect', {str(out)!r}]) == 0"
    )
    loaded = modules_after(code)
    assert "numpy" in loaded and not loaded & set(FRAMEWORKS)


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS)])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help_with_examples(command: tuple[str, ...], option: str) -> None:
    ran = done(*command, option)
    assert ran.out.startswith("Usage: ms-convert") and ran.err == ""
    assert f"  ms-convert {' '.join(command)}".rstrip() in ran.out.partition("Examples:")[2]


WRONG_CALLS: list[tuple[str, ...]] = [
    ("nonsense",),
    ("hf2ms",),
    ("hf2ms", "MODEL"),
    ("ms2hf", "SLICES"),
    ("hf2ms", "MODEL", "-o", "OUT", "--tp", "0"),
    ("hf2ms", "MODEL", "-o", "OUT", "--tp", "two"),
    ("hf2ms", "MODEL", "-o", "OUT", "--format", "gguf"),
    ("hf2ms", "MODEL", "-o", "OUT", "--dtype", "fp8"),
    ("hf2ms", "MODEL", "-o", "OUT", "--ranks", "3-1"),
    ("hf2ms", "MODEL", "-o", "OUT", "--ranks", "1,,2"),
    ("hf2ms", "MODEL", "-o", "OUT", "--ranks", "0-99999999"),
    ("hf2ms", "MODEL", "-o", "OUT", "--layers-per-stage", "1,x"),
    ("hf2ms", "MODEL", "-o", "OUT", "--rules", "no-such-file.toml"),
    ("hf2ms", "MODEL", "-o", "OUT", "--workers", "0"),
    ("inspect", "no-such-path"),
    ("rules",),
    ("rules", "llama", "--rules", "x"),
]


@pytest.mark.parametrize("call", WRONG_CALLS, ids=" ".join)
def test_a_wrong_call_exits_with_2_and_says_how_to_call(call: tuple[str, ...]) -> None:
    ran = ms_convert(*call)
    assert ran.code == 2 and ran.out == "" and "Traceback" not in ran.err
    assert "Error: " in ran.err


def test_without_a_command_it_shows_its_help() -> None:
    ran = ms_convert()
    assert ran.code == 2 and "Examples:" in ran.out + ran.err


def test_a_refusal_is_one_screen_without_traceback_and_with_debug_has_one(tmp_path: Path) -> None:
    plain = in_process("hf2ms", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert plain.code == 1 and plain.out == ""
    assert plain.err.splitlines()[0] == "refused: no such folder" and "Traceback" not in plain.err
    debug = in_process("hf2ms", tmp_path / "nowhere", "-o", tmp_path / "out", "--debug")
    assert debug.code == 1 and "Traceback" in debug.err and "no such folder" in debug.err


def test_a_defect_is_called_one_and_its_traceback_comes_with_debug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from converter import cli, hf2ms

    def broken(*_: object) -> None:
        raise KeyError("[bold]inside[/bold]")

    monkeypatch.setattr(hf2ms, "plan_conversion", broken)
    assert cli.run(["hf2ms", str(tmp_path), "--dry-run"]) == 1
    with pytest.raises(KeyError):
        cli.run(["hf2ms", str(tmp_path), "--dry-run", "--debug"])


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "bert"])
def test_every_family_is_listed_and_its_table_can_be_read(family: str) -> None:
    entry = next(entry for entry in done("families", "--json").facts if entry["family"] == family)
    assert entry["architectures"] and entry["rules"] > 5 and entry["description"]
    shown = done("families").out
    assert all(name in shown for name in [family, *entry["architectures"]])
    facts = done("rules", family, "--json").facts
    table = done("rules", family).out
    for rule in facts["rules"]:
        assert {"hf", "hf_axes", "ms", "ms_axes", "cut", "stage", "role", "when", "layers", "part"} <= rule.keys()
        assert rule["ms"] in table and rule["hf"][0] in table


def test_a_family_that_is_not_bundled_names_those_that_are() -> None:
    message = refused("rules", "falcon")
    assert "falcon" in message and "llama" in message


HF2MS_FACTS = {
    "command", "model", "family", "table", "layout", "format", "dtype", "parameters", "source", "ranks", "dropped", "duplicates", "padded",
    "replicated", "side_files", "left", "notes", "needs", "bytes_by_dtype",
}  # fmt: skip
MS2HF_FACTS = {
    "command", "rank_tree", "family", "layout", "files", "not_restored", "side_files", "renamed", "needs", "bytes_by_dtype",
}  # fmt: skip
RESULT = {"output", "finished", "files_written", "bytes_written", "seconds", "missing_ranks", "notes"}


def test_json_of_a_conversion_says_all_that_the_plan_and_the_run_know(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-uneven-vocab-tied", tokenizer=True), tmp_path / "out"
    plan = done("hf2ms", source, "--tp", 2, "--pp", 2, "--dry-run", "--json").facts
    assert plan.keys() >= HF2MS_FACTS and "result" not in plan
    ran = done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--json")
    assert ran.err == "" and ran.facts.keys() >= HF2MS_FACTS and ran.facts["result"].keys() == RESULT
    assert {key: ran.facts[key] for key in plan} == plan
    written = [path.stat().st_size for path in sorted(out.glob("rank_*/*"))]
    assert ran.facts["result"]["bytes_written"] == sum(written) and ran.facts["result"]["files_written"] == len(written) == 4
    assert [fact["rank"] for fact in plan["ranks"]] == [0, 1, 2, 3]
    assert [fact["layers"] for fact in plan["ranks"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert {entry["name"] for entry in plan["padded"]} == {"embedding.tokens.embedding_table"}
    back = done("ms2hf", out, "-o", tmp_path / "back", "--json")
    assert back.facts.keys() >= MS2HF_FACTS and back.facts["result"].keys() == RESULT and back.err == ""
    assert back.facts["side_files"] and back.facts["needs"].keys() == {"disk", "memory", "workers"}


def test_the_stated_need_of_disk_is_what_is_used(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("gpt2", tokenizer=True), tmp_path / "out"
    stated = done("hf2ms", source, "-o", out, "--tp", 4, "--json").facts["needs"]["disk"]
    used = sum((out / name).stat().st_size for name in files_of(out) if name.startswith(("rank_", "huggingface")))
    assert stated <= used < stated + 4 * 20_000, "the rest is headers"


def test_inspect_tells_what_each_thing_is(tiny_folder: TinyFolder, slices: Path) -> None:
    source = tiny_folder("llama-uneven-vocab-tied", tokenizer=True)
    kinds = {
        source: "Hugging Face folder",
        slices: "rank tree",
        slices / "rank_0" / "checkpoint_0.safetensors": "safetensors",
        slices / "strategy" / "ckpt_strategy_rank_0.ckpt": "strategy",
    }
    for path, kind in kinds.items():
        facts = done("inspect", path, "--json").facts
        assert kind in facts["kind"] and facts["path"] == str(path)
        assert kind in done("inspect", path).out
    facts = done("inspect", source, "--json").facts
    assert facts["family"] == "llama" and facts["architectures"] == ["LlamaForCausalLM"] and facts["model"]["vocab"] == 199
    facts = done("inspect", slices, "--json").facts
    assert facts["layout"]["tp"] == facts["layout"]["pp"] == 2 and facts["layout"]["padded_vocab"] == 256
    shown = done("inspect", source).out
    assert "model.layers.{0..3}.self_attn.q_proj.weight" in shown
    assert "model.layers.2.self_attn.q_proj.weight" in done("inspect", source, "--all").out


def test_inspect_shows_a_folder_that_cannot_be_converted_and_why(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama")
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["FalconForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    facts = done("inspect", source, "--json").facts
    assert facts["family"] is None and "FalconForCausalLM" in facts["problem"] and len(facts["tensors"]) == 39
    assert "FalconForCausalLM" in done("inspect", source).out


def test_inspect_of_a_ckpt_of_ours(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    done("hf2ms", tiny_folder("qwen3", dtype=torch.bfloat16), "-o", tmp_path / "out", "--format", "ckpt")
    facts = done("inspect", tmp_path / "out" / "rank_0" / "checkpoint_0.ckpt", "--json").facts
    assert "MindSpore checkpoint" in facts["kind"] and facts["bytes_by_dtype"].keys() == {"BF16"}


def test_a_dry_run_writes_nothing_and_opens_no_output(tiny_folder: TinyFolder, slices: Path, tmp_path: Path) -> None:
    before = files_of(slices)
    done("hf2ms", tiny_folder("gpt2"), "-o", tmp_path / "out", "--dry-run")
    done("ms2hf", slices, "-o", tmp_path / "back", "--dry-run")
    done("ms2hf", slices, "--dry-run")
    assert not list(tmp_path.iterdir()) and files_of(slices) == before


HOSTILE = [
    "[bold red]w[/]",
    "[/nothing]",
    "[link=https://example.org]click[/link]",
    "name with «quotes» and 中文",
    "a.{layer}.b",
    "${HOME}",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_with_markup_is_printed_as_it_stands(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({name: torch.ones(3), f"{name}.4.x": torch.ones(2, 2)}, path)
    assert name in done("inspect", path, "--all").out
    assert [tensor["name"] for tensor in done("inspect", path, "--json").facts["tensors"]].count(name) == 1
    source = save_tiny(tmp_path / "model", "gpt2")
    save_file({name: torch.ones(3)}, source / "model.safetensors")
    assert f"unexpected: {name}" in refused("hf2ms", source, "-o", tmp_path / "out")


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "\x07bell", "a\u202egnp.exe", "\u2028", ""])
def test_a_name_with_control_characters_never_reaches_the_terminal(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({name: torch.ones(3)}, path)
    message = refused("inspect", path)
    assert not set(message) & {"\x1b", "\x07", "\u202e", "\u2028"}


def test_metadata_paths_and_config_values_are_printed_safely(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]\x1b[31mfolder"
    source = save_tiny(folder, "llama")
    save_file({"w": torch.ones(2)}, tmp_path / "file.safetensors", metadata={"made by": "\x1b[2J[red]me[/red]\n\n"})
    shown = done("inspect", tmp_path / "file.safetensors").out
    assert "[red]me[/red]" in shown and "\x1b" not in shown
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["\x1b[31m[bold]Llama"]}))
    message = refused("hf2ms", source, "-o", tmp_path / "out")
    assert "[bold]Llama" in message and "\x1b" not in message
    assert "\x1b" not in done("inspect", source).out


def test_in_a_log_there_are_plain_lines(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    ran = in_process("hf2ms", tiny_folder("llama-gqa"), "-o", tmp_path / "out", "--tp", 2)
    assert ran.code == 0
    assert not set(ran.out + ran.err) & {"\x1b", "\r"}
    assert not any(character in ran.out for character in "━─│┃")


def test_progress_in_a_log_says_bytes_share_rate_and_time_left(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "LOG_INTERVAL", 0.0)
    source = tiny_folder("llama-gqa", max_shard_size="150KB")
    for arguments in (
        ("hf2ms", source, "-o", tmp_path / "out", "--tp", 2),
        ("hf2ms", source, "-o", tmp_path / "cast", "--pp", 2, "--ranks", 0, "--dtype", "bf16"),
        ("hf2ms", source, "-o", tmp_path / "cast", "--pp", 2, "--dtype", "bf16"),
        ("ms2hf", tmp_path / "out", "-o", tmp_path / "back"),
    ):
        shares = [int(line.split("(")[1].split(" %")[0]) for line in done(*arguments).err.splitlines()]
        assert shares == sorted(shares) and all(0 <= share < 100 for share in shares)
        assert shares


def test_progress_counts_every_byte_once(tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(display._Lines, "show", lambda self: seen.append((self.done, self.total)))
    source = tiny_folder("llama-gqa", max_shard_size="150KB")
    for arguments in (
        ("hf2ms", source, "-o", tmp_path / "out", "--tp", 2, "--ranks", 0),
        ("hf2ms", source, "-o", tmp_path / "out", "--tp", 2),
        ("ms2hf", tmp_path / "out", "-o", tmp_path / "back"),
    ):
        seen.clear()
        done(*arguments)
        assert [part for part, _ in seen] == sorted(part for part, _ in seen)
        assert seen[-1][0] == seen[-1][1]


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tiny_folder: TinyFolder, slices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    for arguments in (("hf2ms", tiny_folder("gpt2")), ("ms2hf", slices)):
        message = refused(*arguments, "-o", tmp_path / "deep" / "out")
        assert "not enough disk space" in message and "100,000 are free" in message
        assert not (tmp_path / "deep" / "out").exists()


def test_input_and_output_may_not_lie_in_one_another(tmp_path: Path, slices: Path) -> None:
    source = save_tiny(tmp_path / "a" / "model", "gpt2")
    before = files_of(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(source)
    for out in (source, source / "out", tmp_path / "a", tmp_path, link / "out", tmp_path / "a" / ".." / "a" / "model" / "x"):
        for extra in ((), ("--overwrite",)):
            assert "lie in one another" in refused("hf2ms", source, "-o", out, *extra)
    assert [name for name in files_of(tmp_path) if name != "link"] == [name for name in before if name != "link"]
    assert "lie in one another" in refused("ms2hf", slices, "-o", slices / "back")


FOREIGN = {"notes.txt": "mine", "model.safetensors": "not one", "sub/config.json": "{}", "adapter_config.json": "{}"}


def test_a_foreign_folder_is_not_touched_and_with_overwrite_other_files_stay(tiny_folder: TinyFolder, slices: Path, tmp_path: Path) -> None:
    source = tiny_folder("llama-uneven-vocab-tied", tokenizer=True)
    for command, *arguments in (("hf2ms", source, "--tp", 2, "--pp", 2), ("ms2hf", slices)):
        out = tmp_path / str(command)
        for name, text in FOREIGN.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
        before = {name: (out / name).read_bytes() for name in files_of(out)}
        message = refused(command, *arguments, "-o", out)
        assert "not empty" in message and "--overwrite" in message
        assert {name: (out / name).read_bytes() for name in files_of(out)} == before
        ran = done(command, *arguments, "-o", out, "--overwrite")
        noted = "".join(ran.out.split())
        assert "adapter_config.json" in noted and "notes.txt" in noted and "sub/" in noted
        assert ("beside" in ran.out) == (command == "hf2ms") and "earlier conversion" not in ran.out
        assert (out / "notes.txt").read_text() == "mine" and (out / "sub" / "config.json").read_text() == "{}"
    extra = frozenset({"notes.txt", "sub/config.json", "adapter_config.json"})
    assert_same_folder(source, tmp_path / "ms2hf", ignore=extra)
    assert_same_folder(slices, tmp_path / "hf2ms", ignore=extra | {"model.safetensors"})


@pytest.mark.parametrize(
    "name",
    [
        "rank_5/checkpoint_5.ckpt", "rank_0/checkpoint_0.safetensors", "rank_1/mine", "strategy/plan.md", "huggingface/config.json",
        "huggingface/mine/deep.txt", "manifest.json", ".manifest.json.partial", "rank_0", "rank_7",
    ],
)  # fmt: skip
def test_files_that_ms_convert_did_not_write_are_not_replaced_by_a_rank_tree(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text('{"mine": 1}')
    message = refused("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--overwrite")
    assert f"{out / name}: in the way" in message and "remove or move it yourself" in message
    assert files_of(out) == [name] and (out / name).read_text() == '{"mine": 1}'


def test_what_a_user_put_into_a_finished_conversion_survives_overwrite_and_is_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("hf2ms", tiny_folder("gpt2"), "-o", out, "--tp", 4)
    for name in ("rank_3/notes.txt", "huggingface/mine.txt", "logs/a.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    ran = done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--overwrite")
    assert "replaced what an earlier conversion had left; not touched: huggingface/mine.txt, logs/, rank_3/" in ran.out
    done("hf2ms", tiny_folder("bert"), "-o", tmp_path / "fresh", "--tp", 2)
    assert_same_folder(tmp_path / "fresh", out, ignore=frozenset({"rank_3/notes.txt", "huggingface/mine.txt", "logs/a.txt"}))


def test_some_ranks_alone_do_not_replace_a_finished_conversion(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2)
    before = {name: (out / name).read_bytes() for name in files_of(out)}
    assert "leave --ranks out" in refused("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--ranks", 0, "--overwrite")
    assert {name: (out / name).read_bytes() for name in files_of(out)} == before
    done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--ranks", "0-1", "--overwrite")


@pytest.mark.parametrize("command", ["hf2ms", "ms2hf"])
@pytest.mark.parametrize("extra", [(), ("--overwrite",)])
def test_a_link_in_the_place_of_the_progress_folder_is_refused(
    command: str, extra: tuple[str, ...], tiny_folder: TinyFolder, slices: Path, tmp_path: Path
) -> None:
    precious, out = tmp_path / "precious", tmp_path / "out"
    (precious / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt", "run.json", "lock"):
        (precious / name).write_text("mine")
    arguments = ("hf2ms", tiny_folder("bert")) if command == "hf2ms" else ("ms2hf", slices)
    out.mkdir()
    (out / ".ms-convert").symlink_to(precious)
    assert "a link or a file where ms-convert keeps its records" in refused(*arguments, "-o", out, *extra)
    (out / ".ms-convert").unlink()
    done(*arguments, "-o", out)
    (out / ".ms-convert").symlink_to(precious)
    assert ms_convert(*arguments, "-o", out, *extra).code == 1
    assert files_of(precious) == ["a.txt", "lock", "run.json", "sub/b.txt"]


def test_what_is_not_of_ms_convert_in_the_progress_folder_stays(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--ranks", 0)
    (out / ".ms-convert" / "sub").mkdir()
    (out / ".ms-convert" / "sub" / "notes.txt").write_text("mine")
    done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2)
    assert [name for name in files_of(out) if name.startswith(".ms-convert")] == [".ms-convert/sub/notes.txt"]


@pytest.mark.parametrize("name", ["rank_1", "strategy", "huggingface", "1_Pooling"])
@pytest.mark.parametrize("extra", [(), ("--overwrite",)])
def test_a_link_out_of_the_output_folder_is_not_followed(
    name: str, extra: tuple[str, ...], tiny_folder: TinyFolder, slices: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.mkdir()
    if name == "1_Pooling":
        done("hf2ms", tiny_folder("llama-uneven-vocab-tied", tokenizer=True), "-o", tmp_path / "slices", "--tp", 2)
        arguments: tuple[object, ...] = ("ms2hf", tmp_path / "slices", "-o", out, *extra)
    else:
        arguments = ("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, *extra)
        if not extra:
            done(*arguments, "--ranks", 0)
    (out / name).symlink_to(elsewhere)
    message = refused(*arguments)
    assert (extra == () and name == "1_Pooling") or "a link leads out of the output folder" in message
    assert not list(elsewhere.iterdir()) and (out / name).is_symlink()


def test_links_that_wait_under_the_names_of_temporaries_are_not_followed(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, precious = tiny_folder("bert", tokenizer=True), tmp_path / "precious"
    precious.write_text("mine")
    out, back = tmp_path / "out", tmp_path / "back"
    done("hf2ms", source, "-o", out, "--tp", 2, "--ranks", 0)
    (out / "huggingface").mkdir()
    (out / "rank_1").mkdir()
    (out / "strategy").mkdir()
    waiting = [
        ".manifest.json.partial", ".ms-convert/.run.json.partial", ".ms-convert/.file-rank_1-checkpoint_1.safetensors.json.partial",
        "strategy/.ckpt_strategy_rank_0.ckpt.partial", "rank_1/checkpoint_1.safetensors.partial",
        f"huggingface/{hidden_temporary(Path('config.json'))}", "huggingface/config.json.partial",
    ]  # fmt: skip
    for name in waiting:
        (out / name).symlink_to(precious)
    done("hf2ms", source, "-o", out, "--tp", 2)
    back.mkdir()
    (back / hidden_temporary(Path("config.json"))).symlink_to(precious)
    (back / "config.json").symlink_to(precious)
    done("ms2hf", out, "-o", back, "--overwrite")
    assert precious.read_text() == "mine"
    assert_same_folder(source, back)


def test_files_in_the_making_are_left_in_the_source_and_listed(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "bert")
    (source / "config.json.partial").write_text("half")
    (source / "sub.partial").mkdir()
    (source / "sub.partial" / "a.txt").write_text("half")
    facts = done("hf2ms", source, "-o", tmp_path / "out", "--json").facts
    assert "config.json.partial" in json.dumps(facts)
    done("ms2hf", tmp_path / "out", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back", ignore=frozenset({"config.json.partial", "sub.partial/a.txt"}))


def test_another_conversion_is_replaced_with_overwrite_alone(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("hf2ms", tiny_folder("gpt2"), "-o", out, "--tp", 4)
    assert "holds a finished conversion" in refused("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2)
    ran = done("hf2ms", tiny_folder("bert"), "-o", out, "--tp", 2, "--overwrite")
    assert "replaced" in ran.out and not (out / "rank_3").exists()
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(tiny_folder("bert"), tmp_path / "back")


def test_an_output_that_cannot_be(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "a file, not a folder" in refused("hf2ms", tiny_folder("gpt2"), "-o", tmp_path / "file")
    assert refused("hf2ms", tiny_folder("gpt2"), "-o", tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_done_without(closed: str, tiny_folder: TinyFolder, slices: Path, tmp_path: Path) -> None:
    for call, code in (
        (f"hf2ms {tiny_folder('qwen2')} -o {tmp_path / 'slices'} --tp 2", 0),
        (f"inspect {slices}", 0),
        (f"inspect {tmp_path / 'nowhere'} --debug-not", 2),
        (f"hf2ms {tmp_path / 'nowhere'} --dry-run", 1),
    ):
        command = f"{sys.executable} -m converter.cli {call} {closed}"
        ran: Any = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPOSITORY, check=False)
        assert ran.returncode == code, ran.stderr
        assert "defect" not in ran.stderr and "Traceback" not in ran.stderr and "Exception" not in ran.stderr
    done("verify", tiny_folder("qwen2"), tmp_path / "slices")


def test_a_stream_that_is_none_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program without a console that calls this one."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    display.console().print("unseen")
    display.console(stderr=True).print("unseen")
    with display.progress("hf2ms", 100) as shown:
        shown.reach(50)
    assert shown.done == 50


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_stream_cannot_spell_is_escaped(encoding: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "模型", "qwen2")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    for call, code, stream in (
        (["hf2ms", str(source), "-o", str(tmp_path / "切片")], 0, "stdout"),
        (["inspect", str(source)], 0, "stdout"),
        (["hf2ms", str(tmp_path / "没有"), "--dry-run"], 1, "stderr"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "converter.cli", *call], capture_output=True, cwd=REPOSITORY, check=False, env=environment
        )
        assert ran.returncode == code, ran.stderr
        assert rb"\u" in getattr(ran, stream)
        assert b"defect" not in ran.stderr and b"UnicodeEncodeError" not in ran.stderr


def test_a_closed_pipe_ends_it_quietly() -> None:
    command = f"{sys.executable} -m converter.cli rules llama | head -1; exit ${{PIPESTATUS[0]}}"
    ran: Any = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert "Traceback" not in ran.stderr and "defect" not in ran.stderr and ran.stdout.startswith("llama")
