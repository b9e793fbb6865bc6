"""`prepare-data`: a corpus of text becomes token sequences in MindRecord shards.

Two halves. Each part of the corpus becomes a file of tokens; then, when the length of every part is known, sequences are cut out of all of
them as if they were one stream, and each shard is written on its own. How the corpus is divided, and into how many shards, depends on the
corpus alone, so that the output is the same, byte for byte, whatever the number of workers and however often the run was stopped.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from converter import __version__
from converter.folder_lock import PROGRESS_FOLDER
from converter.outcome import OnProgress
from converter.output_folder import FileRecord, FolderKind, OutputFolder, Run, finish_interrupted
from mappings.errors import refuse
from train.data_index import FORMAT_VERSION, INDEX, DataIndex, ShardRecord, read_index, shard_name, write_index
from train.documents import DocumentOptions, Part, divide, find_files
from train.mindrecord import TokenFiles, cut_shards, write_shard
from train.processes import end_with_parent
from train.tokenizer import TextTokenizer
from train.tokenizing import PartFacts, TokenizerChoice, read_facts, token_dtype, tokenize_part, tokens_path

T = TypeVar("T")
DATA_FOLDER = FolderKind(INDEX, re.compile(r"shard_\d{4}\.mindrecord(\.db)?|\.?index\.json(\.partial)?|\.ms-convert"), "data set")
TOKENS = "tokens"
SHARDS = "shards"
"""Folders inside the progress folder."""


@dataclass(frozen=True)
class PrepareOptions:
    """What the user chose. `inputs` are file name patterns."""

    tokenizer: str
    inputs: tuple[str, ...]
    seq_length: int
    output: str
    pad: bool = False
    text_key: str = "text"
    separator: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    workers: int = 2
    overwrite: bool = False


@dataclass(frozen=True)
class Preparation:
    """A preparation that is known to be possible: its files, its parts, its tokenizer."""

    options: PrepareOptions
    tokenizer: TextTokenizer
    files: tuple[Path, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """What progress is counted in: each byte of the corpus once for its tokens and once for its sequences."""
        return 2 * sum(part.size for part in self.parts)

    @property
    def documents(self) -> DocumentOptions:
        return DocumentOptions(self.options.text_key, self.options.separator)

    @property
    def choice(self) -> TokenizerChoice:
        return TokenizerChoice(self.options.tokenizer, self.options.eos_token, self.options.pad_token)


@dataclass(frozen=True)
class Prepared:
    """The result. `notes` are for the user to read."""

    index: DataIndex
    notes: tuple[str, ...]


def plan_preparation(options: PrepareOptions) -> Preparation:
    """Look at the tokenizer and the files; nothing is written. Raises Refused."""
    choice = TokenizerChoice(options.tokenizer, options.eos_token, options.pad_token)
    tokenizer = choice.load()
    if tokenizer.eos_id is None:
        raise refuse("the tokenizer names no end token, which ends a document", options.tokenizer, "say which with --eos-token")
    if options.pad and tokenizer.pad_id is None:
        raise refuse(
            "the tokenizer names no padding token", options.tokenizer, "say which with --pad-token, or pack documents (without --pad)"
        )
    files = tuple(find_files(options.inputs))
    parts = tuple(divide(files, DocumentOptions(options.text_key, options.separator)))
    if not parts:
        raise refuse("the input is empty", ", ".join(options.inputs))
    return Preparation(options, tokenizer, files, parts)


def prepare(preparation: Preparation, on_progress: OnProgress | None = None) -> Prepared:
    """Write the data set, or go on with one that was stopped. Raises Refused."""
    options, output, run = preparation.options, Path(preparation.options.output), _identity(preparation)
    if _is_finished(output, run) and not options.overwrite:
        return Prepared(read_index(output), ("this data set is finished already: nothing to do",))
    with OutputFolder(output, DATA_FOLDER, run, overwrite=options.overwrite, lock_places=[0]) as folder:
        _check_space(output, preparation)
        counter = _Counter(on_progress)
        facts = _tokenize(preparation, folder, counter)
        index = _write_shards(preparation, folder, facts, counter)
        write_index(output, index)
        _remove_work(output)
        folder.finish()
        return Prepared(index, tuple(folder.notes))


def _is_finished(output: Path, run: Run) -> bool:
    """Whether this very run has finished; what it was stopped from removing is removed now."""
    if not (output / INDEX).is_file() or read_index(output).run != run.identity:
        return False
    _remove_work(output)
    finish_interrupted(output, DATA_FOLDER, run)
    return True


def _identity(preparation: Preparation) -> Run:
    """Equal for runs that write equal data sets."""
    options = preparation.options
    shown = {name: str(value) for name, value in asdict(options).items() if name not in ("workers", "overwrite", "output")}
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in preparation.files]
    facts = repr((FORMAT_VERSION, sorted(shown.items()), preparation.tokenizer.digest, preparation.tokenizer.eos_id, stats))
    return Run(xxhash.xxh3_128_hexdigest(facts.encode("utf-8", "surrogateescape")), shown)


def _check_space(output: Path, preparation: Preparation) -> None:
    """Refuse when the disk has no room for tokens and shards: a token stands for four bytes of text or so, and is written twice."""
    itemsize = token_dtype(preparation.tokenizer.vocabulary).itemsize
    needed = preparation.nbytes // 2 * (itemsize + 4) // 4
    free = shutil.disk_usage(output).free
    if free < needed:
        raise refuse(f"about {needed:,} bytes are needed, {free:,} are free", str(output), "free some, or give another --output")


def _remove_work(output: Path) -> None:
    for name in (TOKENS, SHARDS):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(output / PROGRESS_FOLDER / name)


class _Counter:
    """Adds up the bytes that are done."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._done, self._tell = 0, on_progress

    def add(self, count: int) -> None:
        self._done += count
        if self._tell is not None:
            self._tell(self._done)


def _tokenize(preparation: Preparation, folder: OutputFolder, counter: _Counter) -> list[PartFacts]:
    """The first half: a token file for each part."""
    target = folder.progress / TOKENS
    target.mkdir(exist_ok=True)
    jobs = {}
    for number, part in enumerate(preparation.parts):
        path = tokens_path(target, number)
        if _is_recorded(folder, path):
            counter.add(part.size)
        else:
            jobs[number] = (part, preparation.documents, path)
    for number, _ in _run(_tokenize_here, jobs, preparation):
        path = tokens_path(target, number)
        folder.record(FileRecord(_relative(folder, path), path.stat().st_size, {}))
        counter.add(preparation.parts[number].size)
    return [read_facts(target, number) for number in range(len(preparation.parts))]


def _write_shards(preparation: Preparation, folder: OutputFolder, facts: Sequence[PartFacts], counter: _Counter) -> DataIndex:
    """The second half: sequences, cut from all parts as one stream."""
    options, tokenizer = preparation.options, preparation.tokenizer
    tokens = sum(fact.tokens for fact in facts)
    dtype = token_dtype(tokenizer.vocabulary).str
    files = TokenFiles(
        str(folder.progress / TOKENS), len(facts), dtype, tokens, options.seq_length, tokenizer.pad_id if options.pad else None
    )
    sequences = files.sequences()
    if not len(sequences):
        what = f"{tokens} tokens fill no sequence of {options.seq_length} (and one token more, to be predicted)"
        raise refuse(what, ", ".join(options.inputs), "give more text, a smaller --seq-length, or --pad")
    cuts = cut_shards(len(sequences), options.seq_length)
    shards: dict[int, ShardRecord] = {}
    share = preparation.nbytes // 2 // len(cuts)
    jobs = {}
    for number, (start, stop) in enumerate(cuts):
        found = _finished_shard(folder, number, stop - start)
        if found is None:
            jobs[number] = (files, start, stop, folder.progress / SHARDS / f"{number:04}" / shard_name(number), folder.path)
        else:
            shards[number] = found
            counter.add(share)
    for number, shard in _run(_write_shard_here, jobs, preparation):
        facts_of = {"sequences": str(shard.sequences), "db_size": str(shard.db_size), "xxh3": shard.xxh3}
        folder.record(FileRecord(shard.file, shard.size, facts_of))
        shards[number] = shard
        counter.add(share)
    return _index(preparation, folder.run, facts, files, sequences.left_over, [shards[number] for number in range(len(cuts))])


def _index(
    preparation: Preparation, run: Run, facts: Sequence[PartFacts], files: TokenFiles, left_over: int, shards: Sequence[ShardRecord]
) -> DataIndex:  # fmt: skip
    tokenizer = preparation.tokenizer
    assert tokenizer.eos_id is not None
    return DataIndex(
        format_version=FORMAT_VERSION,
        tool_version=__version__,
        run=run.identity,
        seq_length=files.seq_length,
        packed=files.pad_id is None,
        sequences=sum(shard.sequences for shard in shards),
        tokens=files.tokens,
        documents=sum(fact.documents for fact in facts),
        empty_documents=sum(fact.empty_documents for fact in facts),
        left_over_tokens=left_over,
        vocabulary=tokenizer.vocabulary,
        largest_id=max(*(fact.largest_id for fact in facts), files.pad_id or 0),
        eos_id=tokenizer.eos_id,
        pad_id=files.pad_id,
        tokenizer=tokenizer.name,
        vocabulary_digest=tokenizer.vocabulary_digest,
        input_files=len(preparation.files),
        input_bytes=sum(path.stat().st_size for path in preparation.files),
        shards=tuple(shards),
    )


def _is_recorded(folder: OutputFolder, path: Path) -> bool:
    return _relative(folder, path) in folder.records and path.with_suffix(".json").is_file() and path.with_suffix(".lengths").is_file()


def _relative(folder: OutputFolder, path: Path) -> str:
    return path.relative_to(folder.path).as_posix()


def _finished_shard(folder: OutputFolder, number: int, sequences: int) -> ShardRecord | None:
    """The record of a shard that an earlier run finished, if its files are still there."""
    record = folder.records.get(shard_name(number))
    if record is None or record.checksums.get("sequences") != str(sequences):
        return None
    database = folder.path / f"{record.path}.db"
    if not database.is_file() or str(database.stat().st_size) != record.checksums["db_size"]:
        return None
    return ShardRecord(record.path, sequences, record.size, database.stat().st_size, record.checksums["xxh3"])


@functools.lru_cache(maxsize=1)
def _loaded(choice: TokenizerChoice) -> TextTokenizer:
    """The tokenizer of this process: it is loaded once, not for each part."""
    return choice.load()


def _tokenize_here(choice: TokenizerChoice, part: Part, documents: DocumentOptions, target: Path) -> PartFacts:
    return tokenize_part(part, documents, _loaded(choice), target)


def _write_shard_here(_: TokenizerChoice, files: TokenFiles, start: int, stop: int, path: Path, output: Path) -> ShardRecord:
    """Write a shard in a folder of its own, and move it when it is complete: MindRecord files cannot be renamed, only moved."""
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir(parents=True)
    record = write_shard(files, start, stop, path)
    for name in (record.file + ".db", record.file):
        os.replace(path.with_name(name), output / name)
    path.parent.rmdir()
    return record


def _run(work: Callable[..., T], jobs: dict[int, tuple[Any, ...]], preparation: Preparation) -> Iterator[tuple[int, T]]:
    """The results of the jobs as they come, from as many processes as there are workers; one worker is this process itself."""
    workers = min(preparation.options.workers, len(jobs))
    if workers <= 1:
        for number, job in jobs.items():
            yield number, work(preparation.choice, *job)
        return
    context = multiprocessing.get_context("spawn")  # a forked child would inherit the threads of the tokenizer and of MindSpore, dead
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),)) as pool:
        futures: dict[Future[T], int] = {pool.submit(work, preparation.choice, *job): number for number, job in jobs.items()}
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield futures[future], future.result()
        except BrokenProcessPool as error:
            mend = "use fewer --workers, and run the same command again; it continues"
            raise refuse("a worker was ended from outside, perhaps for want of memory", "", mend) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(parent: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this one
    end_with_parent(parent)
