"""How fast plans are executed and in how much memory, beside `cp -r` of the same source.

    python -m tests.benchmarks.copy_speed [--case NAME ...] [--repeats 5] [--workers 2] [--durable] [--folder DIR] [--scale 1.0]

Each case builds a source of about 2 GB, then runs `cp -r` and `execute()` in turn, each to a fresh folder with nothing left to be
written back from before. The first round is not counted: memory that the machine has not used for long is slow to touch. Every execution
runs in a process of its own, which reports its time (without the interpreter's start) and its peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from converter.dtypes import item_size
from converter.execute import execute
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.safetensors_format import read_header, safetensors_layout
from converter.tensors import StoredTensor, contiguous_strides

Shapes = dict[str, tuple[int, ...]]

HIDDEN, FFN, VOCAB = 2048, 5632, 32000
COLUMN = ("q", "k", "v", "gate", "up")  # cut along the output dimension; o and down along the input dimension


def write_source(folder: Path, shapes: Shapes, dtype: str, files: int) -> dict[str, StoredTensor]:
    """Random tensors, in order, in `files` safetensors files of about the same size."""
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 0x3F80, 1 << 22, np.uint16).tobytes()  # small positive bf16, fp32 and fp16
    total = sum(map(math.prod, shapes.values()))
    stored: dict[str, StoredTensor] = {}
    names, done = list(shapes), 0
    for number in range(files):
        part = []
        while names and (done < total * (number + 1) / files or number == files - 1):
            part.append(names.pop(0))
            done += math.prod(shapes[part[-1]])
        path = folder / f"model-{number:05}.safetensors"
        layout = safetensors_layout([(name, dtype, shapes[name]) for name in part], {})
        with path.open("wb") as file:
            file.write(layout.literals[0][1])
            left = layout.size - file.tell()
            while left:
                left -= file.write(noise[: min(left, len(noise))])
        stored |= {tensor.name: tensor for tensor in read_header(path)[0]}
    return stored


def whole(name: str, source: StoredTensor, dtype: str | None = None) -> TargetTensor:
    strides = contiguous_strides(source.shape)
    return TargetTensor(name, dtype or source.dtype, source.shape, (StridedCopy(source, 0, strides, 0, strides, source.shape),), name)


def part_of(name: str, source: StoredTensor, axis: int, index: int, parts: int) -> TargetTensor:
    size = source.shape[axis] // parts
    shape = (*source.shape[:axis], size, *source.shape[axis + 1 :])
    strides = contiguous_strides(source.shape)
    copy = StridedCopy(source, index * size * strides[axis], strides, 0, contiguous_strides(shape), shape)
    return TargetTensor(name, source.dtype, shape, (copy,), name)


def llama(tp: int, pp: int) -> Callable[[Path, float], Plan]:
    """bf16, tensors of a Llama with hidden 2048 and ffn 5632, four files; one file for each of tp x pp ranks."""

    def build(folder: Path, scale: float) -> Plan:
        layers = max(pp, round(18 * scale))
        shapes: Shapes = {"embedding": (VOCAB, HIDDEN)}
        for layer in range(layers):
            shapes |= {f"{layer}.{name}": (HIDDEN, HIDDEN) for name in "qkvo"}
            shapes |= {
                f"{layer}.gate": (FFN, HIDDEN),
                f"{layer}.up": (FFN, HIDDEN),
                f"{layer}.down": (HIDDEN, FFN),
                f"{layer}.norm": (HIDDEN,),
            }
        stored = write_source(folder, shapes | {"head": (VOCAB, HIDDEN)}, "BF16", 4)
        files = []
        for stage in range(pp):
            names = [name for name in shapes if name[0].isdigit() and int(name.split(".")[0]) * pp // layers == stage]
            names = ["embedding"] * (stage == 0) + names + ["head"] * (stage == pp - 1)
            for rank in range(tp):
                tensors = tuple(slice_of(name, stored[name], rank, tp) for name in names)
                files.append(TargetFile(f"rank_{stage * tp + rank}/checkpoint.safetensors", "safetensors", tensors))
        return Plan(tuple(files))

    return build


def slice_of(name: str, source: StoredTensor, rank: int, tp: int) -> TargetTensor:
    if name.endswith("norm"):
        return whole(name, source)
    column = name in ("embedding", "head") or name.split(".")[1] in COLUMN
    return part_of(name, source, 0 if column else 1, rank, tp)


def transposes(dtype: str, rows: int, columns: int) -> Callable[[Path, float], Plan]:
    """Matrices of one size, each transposed, two target files."""

    def build(folder: Path, scale: float) -> Plan:
        shape = (rows, columns)
        count = max(2, round(scale * 2**31 / (math.prod(shape) * item_size(dtype))))
        stored = write_source(folder, {f"{index}.c_fc": shape for index in range(count)}, dtype, 4)
        tensors = [
            TargetTensor(name, dtype, (columns, rows), (StridedCopy(source, 0, (1, columns), 0, (rows, 1), (columns, rows)),), name)
            for name, source in stored.items()
        ]
        halves = tensors[: count // 2], tensors[count // 2 :]
        return Plan(tuple(TargetFile(f"{index}.safetensors", "safetensors", tuple(half)) for index, half in enumerate(halves)))

    return build


def casts(source_dtype: str, target_dtype: str) -> Callable[[Path, float], Plan]:
    """Matrices that change their type, two target files."""

    def build(folder: Path, scale: float) -> Plan:
        count = max(2, round(scale * 2**31 / (HIDDEN * FFN * item_size(source_dtype))))
        stored = list(write_source(folder, {str(index): (FFN, HIDDEN) for index in range(count)}, source_dtype, 4).values())
        halves = stored[: count // 2], stored[count // 2 :]
        return Plan(
            tuple(
                TargetFile(f"{index}.safetensors", "safetensors", tuple(whole(source.name, source, target_dtype) for source in half))
                for index, half in enumerate(halves)
            )
        )

    return build


def tiny(folder: Path, scale: float) -> Plan:
    """200 000 tensors of 1 KiB, in two files."""
    stored = write_source(folder, {f"layers.{index}.weight": (16, 32) for index in range(round(scale * 200_000))}, "BF16", 2)
    tensors = [whole(name, source) for name, source in stored.items()]
    halves = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    return Plan(tuple(TargetFile(f"{index}.safetensors", "safetensors", tuple(half)) for index, half in enumerate(halves)))


CASES: dict[str, Callable[[Path, float], Plan]] = {
    "llama tp2 pp2": llama(2, 2),
    "llama tp16 pp1": llama(16, 1),
    "llama tp1 pp1": llama(1, 1),
    "transpose GPT-2": transposes("F32", 768, 3072),
    "transpose XL": transposes("F32", 1600, 6400),
    "transpose bf16": transposes("BF16", 8192, 8192),
    "transpose fp32": transposes("F32", 8192, 8192),
    "cast fp32 bf16": casts("F32", "BF16"),
    "cast bf16 fp32": casts("BF16", "F32"),
    "cast bf16 fp16": casts("BF16", "F16"),
    "200k tiny": tiny,
}


def peak_memory() -> int:
    """Peak resident bytes of this process. Not `ru_maxrss`, which remembers the process that started this one."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_once(arguments: Sequence[str]) -> None:
    """The measured process: `--once PLAN OUTPUT OPTIONS`, prints seconds and peak memory as JSON."""
    plan = pickle.loads(Path(arguments[0]).read_bytes())  # noqa: S301 - written by the parent process
    before = peak_memory()
    start = time.perf_counter()
    execute(plan, Path(arguments[1]), **json.loads(arguments[2]))
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak_memory(), "before": before}))


def timed_execute(plan: Path, output: Path, options: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.copy_speed", "--once", str(plan), str(output), json.dumps(options)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def timed_cp(source: Path, output: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
    return time.perf_counter() - start


def fresh(output: Path) -> Path:
    """The path of an output folder that is not there, with nothing left to be written back."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    return output


def measure(name: str, folder: Path, scale: float, repeats: int, options: dict[str, Any]) -> None:
    """Run one case and print its medians."""
    plan = CASES[name](folder / "source", scale)
    plan_file = folder / "plan"
    plan_file.write_bytes(pickle.dumps(plan))
    cp, runs = [], []
    for repeat in range(repeats + 1):
        cp_seconds = timed_cp(folder / "source", fresh(folder / "out"))
        run = timed_execute(plan_file, fresh(folder / "out"), options)
        if repeat:
            cp.append(cp_seconds)
            runs.append(run)
    shutil.rmtree(folder / "source")
    fresh(folder / "out")
    seconds = [run["seconds"] for run in runs]
    middle, ratios = statistics.median(seconds), [run / copied for run, copied in zip(seconds, cp, strict=True)]
    peak, before = max(run["peak"] for run in runs) / 1e6, runs[0]["before"] / 1e6
    print(
        f"{name:16} {plan.nbytes / 1e9:5.2f} GB  cp {statistics.median(cp):6.2f} s ({min(cp):.2f}..{max(cp):.2f})  "
        f"execute {middle:6.2f} s ({min(seconds):.2f}..{max(seconds):.2f})  {middle / statistics.median(cp):5.2f} x cp "
        f"(pairwise median {statistics.median(ratios):.2f})  peak {peak:.0f} MB (before {before:.0f})",
        flush=True,
    )


def main() -> None:
    """Parse the command line and run the cases."""
    parser = argparse.ArgumentParser(description="Measure execute() beside cp -r.")
    parser.add_argument("--case", action="append", choices=[*CASES], help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--buffer", type=int, help="bytes of each of a worker's two buffers")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the source in units of 2 GB")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where a temporary folder is made")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"workers": arguments.workers, "durable": arguments.durable}
    options |= {"buffer_bytes": arguments.buffer} if arguments.buffer else {}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="copy_speed_") as folder:
        for name in arguments.case or CASES:
            measure(name, Path(folder), arguments.scale, arguments.repeats, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        run_once(sys.argv[2:])
    else:
        main()
