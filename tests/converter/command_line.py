"""Running ms-convert as a user does, and comparing folders as a user would: byte by byte, and with the safetensors library."""

from __future__ import annotations

import contextlib
import filecmp
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from converter.cli import run

REPOSITORY = Path(__file__).resolve().parents[2]
DEFECT = "a defect of ms-convert"


@dataclass(frozen=True)
class Ran:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


def ms_convert(*arguments: object) -> Ran:
    """Runs a command line in this process. An exception that nobody expected is a failed test, not an exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    ran = Ran(code, out.getvalue(), err.getvalue())
    assert DEFECT not in ran.err, ran.err
    return ran


def done(*arguments: object) -> Ran:
    """Runs a command line that must succeed."""
    ran = ms_convert(*arguments)
    assert ran.code == 0, ran.err
    return ran


def refused(*arguments: object) -> str:
    """The message of a command line that must be refused, in one screen."""
    ran = ms_convert(*arguments)
    assert ran.code == 1, (ran.code, ran.out)
    assert ran.err.startswith("refused:")
    assert len(ran.err.splitlines()) < 100
    return ran.err


def round_trip(source: Path, folder: Path, *options: object) -> Path:
    """hf2ms with these options, then ms2hf, in `folder`; returns the Hugging Face folder that came back."""
    done("hf2ms", source, "-o", folder / "slices", *options)
    done("ms2hf", folder / "slices", "-o", folder / "back")
    return folder / "back"


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "converter.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment, **options
    )


def in_process(*arguments: object) -> Ran:
    """Runs a command in a process of its own until it ends."""
    process = start(*arguments)
    out, err = process.communicate(timeout=300)
    return Ran(process.returncode, out, err)


def files_of(folder: Path) -> list[str]:
    """Every file below a folder, hidden ones too, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def assert_same_folder(folder: Path, other: Path, *, ignore: frozenset[str] = frozenset()) -> None:
    """The same files, byte for byte."""
    names, others = (set(files_of(place)) - ignore for place in (folder, other))
    assert names == others, f"not in both: {sorted(names ^ others)}"
    _, different, unreadable = filecmp.cmpfiles(folder, other, names, shallow=False)
    assert not different and not unreadable, (different, unreadable)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, as the safetensors library reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: a NaN equals itself, -0.0 is not 0.0."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    first, second = (item.contiguous().reshape(-1).view(torch.uint8) for item in (tensor, other))
    return bool(torch.equal(first, second))


def assert_same_tensors(folder: Path, other: Path) -> None:
    """The same names with the same bits, in whatever files."""
    first, second = tensors_of(folder), tensors_of(other)
    assert first.keys() == second.keys() and first, f"not in both: {sorted(first.keys() ^ second.keys())}"
    different = [name for name in first if not same_bits(first[name], second[name])]
    assert not different, different
