"""hf2ms and ms2hf against `cp -r` of the same folder: time as ratios, and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.models import expert_folder, llama_folder
from tests.benchmarks.timing import Contender, Times, in_turn, machine, run_once

PROGRAM = [sys.executable, "-m", "converter.cli"]
TREE = ["--tp", "2", "--pp", "2", "--workers", "2"]
UNIFIED = [*TREE, "--layout", "unified"]
MINDFORMERS = ["--target", "mindformers"]


def measure(work: Path, gigabytes: float, rounds: int) -> None:
    """Print the table for a Llama folder of this size."""
    model = llama_folder(work / f"llama-{gigabytes:g}gb", gigabytes)
    tree = work / "tree"
    run_once([*PROGRAM, "hf2ms", str(model), "-o", str(tree), *TREE, "--overwrite"])
    contenders = [
        Contender("cp -r", ["cp", "-r", str(model), str(work / "cp")], work / "cp"),
        Contender("hf2ms to safetensors", [*PROGRAM, "hf2ms", str(model), "-o", str(work / "out"), *TREE], work / "out"),
        Contender("hf2ms to .ckpt", [*PROGRAM, "hf2ms", str(model), "-o", str(work / "ckpt"), *TREE, "--format", "ckpt"], work / "ckpt"),
        *layouts(model, work),
        Contender("ms2hf", [*PROGRAM, "ms2hf", str(tree), "-o", str(work / "back"), "--workers", "2"], work / "back"),
        Contender("cp -r and sync", ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(model), str(work / "cp")], work / "cp"),
        Contender("hf2ms --durable", [*PROGRAM, "hf2ms", str(model), "-o", str(work / "out"), *TREE, "--durable"], work / "out"),
        Contender("verify, bits only", [*PROGRAM, "verify", str(model), str(tree)]),
        Contender("cat both sides", ["sh", "-c", 'cat "$0"/*.safetensors "$1"/rank_*/*.safetensors > /dev/null', str(model), str(tree)]),
    ]
    times = in_turn(contenders, rounds)
    show(f"{gigabytes:g} GB bfloat16 Llama, 4 shards, tp 2 x pp 2, 2 workers, {rounds} rounds in turn", times)
    show_bounds(times)


def layouts(model: Path, work: Path) -> list[Contender]:
    """The other disk layouts, in our names and in those of MindFormers 2.x, which fuse and interleave."""
    command, out = [*PROGRAM, "hf2ms", str(model), "-o", str(work / "layout")], work / "layout"
    return [
        Contender("hf2ms to unified", [*command, *UNIFIED], out),
        Contender("hf2ms to unified MindFormers", [*command, *UNIFIED, *MINDFORMERS], out),
        Contender("hf2ms to MindFormers 2.x", [*command, *TREE, *MINDFORMERS, "--layout", "mindformers2"], out),
    ]


def measure_layouts(work: Path, gigabytes: float, rounds: int) -> None:
    """Print the table of the other disk layouts alone."""
    model = llama_folder(work / f"llama-{gigabytes:g}gb", gigabytes)
    copy = Contender("cp -r", ["cp", "-r", str(model), str(work / "cp")], work / "cp")
    times = in_turn([copy, *layouts(model, work)], rounds)
    show(f"{gigabytes:g} GB bfloat16 Llama, 4 shards, for tp 2 x pp 2, 2 workers, {rounds} rounds in turn", times)


def show(title: str, times: Mapping[str, Times]) -> None:
    """A table of medians, ratios to the first contender, and peaks."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "median s", "min-max s", "x cp", "processor s", "peak MB"):
        table.add_column(heading, justify="right" if heading else "left")
    base = next(iter(times.values())).median
    for name, runs in times.items():
        ratio, processor = f"{runs.median / base:.2f}", f"{runs.processor_median:.2f}"
        table.add_row(name, f"{runs.median:.2f}", runs.spread, ratio, processor, f"{runs.peak / 1e6:.0f}")
    Console(width=110).print(table)


def show_bounds(times: Mapping[str, Times]) -> None:
    """Each bound beside what was measured."""
    copy = times["cp -r"].median
    bounds = {"hf2ms to safetensors": 1.0, "hf2ms to .ckpt": 1.2, "ms2hf": 1.0}
    for name, bound in (bounds | {"hf2ms to unified": 1.3, "hf2ms to unified MindFormers": 1.3}).items():
        print(f"  {name}: {times[name].median / copy:.2f} x cp (bound {bound}), peak {times[name].peak / 1e6:.0f} MB (bound 150 MB)")
    ratio = times["verify, bits only"].median / times["cat both sides"].median
    print(f"  verify: {ratio:.2f} x reading both sides (bound 2), peak {times['verify, bits only'].peak / 1e6:.0f} MB (bound 300 MB)")


def measure_planning(work: Path) -> None:
    """`--dry-run` of a 671B-parameter folder, and `--help`."""
    model, rules = expert_folder(work / "experts-671b")
    command = [*PROGRAM, "hf2ms", str(model), "--rules", str(rules), "--tp", "4", "--pp", "16", "--dry-run"]
    dry = Times([run_once(command) for _ in range(3)])
    print(f"--dry-run of 671B parameters, tp 4 x pp 16: {dry.median:.2f} s, peak {dry.peak / 1e6:.0f} MB")
    helps = Times([run_once([str(Path(sys.executable).with_name("ms-convert")), "--help"]) for _ in range(7)])
    print(f"ms-convert --help: {helps.median:.2f} s")


def main(work: Path, rounds: int = 5, large: bool = True) -> None:
    """All measurements of this file."""
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}")
    measure(work, 2.0, rounds)
    if large:
        measure(work, 8.0, 3)
    measure_planning(work)
