"""Which sequences a rank gets: one list of global batches, whatever the number of data-parallel ranks, from any place on."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappings.errors import Refused
from tests.train.configs import config_with
from tests.train.corpora import random_texts, save_tokenizer, stored_rows, write_jsonl
from train import loader, mindrecord
from train.loader import Batch, SampleOrder, SequenceLoader, Share, open_loader, validation_batches
from train.prepare import PrepareOptions, plan_preparation, prepare

BATCH = 8
ORDER_0 = [8, 9, 7, 3, 0, 1, 4, 2, 5, 6]
ORDER_1 = [0, 9, 5, 6, 4, 2, 8, 1, 7, 3]
KNOWN = ["0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b"]
Ids = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A packed and a padded data set of several shards."""
    folder = tmp_path_factory.mktemp("data")
    save_tokenizer(folder / "tok")
    write_jsonl(folder / "a.jsonl", random_texts(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mindrecord, "SHARD_TOKENS", 500)
        for name in ("packed", "padded"):
            options = PrepareOptions(
                str(folder / "tok"), (str(folder / "a.jsonl"),), 12, str(folder / name), pad=name == "padded", workers=1
            )
            assert len(prepare(plan_preparation(options)).index.shards) > 2
    return {name: folder / name for name in ("packed", "padded")}


def global_batches(folder: Path, dp: int, offset: int, count: int) -> list[list[Batch]]:
    """The next batches from an offset on, of every rank."""
    config = config_with(folder.parent, data__path=str(folder), train__global_batch=BATCH, train__seed=5, parallel__dp=dp)
    ranks = [list(islice(open_loader(config, rank, offset), count)) for rank in range(dp)]
    return [list(parts) for parts in zip(*ranks, strict=True)]


def joined(batches: list[list[Batch]]) -> list[Ids]:
    return [np.concatenate([part.ids for part in parts]) for parts in batches]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_global_batches_do_not_depend_on_dp_nor_on_where_the_run_was_taken_up(data: dict[str, Path], dp: int) -> None:
    stored = stored_rows(data["packed"]).ids
    count = 2 * len(stored) // BATCH + 3  # into the third epoch
    order = SampleOrder(len(stored), 5, True)
    listed = np.concatenate([order.epoch(number) for number in range(4)])
    expected = [stored[listed[start : start + BATCH]] for start in range(0, count * BATCH, BATCH)]
    for first in (0, 1, len(stored) // BATCH, count - 2):
        batches = global_batches(data["packed"], dp, first * BATCH, count - first)
        assert all(np.array_equal(one, other) for one, other in zip(joined(batches), expected[first:], strict=True))
        assert [parts[-1].offset for parts in batches] == [number * BATCH for number in range(first, count)]


def test_the_offset_of_a_loader_is_where_the_next_batch_begins(data: dict[str, Path], tmp_path: Path) -> None:
    config = config_with(tmp_path, data__path=str(data["packed"]), train__global_batch=BATCH)
    one = open_loader(config, 0)
    for _ in range(5):
        next(one)
    other = open_loader(config, 0, one.offset)
    assert np.array_equal(next(one).ids, next(other).ids) and one.offset == other.offset == 6 * BATCH


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_an_epoch_holds_every_sequence_once_and_masks_go_with_their_rows(data: dict[str, Path], name: str) -> None:
    stored = stored_rows(data[name])
    batches = [batch for (batch,) in global_batches(data[name], 1, 0, len(stored.ids) // BATCH + 1)]
    ids = np.concatenate([batch.ids for batch in batches])[: len(stored.ids)]
    assert ids.dtype == np.int32 and ids.shape == stored.ids.shape
    assert sorted(map(bytes, ids)) == sorted(map(bytes, stored.ids)) and not np.array_equal(ids, stored.ids)
    if stored.mask is None:
        assert all(batch.mask is None for batch in batches)
    else:
        masks = np.concatenate([batch.mask for batch in batches if batch.mask is not None])[: len(ids)]
        assert np.array_equal(masks == 0, np.cumsum(ids == 0, axis=1) - (ids == 0) > 0)  # all after the end token is padding


def test_seeds_and_epochs_have_different_orders_and_no_shuffle_keeps_the_corpus_order() -> None:
    orders = [SampleOrder(1000, seed, True).epoch(number) for seed in (0, 1) for number in (0, 1)]
    assert all(sorted(order.tolist()) == list(range(1000)) for order in orders)
    agreeing = [np.mean(one == other) for place, one in enumerate(orders) for other in orders[:place]]
    assert max(agreeing) < 0.01  # one place in a thousand, for independent permutations
    assert SampleOrder(5, 3, False).epoch(2).tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_the_one_that_checkpoints_rely_on() -> None:
    """A changed order would make a resumed run read other data without a word."""
    assert SampleOrder(10, 1234, True).epoch(0).tolist() == ORDER_0
    assert SampleOrder(10, 1234, True).epoch(1).tolist() == ORDER_1


def test_the_words_of_philox_are_those_of_its_authors() -> None:
    """Known answer of philox4x64-10 for counter 0 and key 0 (Random123, kat_vectors): numpy counts up before it gives the first words."""
    philox = np.random.Philox(counter=np.array([2**64 - 1] * 4, np.uint64), key=np.zeros(2, np.uint64))
    assert [hex(word) for word in philox.random_raw(4).tolist()] == KNOWN


@given(
    batch=st.sampled_from([4, 12, 24]),
    dp=st.sampled_from([1, 2, 4]),
    start=st.integers(0, 100),
    first=st.integers(0, 50),
    count=st.integers(0, 90),
)
def test_shares_are_a_partition_in_order(batch: int, dp: int, start: int, first: int, count: int) -> None:
    ranks = [Share(start, batch, dp, rank).positions(start + first, start + first + count).tolist() for rank in range(dp)]
    assert sorted(place for places in ranks for place in places) == list(range(start + first, start + first + count))
    for rank, places in enumerate(ranks):
        assert places == [place for place in range(start + first, start + first + count) if (place - start) % batch * dp // batch == rank]


def test_long_epochs_are_read_in_segments(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = joined(global_batches(data["packed"], 2, 0, 12))
    monkeypatch.setattr(loader, "SEGMENT", 5)  # less than a batch, so that some segments have nothing for a rank
    assert all(np.array_equal(one, other) for one, other in zip(joined(global_batches(data["packed"], 2, 0, 12)), whole, strict=True))


def test_a_batch_may_be_larger_than_the_data_set(data: dict[str, Path]) -> None:
    stored = stored_rows(data["packed"]).ids
    index = open_loader(config_with(data["packed"].parent, data__path=str(data["packed"])), 0).index
    big = SequenceLoader(data["packed"], index, SampleOrder(index.sequences, 0, False), Share(0, 2 * len(stored) + 2, 2, 1))
    assert np.array_equal(next(big).ids, np.concatenate([stored, stored, stored])[len(stored) + 1 : 2 * len(stored) + 2])


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_that_the_index_does_not_allow_is_refused(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    index = open_loader(config_with(data["packed"].parent, data__path=str(data["packed"])), 0).index
    loaded = SequenceLoader(data["packed"], index, SampleOrder(index.sequences, 0, False), Share(0, 4, 1, 0))
    rows = [stored_rows(data["packed"]).ids[number].copy() for number in range(8)]
    rows[6][3] = wrong
    monkeypatch.setattr(loaded, "_rows", iter([row] for row in rows))
    next(loaded)
    with pytest.raises(Refused, match=f"{wrong} at sample offset 4"):
        next(loaded)


def test_the_prefetch_size_of_others_is_left_as_it_was(data: dict[str, Path], tmp_path: Path) -> None:
    import mindspore.dataset as ds

    before = ds.config.get_prefetch_size()
    next(open_loader(config_with(tmp_path, data__path=str(data["packed"]), train__global_batch=200), 0))
    assert ds.config.get_prefetch_size() == before


@pytest.mark.parametrize("dp", [1, 2])
def test_validation_reads_the_same_batches_each_time_in_the_order_of_the_corpus(data: dict[str, Path], tmp_path: Path, dp: int) -> None:
    stored = stored_rows(data["packed"]).ids
    for limit, count in ((0, len(stored) // BATCH), (2, 2), (10**6, len(stored) // BATCH)):
        config = config_with(
            tmp_path, data__validation_path=str(data["packed"]), train__global_batch=BATCH, parallel__dp=dp, watch__validation_batches=limit
        )  # fmt: skip
        for _ in range(2):
            ranks = [list(validation_batches(config, rank)) for rank in range(dp)]
            found = joined([list(parts) for parts in zip(*ranks, strict=True)])
            assert np.array_equal(np.concatenate(found), stored[: count * BATCH])


def test_validation_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        validation_batches(config_with(tmp_path), 0)
