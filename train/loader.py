"""Batches of prepared data: which sequences a rank gets at which step, and reading them with MindDataset.

The run reads one endless list of sequences: epoch after epoch, each in its own order. A position in this list is the *global sample
offset*; a global batch is the next `global_batch` places of it, and data-parallel rank r of dp gets the r-th of dp equal parts. So the
batches of a run, and where it stands, do not depend on dp.

MindDataset's own sharding and shuffling cannot give this: its order depends on num_shards and cannot begin in the middle of an epoch. So
the order is made here, and MindDataset reads it through a SubsetSampler, which keeps the order of its indices.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mappings.errors import refuse
from train.config import TrainConfig
from train.data_index import DataIndex, read_index
from train.packing import Integers, Tokens

SEGMENT = 1 << 22
"""Sequences that one MindDataset is opened for: a sampler takes its indices as a list."""


@dataclass(frozen=True)
class SampleOrder:
    """The endless list of sequences. `sequences`: how many there are; without `shuffle` every epoch has the order of the corpus."""

    sequences: int
    seed: int
    shuffle: bool

    def epoch(self, number: int) -> Integers:
        """The order of an epoch, a permutation of the sequences.

        Sorts random 64-bit words of the counter-based generator Philox 4x64-10 with the key (seed, number): the words are the same in every
        release of numpy and on every machine, which `Generator.permutation` does not promise.
        """
        order: Integers = np.arange(self.sequences, dtype=np.int64)
        if self.shuffle:
            words = np.random.Philox(key=np.array([self.seed, number], np.uint64)).random_raw(self.sequences)
            order = np.argsort(words, kind="stable")
        return order


@dataclass(frozen=True)
class Share:
    """What one data-parallel rank takes of the list: from `start` on, part `rank` of `dp` of each `global_batch` places."""

    start: int
    global_batch: int
    dp: int
    rank: int

    @property
    def size(self) -> int:
        """Sequences of one batch of this rank."""
        return self.global_batch // self.dp

    def positions(self, first: int, stop: int) -> Integers:
        """The places of this rank among [first, stop)."""
        places = np.arange(first, stop, dtype=np.int64)
        mine: Integers = places[(places - self.start) % self.global_batch // self.size == self.rank]
        return mine


class Batch(NamedTuple):
    """A rank's part of a global batch.

    `ids` int32 [sequences, seq_length + 1]: the model reads `ids[:, :-1]` and predicts `ids[:, 1:]`. `mask`, of the same shape, is 1 where
    there is a token and 0 where there is padding; None when there is no padding. `offset` is the place of the global batch in the list.
    """

    ids: Tokens
    mask: Tokens | None
    offset: int


class SequenceLoader:
    """An endless iterator of batches. `offset`, the global sample offset of the next one, is all that a checkpoint needs to keep."""

    def __init__(self, folder: Path, index: DataIndex, order: SampleOrder, share: Share, workers: int = 2) -> None:
        if share.global_batch % share.dp or not 0 <= share.rank < share.dp or share.start < 0:
            raise ValueError(f"{share} is no share")
        self.index, self.order, self.share = index, order, share
        self.offset = share.start
        self._folder = folder
        self._files = [str(folder / shard.file) for shard in index.shards]
        self._columns = ["input_ids"] if index.packed else ["input_ids", "mask"]
        self._workers = min(workers, os.cpu_count() or 1)  # MindDataset refuses more
        self._rows = self._all_rows()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = [next(self._rows) for _ in range(self.share.size)]
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        self._check_ids(columns[0])
        batch = Batch(columns[0], columns[1] if len(columns) > 1 else None, self.offset)
        self.offset += self.share.global_batch
        return batch

    def _check_ids(self, ids: Tokens) -> None:
        """Raises Refused for an id that the index does not allow: a lookup on a device would take anything for its row."""
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest > self.index.largest_id:
            wrong = smallest if smallest < 0 else largest
            what = f"holds the token id {wrong} at sample offset {self.offset}, its index says at most {self.index.largest_id}"
            raise refuse(what, str(self._folder), "restore it, or prepare the data again")

    def _all_rows(self) -> Iterator[list[Tokens]]:
        position = self.share.start
        while True:
            number, inside = divmod(position, self.order.sequences)
            order = self.order.epoch(number)
            while inside < len(order):
                stop = min(inside + SEGMENT, len(order))
                base = number * len(order)
                chosen = order[self.share.positions(base + inside, base + stop) - base]
                if len(chosen):
                    yield from self._read(chosen)
                inside = stop
            position = (number + 1) * len(order)

    def _read(self, indices: Integers) -> Iterator[list[Tokens]]:
        import mindspore.dataset as ds

        dataset = ds.MindDataset(
            self._files, columns_list=self._columns, sampler=ds.SubsetSampler(indices.tolist()), num_parallel_workers=self._workers
        )
        yield from _prefetching(dataset, self.share.size)


def _prefetching(dataset: Any, ahead: int) -> Iterator[list[Tokens]]:
    """The rows of a dataset, of which at least `ahead` are read in advance."""
    import mindspore.dataset as ds

    before = ds.config.get_prefetch_size()
    ds.config.set_prefetch_size(max(before, ahead))
    try:
        rows = dataset.create_tuple_iterator(num_epochs=1, output_numpy=True)
    finally:
        ds.config.set_prefetch_size(before)
    yield from rows


def open_loader(config: TrainConfig, data_rank: int, offset: int = 0) -> SequenceLoader:
    """The training data for data-parallel rank `data_rank`, from a global sample offset on. Raises Refused."""
    folder = Path(config.data.path)
    index = read_index(folder)
    order = SampleOrder(index.sequences, config.train.seed, config.data.shuffle)
    return SequenceLoader(
        folder, index, order, Share(offset, config.train.global_batch, config.parallel.dp, data_rank), config.data.workers
    )


def validation_batches(config: TrainConfig, data_rank: int) -> Iterator[Batch]:
    """The batches of one validation, the same each time: the first `watch.validation_batches`, or all full ones. Raises Refused."""
    if config.data.validation_path is None:
        raise refuse("is missing", "data.validation_path", "prepare a validation set, or set watch.validate_every to 0")
    folder = Path(config.data.validation_path)
    index = read_index(folder)
    share = Share(0, config.train.global_batch, config.parallel.dp, data_rank)
    available = index.sequences // share.global_batch
    count = min(config.watch.validation_batches or available, available)
    loader = SequenceLoader(folder, index, SampleOrder(index.sequences, 0, False), share, config.data.workers)
    return (next(loader) for _ in range(count))
