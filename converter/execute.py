"""Executing a plan: worker threads that each fill blocks of one group of targets, write them and take their checksums.

A file carries its final name only when it is complete. Work is ordered so that few files are in progress at a time.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import xxhash

from converter.ckpt_format import ckpt_layout
from converter.dtypes import item_size
from converter.gather import BUFFER_BYTES, Gatherer
from converter.open_files import OpenFiles, SourceFiles
from converter.partial_files import FileResult, PartialFile
from converter.plan import Plan, TargetFile, TargetTensor
from converter.safetensors_format import safetensors_layout
from converter.tensors import FileLayout
from converter.word_copy import Words
from mappings.errors import Problem, Refused

Layout = Callable[[TargetFile], FileLayout]

PROGRESS_BYTES = 1 << 20  # progress is reported at most once for so many bytes of a worker
LARGE_BYTES = 64 << 20  # tensors of a file larger than that are begun first, lest one worker is left with one at the end


def _safetensors(file: TargetFile) -> FileLayout:
    return safetensors_layout([(tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors], dict(file.metadata))


def _ckpt(file: TargetFile) -> FileLayout:
    return ckpt_layout([(tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors])


LAYOUTS: Mapping[str, Layout] = {"safetensors": _safetensors, "ckpt": _ckpt}


def execute(
    plan: Plan,
    output: Path,
    *,
    workers: int,
    layouts: Mapping[str, Layout] = LAYOUTS,
    on_progress: Callable[[int], None] | None = None,
    on_file_done: Callable[[FileResult], None] | None = None,
    allow_overflow: bool = False,
    durable: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> list[FileResult]:
    """Write every file of the plan under `output`, with `workers` threads; the results in the plan's order.

    `on_progress` gets the bytes of tensor data written so far, `on_file_done` each file when it has its final name; neither is called
    by two threads at a time. A `durable` file's bytes are on the disk before it gets its name. Each worker has two buffers of
    `buffer_bytes`, and larger ones when it transposes large matrices (`gather.WIDENING`).

    Raises Refused for a source that cannot be read, is too short or has changed since its header was read, for a file that cannot be
    written, and, when all else is done, for casts that made finite values infinite (unless `allow_overflow`). After any exception,
    KeyboardInterrupt included, no thread is left, and the only files with a final name are complete.
    """
    return _Run(plan, output, layouts, _Options(allow_overflow, durable, buffer_bytes, on_progress, on_file_done)).execute(workers)


def read_blocks(tensor: TargetTensor, sources: SourceFiles | None = None) -> Iterator[tuple[int, memoryview]]:
    """The blocks of one target as (first element, bytes), in order: what `execute` would write.

    A block is valid until the next is asked for. With `sources` the files stay open between calls; the caller closes them.
    """
    own = SourceFiles() if sources is None else sources
    try:
        for _, first, data in Gatherer(own).blocks([tensor]):
            yield first, data
        if sources is None:
            own.check_unchanged()
    finally:
        if sources is None:
            own.close_all()


def fill(tensor: TargetTensor, words: Words, sources: SourceFiles | None = None) -> None:
    """Fill `words`, a C-contiguous array of unsigned words of the tensor's shape, with the target's bits."""
    own = SourceFiles() if sources is None else sources
    try:
        Gatherer(own).fill(tensor, words)
        if sources is None:
            own.check_unchanged()
    finally:
        if sources is None:
            own.close_all()


@dataclass(frozen=True, slots=True)
class _Options:
    allow_overflow: bool
    durable: bool
    buffer_bytes: int
    on_progress: Callable[[int], None] | None
    on_file_done: Callable[[FileResult], None] | None


class _Stopped(Exception):
    """Another thread failed; this one leaves its work."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One group: its distinct targets, each with the places (file, index in the file) where it is written."""

    targets: list[TargetTensor]
    places: list[list[tuple[PartialFile, int]]]

    @staticmethod
    def of(members: Iterable[tuple[PartialFile, int]]) -> _Task:
        """The task for these places of a group's targets. Ranks share the target of a replicated parameter, by identity."""
        targets: dict[int, TargetTensor] = {}
        places: dict[int, list[tuple[PartialFile, int]]] = {}
        for file, index in members:
            tensor = file.file.tensors[index]
            targets[id(tensor)] = tensor
            places.setdefault(id(tensor), []).append((file, index))
        return _Task(list(targets.values()), list(places.values()))


class _Progress:
    """Bytes written by all workers."""

    def __init__(self, callback: Callable[[int], None] | None) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Count and report."""
        with self._lock:
            self._done += nbytes
            if self._callback is not None:
                self._callback(self._done)


class _WorkerProgress:
    """Bytes written by one worker, reported when they are worth it: tensors may be tiny."""

    def __init__(self, total: _Progress) -> None:
        self._total = total
        self._unreported = 0

    def add(self, nbytes: int) -> None:
        self._unreported += nbytes
        if self._unreported >= PROGRESS_BYTES:
            self.report()

    def report(self) -> None:
        if self._unreported:
            self._total.add(self._unreported)
            self._unreported = 0


class _Run:
    """One execution of a plan: what its threads share."""

    def __init__(self, plan: Plan, output: Path, layouts: Mapping[str, Layout], options: _Options) -> None:
        self._options = options
        self._sources = SourceFiles()
        self._targets = OpenFiles(os.O_WRONLY | os.O_NOFOLLOW)
        _check_paths(plan)
        self._files = [PartialFile(file, output, layouts[file.format], self._targets, options.durable) for file in plan.files]
        self._groups = iter(_groups(plan.files))
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None
        self._progress = _Progress(options.on_progress)
        self._overflows: Counter[str] = Counter()
        self._refused: set[PartialFile] = set()
        self._results: dict[str, FileResult] = {}
        self._finisher = ThreadPoolExecutor(1)
        self._finishing: list[Future[None]] = []

    def execute(self, workers: int) -> list[FileResult]:
        try:
            with self._finisher, ThreadPoolExecutor(workers) as pool:
                for file in self._files:
                    if not file.file.tensors:
                        self._submit_finish(file)
                self._wait([pool.submit(self._work) for _ in range(workers)])
                self._wait(self._finishing)
            if self._overflows:
                self._fail(_overflow_refusal(self._overflows))
            if self._error is not None:
                raise self._error
        finally:
            for file in self._files:
                if file.file.path not in self._results:
                    file.discard()
            self._sources.close_all()
            self._targets.close_all()
        return [self._results[file.file.path] for file in self._files]

    def _wait(self, threads: list[Future[None]]) -> None:
        """Wait until none is at work, whatever comes: their files are closed afterwards. Ctrl-C reaches this thread alone."""
        while True:
            try:
                wait(threads)
                return
            except KeyboardInterrupt as interrupt:
                self._fail(interrupt)

    def _work(self) -> None:
        try:
            gatherer = Gatherer(self._sources, self._options.buffer_bytes)
            progress = _WorkerProgress(self._progress)
            while (task := self._next_task()) is not None:
                self._do(task, gatherer, progress)
            progress.report()
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(error)

    def _next_task(self) -> _Task | None:
        with self._lock:
            group = None if self._stopped else next(self._groups, None)
        return None if group is None else _Task.of((self._files[number], index) for number, index in group)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and let every thread stop at its next block."""
        with self._lock:
            self._error = self._error or error
            self._stopped = True

    def _do(self, task: _Task, gatherer: Gatherer, progress: _WorkerProgress) -> None:
        """Gather, write and sum up one group."""
        targets, places = task.targets, task.places
        checksums = [xxhash.xxh3_64() for _ in targets]
        for index, first, data in gatherer.blocks(targets):
            if self._stopped:
                raise _Stopped
            checksums[index].update(data)
            for file, position in places[index]:
                file.write(position, first * item_size(targets[index].dtype), data)
            progress.add(len(data) * len(places[index]))
        if gatherer.overflows and not self._options.allow_overflow:
            with self._lock:
                self._overflows.update(gatherer.overflows)
                self._refused.update(file for written in places for file, _ in written)
        gatherer.overflows.clear()
        for checksum, written in zip(checksums, places, strict=True):
            digest = checksum.hexdigest()
            for file, position in written:
                if file.tensor_done(position, digest):
                    self._submit_finish(file)

    def _submit_finish(self, file: PartialFile) -> None:
        self._finishing.append(self._finisher.submit(self._finish, file))

    def _finish(self, file: PartialFile) -> None:
        """Runs in the one finishing thread, while the workers go on with other files."""
        if self._stopped or file in self._refused:
            return
        try:
            self._sources.check_unchanged({os.fspath(copy.source.path) for tensor in file.file.tensors for copy in tensor.copies})
            result = file.finish()
            self._results[result.path] = result
            if self._options.on_file_done is not None:
                self._options.on_file_done(result)
        except BaseException as error:
            self._fail(error)


def _check_paths(plan: Plan) -> None:
    """Raises ValueError if two files of the plan have the same path."""
    paths = Counter(PurePosixPath(file.path) for file in plan.files)
    if twice := [str(path) for path, count in paths.items() if count > 1]:
        raise ValueError(f"written twice: {', '.join(twice)}")


def _groups(files: tuple[TargetFile, ...]) -> list[list[tuple[int, int]]]:
    """The groups as (file, index in the file) of their targets, in the order of their first file, its large tensors first.

    So files are finished early. Numbers, not objects: a plan may have hundreds of thousands of groups.
    """
    groups: dict[str, list[tuple[int, int]]] = {}
    for number, file in enumerate(files):
        for index, tensor in enumerate(file.tensors):
            members = groups.get(tensor.group)
            if members is None:
                groups[tensor.group] = [(number, index)]
            else:
                members.append((number, index))
    return sorted(groups.values(), key=lambda members: (members[0][0], files[members[0][0]].tensors[members[0][1]].nbytes < LARGE_BYTES))


def _overflow_refusal(overflows: Mapping[str, int]) -> Refused:
    mend = "keep the type or choose one with a wider range (--dtype), or accept infinities with --allow-overflow"
    problems = [Problem(f"{count} finite values would become infinite", name, mend) for name, count in sorted(overflows.items())]
    return Refused("a cast overflows; the files with these tensors were not written", problems)
