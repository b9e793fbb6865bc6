"""Preparing data: the sequences are what Transformers' tokenizer says, read by MindSpore's own reader, and the same in every run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mappings.errors import Refused
from tests.train.corpora import all_bytes, expected_documents, random_texts, save_tokenizer, stored_rows, write_jsonl
from train import documents, mindrecord, prepare
from train.data_index import INDEX, read_index
from train.documents import DocumentOptions, divide
from train.prepare import Prepared, PrepareOptions, plan_preparation
from train.tokenizer import TextTokenizer, load_tokenizer
from train.tokenizing import tokenize_part

TEXTS = random_texts(120)
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tok")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts in three files of three kinds, in order, with an empty document."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_bytes(TEXTS[0].encode())
    write_jsonl(folder / "b.jsonl", [*TEXTS[1:70], ""])
    pq.write_table(pa.table({"text": TEXTS[70:]}), folder / "c.parquet", row_group_size=20)
    return folder


@pytest.fixture
def _many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and shards, so that there is something to share out, to stop and to go on with."""
    monkeypatch.setattr(documents, "PART_BYTES", 2000)
    monkeypatch.setattr(mindrecord, "SHARD_TOKENS", 700)


def options(corpus: Path, tokenizer: Path, output: Path, **changes: Any) -> PrepareOptions:
    chosen: dict[str, Any] = {"seq_length": LENGTH, "workers": 1} | changes
    return PrepareOptions(tokenizer=str(tokenizer), inputs=(str(corpus / "*.*"),), output=str(output), **chosen)


def run(chosen: PrepareOptions) -> Prepared:
    return prepare.prepare(plan_preparation(chosen))


@pytest.mark.usefixtures("_many_parts")
def test_packed_sequences_are_transformers_tokens_one_after_the_other(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    index = run(options(corpus, tokenizer, tmp_path / "out")).index
    expected = expected_documents(tokenizer, TEXTS)
    tokens = [token for document in expected for token in document]
    rows = stored_rows(tmp_path / "out")
    assert rows.mask is None and rows.ids.dtype == np.int32
    count = (len(tokens) - 1) // LENGTH
    assert np.array_equal(rows.ids, [tokens[start : start + LENGTH + 1] for start in range(0, count * LENGTH, LENGTH)])
    assert len(index.shards) > 2
    assert (index.sequences, index.tokens, index.documents, index.empty_documents) == (count, len(tokens), len(TEXTS), 1)
    assert index.left_over_tokens == len(tokens) - count * LENGTH - 1
    assert index.largest_id == max(tokens) and index.packed and index.pad_id is None and tokens[len(expected[0]) - 1] == index.eos_id
    assert (index.input_files, index.input_bytes) == (3, sum(path.stat().st_size for path in corpus.iterdir()))
    assert read_index(tmp_path / "out") == index


def test_padded_sequences_begin_with_documents_and_mask_the_padding(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    index = run(options(corpus, tokenizer, tmp_path / "out", pad=True)).index
    documents_of = expected_documents(tokenizer, TEXTS)
    chunks = [document[start : start + LENGTH + 1] for document in documents_of for start in range(0, len(document) - 1, LENGTH)]
    rows = stored_rows(tmp_path / "out")
    assert rows.mask is not None
    assert np.array_equal(rows.ids, [chunk + [1] * (LENGTH + 1 - len(chunk)) for chunk in chunks])
    assert np.array_equal(rows.mask, [[1] * len(chunk) + [0] * (LENGTH + 1 - len(chunk)) for chunk in chunks])
    assert (index.pad_id, index.packed, index.sequences, index.left_over_tokens) == (1, False, len(chunks), 0)


@pytest.mark.usefixtures("_many_parts")
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.slow
def test_every_number_of_workers_writes_the_same_bytes(tmp_path: Path, corpus: Path, tokenizer: Path, pad: bool) -> None:
    for workers in (1, 3):
        run(options(corpus, tokenizer, tmp_path / f"{workers}", pad=pad, workers=workers))
    assert all_bytes(tmp_path / "1") == all_bytes(tmp_path / "3")


@pytest.mark.usefixtures("_many_parts")
def test_the_size_of_parts_does_not_show_in_the_output(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(options(corpus, tokenizer, tmp_path / "small"))
    monkeypatch.setattr(documents, "PART_BYTES", 1 << 20)
    run(options(corpus, tokenizer, tmp_path / "large"))
    assert all_bytes(tmp_path / "small") == all_bytes(tmp_path / "large")


KILLED = """
import os, signal, sys
from train import documents, mindrecord, prepare
def main():
    documents.PART_BYTES, mindrecord.SHARD_TOKENS = 2000, 700
    corpus, tokenizer, output, when, workers = sys.argv[1:]
    calls = []
    def killed(done):
        calls.append(done)
        if len(calls) == int(when):
            os.kill(os.getpid(), signal.SIGKILL)
    options = prepare.PrepareOptions(tokenizer, (corpus + "/*.*",), %d, output, workers=int(workers))
    prepare.prepare(prepare.plan_preparation(options), killed)
if __name__ == "__main__":
    main()
"""


@pytest.mark.usefixtures("_many_parts")
@pytest.mark.slow
def test_a_killed_run_looks_unfinished_and_goes_on_where_it_was(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED % LENGTH)
    whole = run(options(corpus, tokenizer, tmp_path / "whole"))
    parts = len(plan_preparation(options(corpus, tokenizer, tmp_path / "x")).parts)
    steps = parts + len(whole.index.shards)
    for when, workers in ((1, 1), (parts, 2), (parts + 2, 1), (steps, 1)):
        output = tmp_path / f"killed-{when}"
        arguments = [sys.executable, str(program), str(corpus), str(tokenizer), str(output), str(when), str(workers)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        assert subprocess.run(arguments, env=environment, check=False).returncode == -signal.SIGKILL
        with pytest.raises(Refused):
            read_index(output)
        prepared = run(options(corpus, tokenizer, output))
        assert any("continuing" in note for note in prepared.notes)
        assert all_bytes(output) == all_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("_many_parts")
def test_going_on_does_not_do_again_what_is_done(tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options(corpus, tokenizer, tmp_path / "out")
    done: list[str] = []

    def stops(part: Any, choice: Any, loaded: Any, target: Path) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(target.name)
        return tokenize_part(part, choice, loaded, target)

    monkeypatch.setattr(prepare, "tokenize_part", stops)
    with pytest.raises(KeyboardInterrupt):
        run(chosen)

    def goes_on(part: Any, choice: Any, loaded: Any, target: Path) -> Any:
        done.append(target.name)
        return tokenize_part(part, choice, loaded, target)

    monkeypatch.setattr(prepare, "tokenize_part", goes_on)
    run(chosen)
    assert len(done) == len(set(done)) == len(plan_preparation(chosen).parts)


def test_a_run_that_is_stopped_at_once_leaves_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "tokenize_part", stops)
    with pytest.raises(KeyboardInterrupt):
        run(options(corpus, tokenizer, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def _is_killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_apart_from_a_defect(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    preparation = plan_preparation(options(corpus, tokenizer, tmp_path / "out", workers=2))
    with pytest.raises(Refused, match="ended from outside"):
        list(prepare._run(_is_killed, {0: (), 1: ()}, preparation))


def test_a_finished_data_set_is_left_alone_or_replaced_on_request(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    chosen = options(corpus, tokenizer, tmp_path / "out")
    index = run(chosen).index
    before = all_bytes(tmp_path / "out")
    again = run(chosen)
    assert again.index == index and "finished already" in again.notes[0]
    with pytest.raises(Refused, match="holds a finished data set"):
        run(replace(chosen, seq_length=LENGTH + 1))
    assert all_bytes(tmp_path / "out") == before
    other = run(replace(chosen, seq_length=LENGTH + 1, overwrite=True)).index
    assert other.seq_length == LENGTH + 1 and other.digest != index.digest and read_index(tmp_path / "out") == other


@pytest.mark.usefixtures("_many_parts")
def test_a_stopped_run_begins_again_when_the_corpus_has_changed(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_jsonl(corpus / "a.jsonl", TEXTS[:50])
    chosen = options(corpus, tokenizer, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(chosen)
    write_jsonl(corpus / "a.jsonl", TEXTS[50:90])
    notes = run(chosen).notes
    assert any("starting again" in note for note in notes)
    tokens = [token for document in expected_documents(tokenizer, TEXTS[50:90]) for token in document]
    assert np.array_equal(stored_rows(tmp_path / "out").ids.ravel()[: LENGTH + 1], tokens[: LENGTH + 1])
    assert not list((tmp_path / "out").glob(".*"))


def test_shards_are_readable_for_others_and_may_be_moved(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    run(options(corpus, tokenizer, tmp_path / "out"))
    before = stored_rows(tmp_path / "out").ids
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").glob("*.mindrecord*")} == {0o666 & ~umask}
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert np.array_equal(stored_rows(tmp_path / "elsewhere").ids, before)


def test_too_little_text_is_refused_with_what_helps(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    with pytest.raises(Refused, match="fill no sequence of 100000") as caught:
        run(options(corpus, tokenizer, tmp_path / "out", seq_length=100_000))
    assert "--pad" in caught.value.problems[0].mend


def test_an_end_token_and_a_padding_token_must_be_known(tmp_path: Path, corpus: Path) -> None:
    bare = save_tokenizer(tmp_path / "bare", eos_token=None, pad_token=None)
    with pytest.raises(Refused, match="no end token"):
        plan_preparation(options(corpus, bare, tmp_path / "out"))
    with pytest.raises(Refused, match="no padding token"):
        plan_preparation(options(corpus, bare, tmp_path / "out", eos_token="<eos>", pad=True))
    with pytest.raises(Refused, match="no token '<nothing>'"):
        plan_preparation(options(corpus, bare, tmp_path / "out", eos_token="<nothing>"))
    preparation = plan_preparation(options(corpus, bare, tmp_path / "out", eos_token="<pad>", pad_token="<eos>", pad=True))
    assert (preparation.tokenizer.eos_id, preparation.tokenizer.pad_id) == (1, 0)


def test_truncation_and_padding_in_a_tokenizer_file_are_not_followed(tmp_path: Path, tokenizer: Path) -> None:
    folder = save_tokenizer(tmp_path / "tok")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(folder).encode(TEXTS[:5]) == load_tokenizer(tokenizer).encode(TEXTS[:5])


def test_older_tokenizer_files_are_read_by_transformers(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    model = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<eos>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | special))
    old, new = load_tokenizer(folder), load_tokenizer(tokenizer)
    assert old.encode(TEXTS[:5]) == new.encode(TEXTS[:5])
    assert (old.eos_id, old.vocabulary) == (new.eos_id, new.vocabulary) and old.digest != new.digest


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(Refused):
            load_tokenizer(folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Refused, match="not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("wrong", [10, -1, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused_and_nothing_written(tmp_path: Path, wrong: int) -> None:
    (tmp_path / "a.txt").write_text("a")
    broken = TextTokenizer("broken", lambda texts: [[3, wrong, 4] for _ in texts], 10, 0, None, "", "")
    (part,) = divide([tmp_path / "a.txt"], DocumentOptions())
    with pytest.raises(Refused, match=f"gave the id {wrong}"):
        tokenize_part(part, DocumentOptions(), broken, tmp_path / "00000.tokens")
    assert not (tmp_path / "00000.tokens").exists()


def test_a_disk_that_is_full_is_told_in_one_line_and_the_run_goes_on_from_there(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspore.mindrecord import FileWriter

    said = "Exception thrown from dataset pipeline.\n\n---\n- Dataset Pipeline Error Message:\n---\n[ERROR] No free disk\n\n- C++"

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(FileWriter, "write_raw_data", full)
    with pytest.raises(Refused, match="cannot write it: No free disk\n"):
        run(options(corpus, tokenizer, tmp_path / "out"))
    monkeypatch.undo()
    run(options(corpus, tokenizer, tmp_path / "out"))
    run(options(corpus, tokenizer, tmp_path / "straight"))
    assert all_bytes(tmp_path / "out").keys() == all_bytes(tmp_path / "straight").keys()
    assert np.array_equal(stored_rows(tmp_path / "out").ids, stored_rows(tmp_path / "straight").ids)


def test_a_damaged_data_set_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    run(options(corpus, tokenizer, tmp_path / "out"))
    index = tmp_path / "out" / INDEX
    good = json.loads(index.read_text())
    changes: tuple[dict[str, Any], ...] = (
        {"sequences": 3}, {"format_version": 2}, {"seq_length": "24"}, {"largest_id": 10**6}, {"pad_id": 1}, {"more": 1},
        {"shards": [good["shards"][0] | {"file": "../x"}]}, {"shards": []},
    )  # fmt: skip
    for change in changes:
        index.write_text(json.dumps(good | change))
        with pytest.raises(Refused):
            read_index(tmp_path / "out")
    index.write_text(json.dumps(good))
    shard = tmp_path / "out" / "shard_0000.mindrecord"
    with open(shard, "ab") as file:
        file.write(b"x")
    with pytest.raises(Refused, match="bytes, not"):
        read_index(tmp_path / "out")
    shard.unlink()
    with pytest.raises(Refused, match="is missing"):
        read_index(tmp_path / "out")
