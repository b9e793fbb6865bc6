"""Cutting a stream of tokens into sequences, against the same thing said with lists."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train.mindrecord import MAX_SHARDS, cut_shards
from train.packing import Packed, Padded, Sequences, TokenStream, rows

DOCUMENTS = st.lists(st.integers(2, 25), min_size=1, max_size=12)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def stream_of(folder: Path, documents: list[list[int]], per_file: int) -> TokenStream:
    files = []
    for number in range(0, len(documents), per_file):
        path = folder / f"{number}.tokens"
        path.write_bytes(np.array([token for document in documents[number : number + per_file] for token in document], "<u2").tobytes())
        files.append(path)
    return TokenStream(files, "<u2")


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of different tokens."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 10, end + 10)) for end, length in zip(ends.tolist(), lengths, strict=True)]


def all_rows(stream: TokenStream, sequences: Sequences, length: int, step: int) -> tuple[list[list[int]], list[list[int]]]:
    blocks = [
        rows(stream, sequences, start, min(start + step, len(sequences)), length, pad_id=7) for start in range(0, len(sequences), step)
    ]
    return [row for ids, _ in blocks for row in ids.tolist()], [row for _, mask in blocks for row in mask.tolist()]


@given(lengths=DOCUMENTS, length=st.integers(1, 12), per_file=st.integers(1, 5), step=st.integers(1, 9))
@ONE_FOLDER
def test_packed_sequences_share_one_token_and_lose_only_the_end(
    tmp_path: Path, lengths: list[int], length: int, per_file: int, step: int
) -> None:
    documents = numbered(lengths)
    tokens = [token for document in documents for token in document]
    sequences = Packed(len(tokens), length)
    expected = [tokens[start : start + length + 1] for start in range(0, len(tokens) - length, length)]
    ids, mask = all_rows(stream_of(tmp_path, documents, per_file), sequences, length, step)
    assert ids == expected
    assert mask == [[1] * (length + 1)] * len(expected)
    assert sequences.left_over == (len(tokens) - (len(expected) * length + 1) if expected else len(tokens)) < length + 1


@given(lengths=DOCUMENTS, length=st.integers(1, 12), per_file=st.integers(1, 5), step=st.integers(1, 9))
@ONE_FOLDER
def test_padded_sequences_begin_with_documents_and_predict_every_token_of_them(
    tmp_path: Path, lengths: list[int], length: int, per_file: int, step: int
) -> None:
    documents = numbered(lengths)
    chunks = [document[start : start + length + 1] for document in documents for start in range(0, len(document) - 1, length)]
    ids, mask = all_rows(stream_of(tmp_path, documents, per_file), Padded(np.array(lengths), length), length, step)
    assert ids == [chunk + [7] * (length + 1 - len(chunk)) for chunk in chunks]
    assert mask == [[1] * len(chunk) + [0] * (length + 1 - len(chunk)) for chunk in chunks]
    predicted = [token for row, shown in zip(ids, mask, strict=True) for token, seen in list(zip(row, shown, strict=True))[1:] if seen]
    assert predicted == [token for document in documents for token in document[1:]]


@given(sequences=st.integers(1, 10**7), length=st.integers(1, 10**5))
def test_shards_are_a_partition_into_even_and_not_too_many_parts(sequences: int, length: int) -> None:
    cuts = cut_shards(sequences, length)
    assert cuts[0][0] == 0 and cuts[-1][1] == sequences
    assert all(one[1] == other[0] for one, other in pairwise(cuts))
    sizes = [stop - start for start, stop in cuts]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and len(cuts) <= MAX_SHARDS
