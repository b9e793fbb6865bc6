"""`index.json` of a prepared data set: what is in it, for the loader and for a person. Written last, atomically."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from converter.hf_folder import read_json_object
from converter.manifest import write_atomically
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse

INDEX = "index.json"
FORMAT_VERSION = 1
MAX_INDEX_BYTES = 64 << 20
SHARD_NAME = re.compile(r"shard_[0-9]{4}\.mindrecord")


@dataclass(frozen=True)
class ShardRecord:
    """A MindRecord file with the bytes of it and of its `.db`. `xxh3`: xxh3_64 of its sequences' ids (and masks), row by row."""

    file: str
    sequences: int
    size: int
    db_size: int
    xxh3: str


@dataclass(frozen=True)
class DataIndex:
    """A sequence is `seq_length` + 1 tokens, of which the last `seq_length` are predicted. `tokens` counts what the corpus has, end tokens
    included; the last `left_over_tokens` of it fill no sequence. Unless `packed`, rows have a mask beside the ids and `pad_id` fills them.

    `run` is the identity of the preparation, `vocabulary` the tokenizer's (its largest id plus one), `largest_id` the largest in the data,
    padding included.
    """

    format_version: int
    tool_version: str
    run: str
    seq_length: int
    packed: bool
    sequences: int
    tokens: int
    documents: int
    empty_documents: int
    left_over_tokens: int
    vocabulary: int
    largest_id: int
    eos_id: int
    pad_id: int | None
    tokenizer: str
    vocabulary_digest: str
    input_files: int
    input_bytes: int
    shards: tuple[ShardRecord, ...]

    @property
    def digest(self) -> str:
        """Equal for equal sequences in equal order and shards: what a checkpoint remembers of the data that it was trained on."""
        facts = (self.seq_length, self.packed, [(shard.sequences, shard.xxh3) for shard in self.shards])
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def write_index(folder: Path, index: DataIndex) -> None:
    """Write `index.json`: temporary file, fsync, rename."""
    write_atomically(folder / INDEX, json.dumps(encode(index), indent=2) + "\n")


def read_index(folder: Path) -> DataIndex:
    """Read and check the index, and that the shards are there in the sizes that it says. Raises Refused."""
    path = folder / INDEX
    if not path.is_file():
        if not folder.is_dir():
            raise refuse("no such folder", str(folder), "make it with `ms-train prepare-data --output`, or mend the path")
        what = f"no {INDEX}: not a finished output of ms-train prepare-data"
        raise refuse(what, str(folder), "if prepare-data was stopped, run the same command again; it continues")
    data = read_json_object(path, MAX_INDEX_BYTES, folder)
    if data.get("format_version") != FORMAT_VERSION:
        found = str(data.get("format_version"))[:40]
        raise refuse(
            f"format version {found}, this tool reads {FORMAT_VERSION}", str(path), "use the version that wrote it, or prepare it again"
        )
    try:
        index = decode(DataIndex, data, "index")
    except (RecordError, RecursionError) as error:
        raise refuse(str(error)[:300], str(path), "restore it, or prepare the data again") from error
    problems = [Problem(what, str(path), "restore it, or prepare the data again") for what in _mistakes(index)]
    problems = problems or [
        Problem(what, str(folder / file), "restore it, or prepare the data again") for file, what in _missing(folder, index)
    ]
    if problems:
        raise Refused("the prepared data is not whole", problems[:20])
    return index


def _mistakes(index: DataIndex) -> Iterator[str]:
    if index.seq_length < 1 or sum(shard.sequences for shard in index.shards) != index.sequences:
        yield "the shards do not add up to the sequences"
    if [shard.file for shard in index.shards] != [shard_name(number) for number in range(len(index.shards))]:
        yield "the shards are not named as they should be"
    if any(shard.sequences < 1 for shard in index.shards):
        yield "a shard is empty"
    if not 0 <= index.largest_id < index.vocabulary or not 0 <= index.eos_id < index.vocabulary:
        yield "an id is outside the vocabulary"
    if index.packed != (index.pad_id is None):
        yield "packed sequences have no padding, others need a pad id"


def _missing(folder: Path, index: DataIndex) -> Iterator[tuple[str, str]]:
    for shard in index.shards:
        for name, size in ((shard.file, shard.size), (shard.file + ".db", shard.db_size)):
            path = folder / name
            if not path.is_file():
                yield name, "is missing"
            elif path.stat().st_size != size:
                yield name, f"has {path.stat().st_size} bytes, not {size}"


def shard_name(number: int) -> str:
    """The file name of a shard. MindRecord stores it inside the file, which must therefore keep it."""
    return f"shard_{number:04}.mindrecord"
