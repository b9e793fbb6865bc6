"""The first half of preparing data: each part of the corpus becomes a file of tokens, in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from converter.manifest import write_whole
from converter.partial_files import SUFFIX
from converter.records import decode, encode
from mappings.errors import refuse
from train.documents import DocumentOptions, Part, Piece, read
from train.packing import Integers
from train.tokenizer import TextTokenizer, load_tokenizer

BATCH_PIECES = 1000
BATCH_CHARS = 1 << 20
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, as each process loads it."""

    folder: str
    eos_token: str | None
    pad_token: str | None

    def load(self) -> TextTokenizer:
        return load_tokenizer(Path(self.folder), self.eos_token, self.pad_token)


@dataclass(frozen=True)
class PartFacts:
    """What one part became. `largest_id` is -1 when it has no token. `xxh3`: of the token file."""

    documents: int
    empty_documents: int
    tokens: int
    largest_id: int
    xxh3: str


def token_dtype(vocabulary: int) -> np.dtype[np.generic]:
    """The element type of a token file."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def tokens_path(folder: Path, number: int) -> Path:
    """Where the tokens of a part are; their documents' lengths (uint64) are beside them in `.lengths`, the facts in `.json`."""
    return folder / f"{number:05}.tokens"


def read_facts(folder: Path, number: int) -> PartFacts:
    """The facts of a finished part."""
    return decode(PartFacts, json.loads(tokens_path(folder, number).with_suffix(".json").read_text(encoding="utf-8")))


def tokenize_part(part: Part, options: DocumentOptions, tokenizer: TextTokenizer, target: Path) -> PartFacts:
    """Write the tokens of a part, each document followed by the end token, to `target`, and what goes beside it.

    The files have their names only when they are complete. Raises Refused for an id outside the vocabulary, and what `documents.read` does.
    """
    dtype, digest = token_dtype(tokenizer.vocabulary), xxhash.xxh3_64()
    lengths: list[int] = []
    empty = current = 0
    largest = -1
    partial = target.with_name(target.name + SUFFIX)
    with open(partial, "wb") as file:
        for ids, last in _tokens(read(part, options), tokenizer):
            current += len(ids)
            if last and current:
                ids = [*ids, _end(tokenizer)]
                lengths.append(current + 1)
            empty += last and not current
            current = 0 if last else current
            largest = max(largest, _checked(ids, tokenizer))
            data = np.array(ids, dtype).tobytes()
            digest.update(data)
            file.write(data)
    write_whole(target.with_suffix(".lengths"), np.array(lengths, f"<u{LENGTH_BYTES}").tobytes())
    facts = PartFacts(len(lengths), empty, sum(lengths), largest, digest.hexdigest())
    write_whole(target.with_suffix(".json"), json.dumps(encode(facts)).encode())
    os.replace(partial, target)
    return facts


def _end(tokenizer: TextTokenizer) -> int:
    assert tokenizer.eos_id is not None
    return tokenizer.eos_id


def _checked(ids: Sequence[int], tokenizer: TextTokenizer) -> int:
    """The largest id. Raises Refused for one outside the vocabulary."""
    if not ids:
        return -1
    smallest, largest = min(ids), max(ids)
    if smallest < 0 or largest >= tokenizer.vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise refuse(
            f"gave the id {wrong}, outside of its vocabulary of {tokenizer.vocabulary}", tokenizer.name, "check the tokenizer's files"
        )
    return largest


def _tokens(pieces: Iterator[Piece], tokenizer: TextTokenizer) -> Iterator[tuple[list[int], bool]]:
    """The ids of each piece, and whether its document ends with it; the tokenizer is given many pieces at a time."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if len(batch) >= BATCH_PIECES or chars >= BATCH_CHARS:
            yield from _encoded(batch, tokenizer)
            batch, chars = [], 0
    yield from _encoded(batch, tokenizer)


def _encoded(batch: list[Piece], tokenizer: TextTokenizer) -> Iterator[tuple[list[int], bool]]:
    if batch:
        yield from zip(tokenizer.encode([piece.text for piece in batch]), (piece.last for piece in batch), strict=True)


def all_lengths(folder: Path, parts: int) -> Integers:
    """The number of tokens of every document of the corpus, in order."""
    pieces = [np.fromfile(tokens_path(folder, number).with_suffix(".lengths"), f"<u{LENGTH_BYTES}") for number in range(parts)]
    lengths: Integers = np.concatenate(pieces).astype(np.int64)
    return lengths
