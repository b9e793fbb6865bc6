"""The demo's second half: a small GPT-2 is trained on a book by four ranks, comes back to Hugging Face, and has the same loss there."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TEXTS = REPOSITORY / "tests" / "data"
PROGRAMS = {"ms-train": "train.cli", "ms-convert": "converter.cli"}
VOCABULARY = 1024
SEQ = 64
STEPS = 40
CONFIG = """
model.path = "{model}"
data.path = "{data}"
data.validation_path = "{validation}"
train.steps = {steps}
train.global_batch = 16
train.dropout = 0.0
parallel.tp = 2
parallel.pp = 2
parallel.micro_batches = 4
optimizer.learning_rate = 3e-3
optimizer.warmup_steps = 4
checkpoint.folder = "{checkpoints}"
watch.folder = "{watch}"
watch.validate_every = {steps}
watch.log_every = 5
watch.tensorboard = false
launch.log_folder = "{logs}"
"""


class TrainingFailed(Exception):
    """A step did not do what it promises."""


def run_training_demo(folder: Path, tell: Callable[[str], None] = print) -> None:
    """Trains in `folder`. Raises TrainingFailed."""
    model = save_small_gpt2(folder / "gpt2")
    paths = {name: folder / name for name in ("data", "validation", "checkpoints", "watch", "logs")}
    tell("\n== A book as token ids")
    for source, output in (("alice.txt", paths["data"]), ("alice_chapter_12.txt", paths["validation"])):
        run("ms-train", "prepare-data", "--tokenizer", model, "--input", TEXTS / source, "--seq-length", SEQ, "-o", output)
    tell("\n== A small GPT-2 on four ranks: 2 tensor-parallel x 2 pipeline stages")
    config = folder / "train.toml"
    config.write_text(CONFIG.format(model=model, steps=STEPS, **paths), encoding="utf-8")
    run("ms-train", "launch", config)
    losses, validation = read_metrics(paths["watch"] / "metrics.jsonl")
    require(losses[-1] < losses[0] - 1.0, f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    tell(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on chapter 12 {validation:.5f}")
    tell("\n== The checkpoint as a Hugging Face folder, its loss computed by Transformers")
    exported = folder / "trained"
    run("ms-convert", "ms2hf", paths["checkpoints"] / f"step_{STEPS:08}", "-o", exported)
    there = transformers_loss(exported, paths["validation"])
    require(abs(there / validation - 1) < 1e-5, f"the loss is {validation} here and {there} there")
    tell(f"loss on chapter 12: {validation:.6f} here, {there:.6f} there")


def save_small_gpt2(folder: Path) -> Path:
    """Four layers with random weights, and a tokenizer made from the book."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(TEXTS / "alice.txt")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * SEQ, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def read_metrics(path: Path) -> tuple[list[float], float]:
    """The training losses in order, and the last validation loss."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line], [line["validation_loss"] for line in lines if "validation_loss" in line][-1]


def transformers_loss(folder: Path, data: Path) -> float:
    """The mean loss over the sequences of a validation, read by MindSpore and computed by Transformers."""
    import torch
    from mindspore.mindrecord import FileReader
    from transformers import AutoModelForCausalLM

    rows = [
        torch.from_numpy(row["input_ids"].astype("int64"))
        for shard in sorted(data.glob("*.mindrecord"))
        for row in _read(FileReader(str(shard)))
    ]
    batch = torch.stack(rows[: len(rows) // 16 * 16])
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1)))


def _read(reader: Any) -> list[Any]:
    rows = list(reader.get_next())
    reader.close()
    return rows


def run(program: str, *arguments: str | int | Path) -> None:
    """Run a command as a user would, showing the line. Raises TrainingFailed."""
    words = [str(argument) for argument in arguments]
    print(f"$ {program} {shlex.join(words)}", flush=True)
    start = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", PROGRAMS[program], *words], cwd=REPOSITORY, check=False).returncode
    print(f"({time.perf_counter() - start:.1f} s, exit code {code})", flush=True)
    require(code == 0, f"{program} ended with {code}")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise TrainingFailed(what)
