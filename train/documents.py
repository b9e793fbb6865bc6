"""The documents of a corpus: .txt, .jsonl and .parquet files, divided into parts that can be read on their own, in bounded memory."""

from __future__ import annotations

import codecs
import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mappings.errors import Problem, Refused, refuse

PIECE_CHARS = 1 << 20
MAX_LINE_BYTES = 256 << 20
PART_BYTES = 4 << 20
MAX_PARTS = 4096
MAX_PROBLEMS = 20
SUFFIXES = (".txt", ".jsonl", ".parquet")
_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class DocumentOptions:
    """`text_key`: the field (.jsonl) or column (.parquet) that holds a document. `separator`: a line of a .txt file that is exactly this
    ends a document; None: each .txt file is one document.
    """

    text_key: str = "text"
    separator: str | None = None


@dataclass(frozen=True)
class Span:
    """A piece of a file: bytes [start, stop) of a text file, row groups [start, stop) of a .parquet file. `size`: bytes, for progress."""

    path: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Part:
    """Consecutive spans that one worker reads."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


@dataclass(frozen=True)
class Piece:
    """Some text of a document; `last` says that the document ends with it. A long document comes in several pieces, cut at line ends."""

    text: str
    last: bool


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The files that the patterns name (`*`, `?`, `**`, `{a,b}`), each once, in the order of the patterns and sorted within each.

    Raises Refused for a pattern that names nothing, and for files of another kind.
    """
    found: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        names = sorted({name for plain in _without_braces(pattern) for name in glob.glob(plain, recursive=True) if Path(name).is_file()})
        if not names:
            problems.append(Problem("no such file", pattern, "check the path; quote a pattern so that the shell leaves it alone"))
        for name in names:
            if Path(name).suffix not in SUFFIXES:
                problems.append(Problem(f"not one of {', '.join(SUFFIXES)}", name, "name the files more precisely, or rename this one"))
            found[Path(name)] = None
    if problems:
        raise Refused("the input cannot be used", problems[:MAX_PROBLEMS])
    return list(found)


def _without_braces(pattern: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`; glob knows no braces."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    return [
        plain for choice in match[1].split(",") for plain in _without_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def divide(files: Sequence[Path], options: DocumentOptions) -> list[Part]:
    """The files as parts of similar size, in order. It depends on the files alone; documents are never divided."""
    total = sum(path.stat().st_size for path in files)
    limit = max(PART_BYTES, -(-total // MAX_PARTS))
    parts: list[Part] = []
    spans: list[Span] = []
    size = 0
    for span in (span for path in files for span in _spans(path, options, limit)):
        if spans and size + span.size > limit:
            parts.append(Part(tuple(spans)))
            spans, size = [], 0
        spans.append(span)
        size += span.size
    return [*parts, Part(tuple(spans))] if spans else parts


def _spans(path: Path, options: DocumentOptions, limit: int) -> Iterator[Span]:
    size = path.stat().st_size
    if path.suffix == ".parquet":
        yield from _row_groups(path, options)
    elif path.suffix == ".txt" and options.separator is None:
        yield Span(str(path), 0, size, size)
    else:
        for start in range(0, size, limit):
            stop = min(start + limit, size)
            yield Span(str(path), start, stop, stop - start)


def read(part: Part, options: DocumentOptions) -> Iterator[Piece]:
    """The documents of a part. Raises Refused for text that is not UTF-8, and for a record without the text that it should have."""
    for span in part.spans:
        path = Path(span.path)
        if path.suffix == ".parquet":
            yield from _cut(_parquet_texts(span, options))
        elif path.suffix == ".jsonl":
            yield from _cut(_json_texts(span, options))
        elif options.separator is None:
            yield from _whole_file(path)
        else:
            yield from _separated(span, options.separator)


def _cut(texts: Iterable[str]) -> Iterator[Piece]:
    """Each text as pieces of at most PIECE_CHARS characters, cut after a line end where there is one."""
    for text in texts:
        start = 0
        while len(text) - start > PIECE_CHARS:
            end = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
            yield Piece(text[start:end], False)
            start = end
        yield Piece(text[start:], True)


def _lines(file: BinaryIO, path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin at or after byte `start`, each with its place. A line end is a line feed."""
    place = max(start - 1, 0)
    file.seek(place)
    if start:
        place += len(_line(file, path, place))
    while line := _line(file, path, place):
        yield place, line.removeprefix(codecs.BOM_UTF8) if place == 0 else line
        place += len(line)


def _line(file: BinaryIO, path: Path, place: int) -> bytes:
    line = file.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise refuse(f"a line of more than {MAX_LINE_BYTES >> 20} MiB", f"{path}, byte {place}", "split the document")
    return line


def _json_texts(span: Span, options: DocumentOptions) -> Iterator[str]:
    path = Path(span.path)
    with open(path, "rb") as file:
        for place, line in _lines(file, path, span.start):
            if place >= span.stop:
                return
            if line.strip():
                yield _json_text(line, f"{path}, byte {place}", options)


def _json_text(line: bytes, where: str, options: DocumentOptions) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not a line of JSON: {str(error)[:200]}", where, "each line of a .jsonl file is one JSON object") from error
    if not isinstance(record, dict) or options.text_key not in record:
        keys = f"its keys are {', '.join(sorted(map(str, record))[:10])}" if isinstance(record, dict) else "it is no object"
        raise refuse(f"has no {options.text_key!r}; {keys}", where, "say which key holds the text with --text-key")
    return _as_text(record[options.text_key], where, options)


def _as_text(value: object, where: str, options: DocumentOptions) -> str:
    """A document; null is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refuse(f"{options.text_key!r} is {type(value).__name__}, not text", where, "say which key holds the text with --text-key")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(f"{options.text_key!r} holds half a surrogate pair", where, "write the text again as UTF-8") from error
    return value


def _row_groups(path: Path, options: DocumentOptions) -> Iterator[Span]:
    with _parquet(path) as file:
        if options.text_key not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names[:20])
            raise refuse(f"has no column {options.text_key!r}; its columns are {names}", str(path), "say which with --text-key")
        for group in range(file.num_row_groups):
            yield Span(str(path), group, group + 1, file.metadata.row_group(group).total_byte_size)


def _parquet_texts(span: Span, options: DocumentOptions) -> Iterator[str]:
    with _parquet(Path(span.path)) as file:
        groups = list(range(span.start, span.stop))
        batches = file.iter_batches(batch_size=1024, row_groups=groups, columns=[options.text_key], use_threads=False)
        for batch in _readable(batches, f"{span.path}, row group {span.start}"):
            for value in batch.column(0):
                yield _as_text(value.as_py(), f"{span.path}, row group {span.start}", options)


def _readable(batches: Iterator[Any], where: str) -> Iterator[Any]:
    """The batches. pyarrow's error for a damaged page does not say of which file."""
    from pyarrow import ArrowException

    try:
        yield from batches
    except (ArrowException, OSError) as error:
        raise refuse(f"cannot be read: {str(error).strip()[:200]}", where, "download it again") from error


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:  # not there, or of a release that this numpy is too old for
        raise refuse(f"pyarrow is needed to read it: {error}", str(path), "pip install 'ms-convert[data]'") from error
    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise refuse(f"not a Parquet file: {str(error)[:200]}", str(path), "download it again") from error


def _whole_file(path: Path) -> Iterator[Piece]:
    document = _Document(path)
    with open(path, "rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        for chunk in iter(lambda: file.readline(PIECE_CHARS), b""):
            yield from document.add(chunk)
    yield document.end()


def _separated(span: Span, separator: str) -> Iterator[Piece]:
    """The documents that follow the separators that begin in the span; the first one of the file has none before it.

    Between two separators without text there is no document.
    """
    path, mark = Path(span.path), separator.encode("utf-8")
    with open(path, "rb") as file:
        document = _Document(path) if span.start == 0 else None
        for place, line in _lines(file, path, span.start):
            if line.rstrip(b"\r\n") == mark:
                if document is not None and document.begun:
                    yield document.end()
                document = _Document(path)
                if place >= span.stop:
                    return
            elif document is not None:
                yield from document.add(line)
            elif place >= span.stop:
                return
        if document is not None and document.begun:
            yield document.end()


class _Document:
    """Turns the bytes of a document, which come in chunks that end at line ends or are long, into pieces."""

    def __init__(self, path: Path) -> None:
        self.begun = False
        self._path, self._decoder = path, codecs.getincrementaldecoder("utf-8")()
        self._texts: list[str] = []
        self._length = 0

    def add(self, chunk: bytes) -> Iterator[Piece]:
        self.begun = True
        if self._length and self._length + len(chunk) > PIECE_CHARS:
            yield Piece(self._take(), False)
        self._put(self._decode(chunk))

    def end(self) -> Piece:
        self._put(self._decode(b"", final=True))
        return Piece(self._take(), True)

    def _put(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _take(self) -> str:
        text, self._texts, self._length = "".join(self._texts), [], 0
        return text

    def _decode(self, chunk: bytes, final: bool = False) -> str:
        try:
            return self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            mend = "convert it, for example with iconv -f ISO-8859-1 -t UTF-8"
            raise refuse(f"not UTF-8: byte {error.object[error.start]:#04x}, {error.reason}", str(self._path), mend) from error
