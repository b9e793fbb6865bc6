"""The demo: what a user types, on real weights, and a check of the result that takes nothing from this project.

`python -m tests.demo` converts SmolLM2 (tp 3, pp 2) to MindSpore ranks and back, and then trains a small model on four ranks;
`--model FOLDER` converts a folder of your own. Its exit code is 0 only if the folder that comes back is the folder that went in, bit for
bit, and Transformers runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from tests.real_models import REPOSITORY, smollm2_folder
from tests.training_demo import TrainingFailed, run_training_demo

MARK = ".made-by-the-demo"
WEIGHTS = {".safetensors", ".bin"}
INDEXES = {"model.safetensors.index.json", "pytorch_model.bin.index.json"}
PROMPT = "The capital of France is"


class DemoFailed(Exception):
    """A step did not do what it promises."""


def main() -> None:
    """Reads the command line, runs the demo and exits with 1 when a step fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description="Hugging Face to MindSpore ranks and back, compared.")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks (default: 3 for SmolLM2, otherwise 1)")
    parser.add_argument("--pp", type=int, help="pipeline stages (default: 2 for SmolLM2, otherwise 1)")
    parser.add_argument("--out", type=Path, help="where the results go (default: .cache/demo)")
    given = parser.parse_args()
    own = given.model is not None
    if own and not (given.model / "config.json").is_file():
        parser.error(f"{given.model} is no Hugging Face folder: it has no config.json")
    try:
        model = given.model if own else smollm2_folder()
        out = _fresh_folder(given.out or REPOSITORY / ".cache" / "demo")
        run_demo(model, out, tp=given.tp or (1 if own else 3), pp=given.pp or (1 if own else 2), show_refusal=not own)
        if not own:
            run_training_demo(out / "training")
    except (DemoFailed, TrainingFailed) as failure:
        sys.exit(f"\nThe demo FAILED: {failure}")


def run_demo(model: Path, out: Path, *, tp: int, pp: int, show_refusal: bool) -> None:
    """Converts `model` to `out`/mindspore and back to `out`/huggingface, and compares. Raises DemoFailed."""
    ranks, back, report = out / "mindspore", out / "huggingface", out / "report.html"
    _step(f"What {model.name} is")
    _ms_convert("inspect", model)
    if show_refusal:
        _step("Two ranks cannot share 9 heads: refused before anything is written")
        _ms_convert("hf2ms", model, "-o", out / "refused", "--tp", 2, exit_code=1)
        _require(not (out / "refused").exists(), "a refused conversion left a folder behind")
    _step(f"Hugging Face to MindSpore: {tp} tensor-parallel ranks x {pp} pipeline stages")
    _ms_convert("hf2ms", model, "-o", ranks, "--tp", tp, "--pp", pp)
    _step("And back")
    _ms_convert("ms2hf", ranks, "-o", back)
    _step("Compared by the safetensors library, bit for bit")
    compare(model, back)
    _step("Transformers loads what came back")
    say_something(back)
    _step("The MindSpore model against Transformers, layer by layer")
    checks: list[str | int] = ["--forward"] if _fits_in_memory(model) else []
    if not checks:
        print("the model in float32 does not fit in this machine's memory: only its bits are compared here")
    elif show_refusal:
        checks += ["--generate", 32]
    _ms_convert("verify", model, ranks, *checks, "--report", report)
    _step("Done: the folder that came back is the folder that went in" + (", and both models compute the same" if checks else ""))
    print(
        f"source       {_short(model)}\nMindSpore    {_short(ranks)}\nand back     {_short(back)}\nreport       {_short(report)}: VERIFIED"
    )


def _fits_in_memory(model: Path) -> bool:
    """Whether the model in float32, with room to compute, fits in this machine's memory."""
    elements = sum(tensor().numel() for _, tensor in _tensors(model))
    return 3 * 4 * int(elements) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def compare(source: Path, back: Path) -> None:
    """Every tensor and every side file of `source` is in `back`, equal bit for bit, and nothing else is. Raises DemoFailed.

    A tensor may be missing where Transformers loads the same weights without it: a buffer that is derived from the config.
    """
    import torch

    before, after = dict(_tensors(source)), dict(_tensors(back))
    shards = {file: names for file, names in _safetensors_names(source).items() if names & after.keys()}
    extra, missing = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
    _require(not extra, f"tensors that the source does not have: {extra}")
    nbytes = 0
    for name in sorted(after):
        old, new = before[name](), after[name]()
        _require(old.dtype == new.dtype and old.shape == new.shape, f"{name}: {old.dtype} {old.shape} became {new.dtype} {new.shape}")
        same = torch.equal(old.contiguous().reshape(-1).view(torch.uint8), new.contiguous().reshape(-1).view(torch.uint8))
        _require(same, f"{name}: the values differ")
        nbytes += old.numel() * old.element_size()
    print(f"{len(after)} tensors, {nbytes:,} bytes: identical")
    if missing:
        _require(_loads_the_same(source, back), f"tensors that Transformers needs are missing: {missing}")
        print(f"{len(missing)} not restored, and not needed by Transformers: {', '.join(missing)}")
    if shards:
        _require({file: names & after.keys() for file, names in shards.items()} == _safetensors_names(back), "tensors changed their file")
        print(f"{len(shards)} weight files: the same tensors in each ({', '.join(shards)})")
    _compare_side_files(source, back)


def _safetensors_names(folder: Path) -> dict[str, set[str]]:
    from safetensors import safe_open

    return {path.name: set(safe_open(path, framework="pt").keys()) for path in sorted(folder.glob("*.safetensors"))}


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each tensor's name and how to read it, from the folder's safetensors files or else its PyTorch files."""
    import torch
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        handle = safe_open(path, framework="pt")
        for name in list(handle.keys()):
            yield name, partial(handle.get_tensor, name)
    for path in [] if files else sorted(folder.glob("pytorch_model*.bin")):
        for name, tensor in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            yield name, partial(torch.Tensor.detach, tensor)


def _compare_side_files(source: Path, back: Path) -> None:
    before, after = _side_files(source), _side_files(back)
    _require(before == after, f"side files came or went: {sorted(before ^ after)}")
    changed = sorted(name for name in before if (source / name).read_bytes() != (back / name).read_bytes())
    _require(not changed, f"side files changed: {changed}")
    print(f"{len(before)} side files: identical ({', '.join(sorted(before))})")


def _side_files(folder: Path) -> set[str]:
    """All files but the weights, their index (its content follows from them) and what lies in hidden folders, by their path."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        name.as_posix()
        for name in names
        if name.suffix not in WEIGHTS and name.name not in INDEXES and not any(parent.startswith(".") for parent in name.parts[:-1])
    }


def _loads_the_same(source: Path, back: Path) -> bool:
    import torch

    before, after = _transformers_model(source).state_dict(), _transformers_model(back).state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _transformers_model(folder: Path) -> Any:
    """The model by the class that its config names; missing or unfitting weights are a failure, not a warning."""
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["AutoModel"]
    model, report = getattr(transformers, architecture).from_pretrained(folder, dtype="auto", output_loading_info=True)
    _require(not report["missing_keys"] and not report["mismatched_keys"], f"{architecture} cannot load {folder}: {report}")
    return model.eval()


def say_something(folder: Path) -> None:
    """Continues a sentence, or, for a model that cannot, runs one forward pass. Raises DemoFailed unless the outputs are finite."""
    import torch
    from transformers import AutoTokenizer

    model = _transformers_model(folder)
    if any((folder / name).exists() for name in ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    else:
        tokenizer, ids = None, torch.arange(8)[None]
    with torch.no_grad():
        output = model(ids)[0]
    _require(bool(output.isfinite().all()), "the outputs are not finite")
    if tokenizer and model.can_generate():
        text = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True)
        print(f"{type(model).__name__} says: {text!r}")
    else:
        print(f"{type(model).__name__} gives an output of shape {tuple(output.shape)}, mean {output.mean():.4f}")


def _fresh_folder(folder: Path) -> Path:
    """An empty folder. What an earlier demo left there is removed; anything else is not touched."""
    if folder.exists() and any(folder.iterdir()):
        _require((folder / MARK).is_file(), f"{folder} exists and was not made by the demo; choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    return folder


def _ms_convert(*arguments: str | int | Path, exit_code: int = 0) -> None:
    """Runs the installed command as a user would, showing the line and its output."""
    words = [_short(argument) if isinstance(argument, Path) else str(argument) for argument in arguments]
    print(f"$ ms-convert {shlex.join(words)}", flush=True)
    command = Path(sys.executable).parent / "ms-convert"
    _require(command.is_file(), f"{command} is not there: run `make install`")
    start = time.perf_counter()
    done = subprocess.run([command, *words], cwd=REPOSITORY, check=False)
    print(f"({time.perf_counter() - start:.1f} s, exit code {done.returncode})", flush=True)
    _require(done.returncode == exit_code, f"exit code {done.returncode} where {exit_code} was due")


def _short(path: Path) -> str:
    """The path as seen from the repository, where the commands run, if it lies inside it."""
    absolute = path.absolute()
    return str(absolute.relative_to(REPOSITORY) if absolute.is_relative_to(REPOSITORY) else absolute)


def _step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(what)


if __name__ == "__main__":
    main()
