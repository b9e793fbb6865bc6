"""Texts, tokenizers and prepared data sets for tests."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TEXT = "the quick brown fox jumps over a lazy dog and nothing is lost or guessed in the capital of France Paris naïve 漢字"
WORDS = TEXT.split()


def random_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of very different lengths, with line ends and non-ASCII letters in them."""
    chance = random.Random(seed)
    return [
        "".join(chance.choice(WORDS) + chance.choice([" ", " ", " ", "\n", ". "]) for _ in range(chance.randint(1, longest))).strip()
        for _ in range(count)
    ]


def save_tokenizer(folder: Path, **changes: Any) -> Path:
    """A byte-level BPE tokenizer, trained on the words above, with `<eos>` and `<pad>`, as Transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(random_texts(200, seed=99), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"eos_token": "<eos>", "pad_token": "<pad>"} | changes)).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """A .jsonl file with one document a line."""
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)), encoding="utf-8")
    return path


def expected_documents(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    """The ids of each document and its end token, as Transformers gives them."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer)
    return [[*reference(text, add_special_tokens=False)["input_ids"], reference.eos_token_id] for text in texts if text]


@dataclass(frozen=True)
class StoredRows:
    """What MindSpore's reader finds in a data set, in order. `mask` is None where there is no such column."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int32] | None


def stored_rows(folder: Path) -> StoredRows:
    """Reads every shard of a data set with MindDataset, in order, without the project's loader."""
    import mindspore.dataset as ds

    files = [str(path) for path in sorted(folder.glob("*.mindrecord"))]
    rows = list(ds.MindDataset(files, shuffle=False, num_parallel_workers=1).create_dict_iterator(num_epochs=1, output_numpy=True))
    mask = np.stack([row["mask"] for row in rows]) if "mask" in rows[0] else None
    return StoredRows(np.stack([row["input_ids"] for row in rows]), mask)


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
