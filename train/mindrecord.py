"""The second half of preparing data: sequences as MindRecord shards, written by MindSpore's own FileWriter, in a process for each shard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mappings.errors import refuse
from train.data_index import ShardRecord
from train.packing import Packed, Padded, Sequences, Tokens, TokenStream, rows
from train.tokenizing import all_lengths, tokens_path

SHARD_TOKENS = 1 << 24
MAX_SHARDS = 128
"""A reader holds every shard open, once for each of its threads."""
ROWS = 128
_SMALLEST_PAGE, _USUAL_PAGE, _LARGEST_PAGE, _PAGES = 32 << 10, 4 << 20, 256 << 20, 1024
_ERROR = "[ERROR] "
_HEADER = 1 << 20
"""It lists the pages, with 215 bytes for each, measured."""


@dataclass(frozen=True)
class TokenFiles:
    """The token files of a whole corpus, and how sequences are made of them. `pad_id` None: packed."""

    folder: str
    parts: int
    dtype: str
    tokens: int
    seq_length: int
    pad_id: int | None

    def sequences(self) -> Sequences:
        if self.pad_id is None:
            return Packed(self.tokens, self.seq_length)
        return Padded(all_lengths(Path(self.folder), self.parts), self.seq_length)

    def stream(self) -> TokenStream:
        return TokenStream([tokens_path(Path(self.folder), number) for number in range(self.parts)], self.dtype)


def cut_shards(sequences: int, seq_length: int) -> list[tuple[int, int]]:
    """Sequences [start, stop) of each shard, as even as can be. It depends on these two numbers alone."""
    shards = min(max(1, -(-sequences * seq_length // SHARD_TOKENS)), MAX_SHARDS, sequences)
    ends = [sequences * (number + 1) // shards for number in range(shards)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def write_shard(files: TokenFiles, start: int, stop: int, path: Path) -> ShardRecord:
    """Write sequences [start, stop) to `path` and `path`.db. Raises Refused when MindRecord does not give them back.

    Columns: `input_ids` int32 [seq_length + 1], and unless packed `mask` int32 of the same shape, 1 for a token and 0 for padding.
    """
    columns = ("input_ids",) if files.pad_id is None else ("input_ids", "mask")
    digest = xxhash.xxh3_64()
    writer = _writer(path, columns, files.seq_length + 1, stop - start)
    for block in _blocks(files, start, stop):
        records = [dict(zip(columns, row, strict=False)) for row in zip(*block, strict=True)]
        for record in records:
            for column in columns:
                digest.update(record[column].tobytes())
        with _told(path):
            writer.write_raw_data(records)
    with _told(path):
        writer.commit()
    _check_written(path, columns, digest.hexdigest())
    database = path.with_name(path.name + ".db")
    for written in (path, database):
        os.chmod(written, 0o666 & ~_umask())  # the writer lets nobody but the owner read
    return ShardRecord(path.name, stop - start, path.stat().st_size, database.stat().st_size, digest.hexdigest())


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """MindRecord's errors are RuntimeErrors of many lines, with titles and a call stack. Raises Refused with the line that says why."""
    try:
        yield
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)), lines[0] if lines else "no reason is given")
        mend = "run it again when that is mended; it continues"
        raise refuse(f"MindRecord cannot write it: {why[:300]}", str(path), mend) from error


def _blocks(files: TokenFiles, start: int, stop: int) -> Iterator[tuple[Tokens, Tokens]]:
    stream, sequences = files.stream(), files.sequences()
    for first in range(start, stop, ROWS):
        yield rows(stream, sequences, first, min(first + ROWS, stop), files.seq_length, files.pad_id or 0)


def _writer(path: Path, columns: Sequence[str], width: int, sequences: int) -> Any:
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), shard_num=1, overwrite=True)
    # The defaults, pages of 32 MB after a header of 16 MB, make a small shard a large file.
    writer.set_header_size(_HEADER)
    writer.set_page_size(_page_size(width * 4 * len(columns), sequences))
    writer.add_schema({name: {"type": "int32", "shape": [width]} for name in columns}, "token sequences")
    return writer


def _page_size(row_bytes: int, rows_in_shard: int) -> int:
    """A power of two that holds two rows and lets the header, which lists the pages, hold them all."""
    shard = row_bytes * rows_in_shard
    wanted = max(2 * row_bytes, shard // _PAGES, min(shard, _USUAL_PAGE), _SMALLEST_PAGE)
    return min(1 << (wanted - 1).bit_length(), _LARGEST_PAGE)


def _check_written(path: Path, columns: Sequence[str], expected: str) -> None:
    """Read the shard back: FileWriter drops a row that it does not like with a warning."""
    from mindspore.mindrecord import FileReader

    digest = xxhash.xxh3_64()
    reader = FileReader(str(path), num_consumer=1, columns=list(columns))
    for row in reader.get_next():
        for column in columns:
            digest.update(row[column].tobytes())
    reader.close()
    if digest.hexdigest() != expected:
        raise refuse(
            "MindRecord does not give back what was written", str(path), "check the disk and run it again; if it stays so, report it"
        )


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
