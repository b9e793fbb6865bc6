"""The output folder of a run that may be killed at any moment and continued by the same command.

While a run is unfinished its folder holds `.ms-convert/`: `run.json` (the identity of the run and what it does), one record for each
finished file, and the lock. Files that are being written are named `*.partial`. When everything else is done the file that makes the
folder usable is written (`manifest.json`, or `config.json` of a Hugging Face folder), and the records go away. So a folder that looks
finished is finished.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.folder_lock import PROGRESS_FOLDER, FolderLock
from converter.manifest import MANIFEST, write_atomically
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse

RUN_RECORD = "run.json"
MAX_RECORD_BYTES = 256 << 20


@dataclass(frozen=True)
class FolderKind:
    """A kind of output: the file that is written last, the names that a run may replace, and what a message calls the work."""

    marker: str
    own: re.Pattern[str]
    work: str = "conversion"


RANK_TREE = FolderKind(MANIFEST, re.compile(r"rank_\d+|strategy|huggingface|\.?manifest\.json(\.partial)?|\.ms-convert"))
HF_FOLDER = FolderKind(
    "config.json",
    re.compile(r"(model(-\d+-of-\d+)?\.safetensors|\.?model\.safetensors\.index\.json|config\.json)(\.partial)?|\.ms-convert"),
)


@dataclass(frozen=True)
class FileRecord:
    """A finished file: its path in the output folder, its size in bytes, and each tensor's xxh3."""

    path: str
    size: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class Run:
    """The identity of a run: equal identities write equal files. `options` is what a person would want to see when they differ."""

    identity: str
    options: dict[str, str]


class OutputFolder:
    """An output folder, opened for one run. Use as a context manager: the lock that keeps others out lasts until the exit.

    `lock_places` are numbers of what this run writes; runs for other places (ranks on other hosts) may go on beside it. `notes` says what
    was found (a run continued, an outdated one begun again). A run that is refused before its first file leaves nothing behind.
    """

    def __init__(self, path: Path, kind: FolderKind, run: Run, *, overwrite: bool, lock_places: Collection[int]) -> None:
        self.path, self.kind, self.run, self.overwrite = path, kind, run, overwrite
        self.progress = path / PROGRESS_FOLDER
        self.notes: list[str] = []
        self.records: dict[str, FileRecord] = {}
        self._lock = FolderLock(self.progress / "lock", sorted(lock_places))
        self._created = self._began = False

    def check(self) -> None:
        """Raises Refused when the folder is somebody else's. Changes nothing; done again on entering."""
        self._created = not self.path.exists()
        if not self._created and not self.path.is_dir():
            raise refuse("a file, not a folder", str(self.path), "give another -o")
        self._refuse_foreign()

    def __enter__(self) -> OutputFolder:
        self.check()
        self._lock.open()
        try:
            with self._lock.gate():
                self._begin()
        except BaseException:
            self._leave_no_trace()
            self._lock.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._leave_no_trace()
        self._lock.close()

    def record(self, record: FileRecord) -> None:
        """Note a finished file; called after its rename. One writer per record, so that several hosts may share the folder.

        Not durable: after a power cut a record may be gone or say too much, and files are checked before they are taken over.
        """
        self.records[record.path] = record
        write_atomically(record_path(self.path, record.path), json.dumps(encode(record)), durable=False)

    def forget(self, path: str) -> None:
        """A finished file that is not as it was recorded: write it again."""
        self.records.pop(path, None)
        record_path(self.path, path).unlink(missing_ok=True)
        (self.path / path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def ending(self) -> Iterator[Mapping[str, FileRecord] | None]:
        """All records of this run, those of other hosts too, while no other run begins or ends; None when another host has finished it."""
        with self._lock.gate():
            if (self.path / self.kind.marker).exists():
                yield None
            else:
                self.records = finished_files(self.path)
                yield self.records

    def finish(self) -> None:
        """Remove the traces of progress, after the marker was written."""
        remove_records(self.path)

    def _begin(self) -> None:
        """Find out what is there, with the gate shut. Raises Refused when another run is in the way."""
        self._lock.take()
        before = self._unfinished_run()
        if before is None and self._holds_something():
            self._refuse_foreign()
            self._lock.alone()
            finished = (self.path / self.kind.marker).exists()
            self._remove_own()
            self.notes.append(
                f"replaced what an earlier {self.kind.work} had left" if finished else "writing beside files that were there before"
            )
        elif before is not None and before.identity != self.run.identity:
            self._lock.alone()
            self._begin_again(before)
        elif before is not None:
            self.records = finished_files(self.path)
            self.notes.append(
                f"continuing an unfinished run: {len(self.records)} finished file{'s' if len(self.records) != 1 else ''} found"
            )
        if before is None or before.identity != self.run.identity:
            self._began = True
            write_atomically(self.progress / RUN_RECORD, json.dumps(encode(self.run)))

    def _leave_no_trace(self) -> None:
        """Undo the beginning of a run that wrote nothing; best effort, after an error that is more important."""
        if not self._lock.is_open or any(self.progress.glob("file-*.json")):
            return
        with contextlib.suppress(OSError, Refused), self._lock.gate():
            if self._began or not (self.progress / RUN_RECORD).exists():
                self._lock.alone()
                for folder in self.path.glob("rank_*"):
                    folder.rmdir()
                shutil.rmtree(self.progress)
                if self._created:
                    self.path.rmdir()

    def _unfinished_run(self) -> Run | None:
        return None if (self.path / self.kind.marker).exists() else recorded_run(self.path)

    def _holds_something(self) -> bool:
        """Whether there is anything but the progress folder of a run that has not said yet what it does."""
        return any(entry.name != PROGRESS_FOLDER for entry in self.path.iterdir())

    def _refuse_foreign(self) -> None:
        if self._created or self.overwrite or self._unfinished_run() is not None or not self._holds_something():
            return
        finished = (self.path / self.kind.marker).exists()
        what = f"holds a finished {self.kind.work}" if finished else "is not empty, and not an unfinished run of ms-convert"
        raise refuse(f"the output folder {what}", str(self.path), "give another -o, or --overwrite to replace it")

    def _begin_again(self, before: Run) -> None:
        changed = [
            f"{name}: {before.options.get(name, '-')} -> {self.run.options.get(name, '-')}"
            for name in sorted(set(before.options) | set(self.run.options))
            if before.options.get(name) != self.run.options.get(name)
        ]
        self.notes.append(f"an unfinished run had other inputs ({'; '.join(changed) or 'the source changed'}): starting again")
        self._remove_own()

    def _remove_own(self) -> None:
        """Remove what ms-convert itself writes, and nothing else. The marker goes first: without it nothing looks finished."""
        (self.path / self.kind.marker).unlink(missing_ok=True)
        for entry in sorted(self.path.iterdir()):
            if not self.kind.own.fullmatch(entry.name) or entry.name == PROGRESS_FOLDER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for path in self.progress.glob("*.json"):
            path.unlink()


def recorded_run(folder: Path) -> Run | None:
    """The run whose records a folder holds; None when it holds none that can be read."""
    path = folder / PROGRESS_FOLDER / RUN_RECORD
    if not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
        return None
    try:
        return decode(Run, json.loads(path.read_text(encoding="utf-8")), RUN_RECORD)
    except (ValueError, RecursionError, RecordError):
        return None


def record_path(folder: Path, path: str) -> Path:
    """Where the record of a finished file is kept."""
    return folder / PROGRESS_FOLDER / f"file-{path.replace('/', '-')}.json"


def finished_files(folder: Path) -> dict[str, FileRecord]:
    """The records of an unfinished run by path; those that cannot be read, or whose file is gone or of another size, are left out."""
    found = {}
    for path in sorted((folder / PROGRESS_FOLDER).glob("file-*.json")):
        if path.stat().st_size > MAX_RECORD_BYTES:
            continue
        try:
            record = decode(FileRecord, json.loads(path.read_text(encoding="utf-8")), path.name)
        except (ValueError, RecursionError, RecordError):
            continue
        target = folder / record.path
        if path == record_path(folder, record.path) and target.is_file() and target.stat().st_size == record.size:
            found[record.path] = record
    return found


def remove_records(folder: Path) -> None:
    """Remove the records of a finished run; the one that says which run it was goes last, so that this can be continued too."""
    progress = folder / PROGRESS_FOLDER
    if progress.is_dir():
        for path in progress.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != RUN_RECORD:
                path.unlink()
        (progress / RUN_RECORD).unlink(missing_ok=True)
        progress.rmdir()


def finish_interrupted(folder: Path, kind: FolderKind, run: Run) -> bool:
    """Whether this very run had written its last file and was stopped before it removed its records; they are removed now."""
    before = recorded_run(folder) if (folder / kind.marker).is_file() else None
    if before is None or before.identity != run.identity:
        return False
    remove_records(folder)
    return True


def missing_space(path: Path, needed: int) -> None:
    """Refuse when the disk that holds `path` has less than `needed` bytes free."""
    place = path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise Refused(
            "not enough disk space",
            [
                Problem(
                    f"{needed:,} bytes are needed, {free:,} are free",
                    str(place),
                    "free some, give another -o, or write fewer ranks with --ranks",
                )
            ],
        )
