"""Reading documents: each exactly once, whole, in order, however the files are divided."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mappings.errors import Refused
from tests.train.corpora import random_texts, write_jsonl
from train import documents
from train.documents import DocumentOptions, divide, find_files, read

LINES = st.lists(st.sampled_from(["", "a", "bc ", "--", "-- ", "é漢", "\r", "--\r"]), max_size=30)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def texts_of(files: list[Path], options: DocumentOptions) -> list[str]:
    """The documents of all parts, their pieces joined."""
    found, current = [], ""
    for part in divide(files, options):
        for piece in read(part, options):
            current += piece.text
            if piece.last:
                found.append(current)
                current = ""
        assert not current  # a document ends in the part that it begins in
    return found


def small_parts(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(documents, "PART_BYTES", size)
    patch.setattr(documents, "MAX_PARTS", 1 << 30)


@given(lines=LINES, part=st.integers(1, 40), final=st.booleans())
@ONE_FOLDER
def test_separators_divide_a_text_file_the_same_way_in_any_parts(tmp_path: Path, lines: list[str], part: int, final: bool) -> None:
    text = "\n".join(lines) + ("\n" if final else "")
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    expected, current = [], ""
    for line in text.split("\n")[:-1]:
        if line.rstrip("\r") == "--":
            expected.append(current)
            current = ""
        else:
            current += line + "\n"
    last = text.split("\n")[-1]
    expected += [current] if last.rstrip("\r") == "--" else [current + last]
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch, part)
        assert texts_of([path], DocumentOptions(separator="--")) == [text for text in expected if text]


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=20),
    part=st.integers(1, 60),
    blank=st.booleans(),
)
@ONE_FOLDER
def test_json_lines_come_once_in_any_parts(tmp_path: Path, texts: list[str], part: int, blank: bool) -> None:
    path = tmp_path / "a.jsonl"
    between = "\n\n" if blank else "\n"
    path.write_text(between.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8", newline="\n")
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch, part)
        assert texts_of([path], DocumentOptions()) == texts


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "one\r\ntwo\n\n\nthree \u2028 four\f\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    assert texts_of([tmp_path / "a.txt", tmp_path / "b.txt"], DocumentOptions()) == [text, ""]
    assert texts_of([tmp_path / "b.txt", tmp_path / "a.txt"], DocumentOptions(separator="x")) == [text]


def test_files_of_all_kinds_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    texts = random_texts(40)
    write_jsonl(tmp_path / "b.jsonl", texts[:15])
    pq.write_table(pa.table({"n": list(range(20)), "text": texts[15:35]}), tmp_path / "c.parquet", row_group_size=7)
    (tmp_path / "a.txt").write_text(texts[35], encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text(texts[36], encoding="utf-8")
    files = find_files([str(tmp_path / "*.{parquet,txt,jsonl}"), str(tmp_path / "**" / "*.txt")])
    assert [path.name for path in files] == ["a.txt", "b.jsonl", "c.parquet", "d.txt"]
    assert texts_of(files, DocumentOptions()) == [texts[35], *texts[:15], *texts[15:35], texts[36]]


def test_null_and_empty_text_are_empty_documents(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", None, "", "b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"body": null}\n{"body": ""}\n{"body": "c"}\n')
    files = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    assert texts_of(files, DocumentOptions(text_key="body")) == ["a", "", "", "b", "", "", "c"]


@pytest.mark.parametrize("kind", ["txt", "separated", "jsonl"])
def test_a_long_document_comes_in_pieces_that_end_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 100)
    text = "".join(f"{line}\n" for line in random_texts(50, longest=8)).replace("\n\n", "\n")
    path = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt")
    path.write_text(json.dumps({"text": text}) if kind == "jsonl" else text, encoding="utf-8")
    options = DocumentOptions(separator="--" if kind == "separated" else None)
    pieces = [piece for part in divide([path], options) for piece in read(part, options)]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) > 10
    assert all(piece.text.endswith("\n") and len(piece.text) <= 200 for piece in pieces[:-1])


def test_a_letter_is_not_broken_where_a_line_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 7)
    (tmp_path / "a.txt").write_text("漢字" * 50, encoding="utf-8")
    assert texts_of([tmp_path / "a.txt"], DocumentOptions()) == ["漢字" * 50]


def refusal(path: Path, content: bytes, options: DocumentOptions | None = None) -> str:
    path.write_bytes(content)
    with pytest.raises(Refused) as caught:
        texts_of([path], options or DocumentOptions())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"good\nbad \xe4\n", "not UTF-8: byte 0xe4"),
        ("a.txt", b"good\ncut \xe6\xbc", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl, byte 14"),
        ("a.jsonl", b'{"text": "a"}\n{"content": "b", "url": 3}\n', "its keys are content, url"),
        ("a.jsonl", b'["a"]\n', "it is no object"),
        ("a.jsonl", b'{"text": 3}\n', "is int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
        ("a.jsonl", b"[" * 100_000, "not a line of JSON"),
        ("a.parquet", b"PAR1 and nothing more", "not a Parquet file"),
    ],
)
def test_what_is_no_document_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path / name, content)


def test_a_parquet_file_without_the_column_says_which_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(Refused, match="its columns are content, url"):
        divide([tmp_path / "a.parquet"], DocumentOptions())


def test_a_parquet_file_with_a_damaged_page_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some words " * 500, None]}), path)
    content = bytearray(path.read_bytes())
    content[8:60] = bytes(byte ^ 0x5A for byte in content[8:60])
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"a\.parquet, row group 0"):
        list(read(divide([path], DocumentOptions())[0], DocumentOptions()))


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    assert "a line of more than" in refusal(tmp_path / "a.jsonl", b'{"text": "' + b"a" * 2000 + b'"}')


def test_patterns_that_name_nothing_and_foreign_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    with pytest.raises(Refused) as caught:
        find_files([str(tmp_path / "*.txt"), str(tmp_path / "a.*")])
    assert len(caught.value.problems) == 2
