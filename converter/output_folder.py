"""The output folder of a run that may be killed at any moment and continued by the same command.

While a run is unfinished its folder holds `.ms-convert/`: `run.json` (the identity of the run and what it does) and one record for each
finished file. Files that are being written are named `*.partial`. When everything else is done the file that makes the folder usable is
written (`manifest.json`, or `config.json` of a Hugging Face folder), and the records go away. So a folder that looks finished is finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.manifest import MANIFEST, write_atomically
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse

PROGRESS_FOLDER = ".ms-convert"
MAX_RECORD_BYTES = 256 << 20


@dataclass(frozen=True)
class FolderKind:
    """A kind of output: the file that is written last, and the names that a run may replace."""

    marker: str
    own: re.Pattern[str]


RANK_TREE = FolderKind(MANIFEST, re.compile(r"rank_\d+|strategy|huggingface|manifest\.json|\.ms-convert"))
HF_FOLDER = FolderKind(
    "config.json", re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.partial)?|model\.safetensors\.index\.json|config\.json|\.ms-convert")
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

    `notes` says what was found (a run continued, an outdated one begun again).
    """

    def __init__(self, path: Path, kind: FolderKind, run: Run, *, overwrite: bool, lock_places: Collection[int]) -> None:
        self.path, self.kind, self.run, self.overwrite = path, kind, run, overwrite
        self.lock_places = sorted(lock_places)
        self.progress = path / PROGRESS_FOLDER
        self.notes: list[str] = []
        self.records: dict[str, FileRecord] = {}
        self._lock: int | None = None

    def __enter__(self) -> OutputFolder:
        created = not self.path.exists()
        if not created and not self.path.is_dir():
            raise refuse("a file, not a folder", str(self.path), "give another -o")
        before = self._unfinished_run() if not created else None
        if before is None and not created and any(self.path.iterdir()):
            self._refuse_or_clear()
        self.progress.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        if before is not None and before.identity != self.run.identity:
            self._begin_again(before)
        elif before is not None:
            self.records = dict(self._read_records())
            self.notes.append(
                f"continuing an unfinished run: {len(self.records)} finished file{'s' if len(self.records) != 1 else ''} found"
            )
        if before is None or before.identity != self.run.identity:
            write_atomically(self.progress / "run.json", json.dumps(encode(self.run)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def record(self, record: FileRecord) -> None:
        """Note a finished file; called after its rename. One writer per record, so that several hosts may share the folder."""
        self.records[record.path] = record
        write_atomically(self._record_path(record.path), json.dumps(encode(record)))

    def forget(self, path: str) -> None:
        """A finished file that is not as it was recorded: write it again."""
        self.records.pop(path, None)
        self._record_path(path).unlink(missing_ok=True)
        (self.path / path).unlink(missing_ok=True)

    def refresh(self) -> Mapping[str, FileRecord]:
        """All records of this run, those of other hosts too."""
        self.records = dict(self._read_records())
        return self.records

    def finish(self) -> None:
        """Remove the traces of progress, after the marker was written."""
        shutil.rmtree(self.progress, ignore_errors=True)

    def _unfinished_run(self) -> Run | None:
        path = self.progress / "run.json"
        if (self.path / self.kind.marker).exists() or not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
            return None
        try:
            return decode(Run, json.loads(path.read_text(encoding="utf-8")), "run.json")
        except (ValueError, RecursionError, RecordError):
            return None

    def _read_records(self) -> Iterable[tuple[str, FileRecord]]:
        for path in sorted(self.progress.glob("file-*.json")):
            if path.stat().st_size > MAX_RECORD_BYTES:
                continue
            try:
                record = decode(FileRecord, json.loads(path.read_text(encoding="utf-8")), path.name)
            except (ValueError, RecursionError, RecordError):
                continue
            target = self.path / record.path
            if path == self._record_path(record.path) and target.is_file() and target.stat().st_size == record.size:
                yield record.path, record

    def _record_path(self, path: str) -> Path:
        return self.progress / f"file-{path.replace('/', '-')}.json"

    def _refuse_or_clear(self) -> None:
        finished = (self.path / self.kind.marker).exists()
        if not self.overwrite:
            what = "holds a finished conversion" if finished else "is not empty, and not an unfinished run of ms-convert"
            raise refuse(f"the output folder {what}", str(self.path), "give another -o, or --overwrite to replace it")
        self._remove_own()
        self.notes.append("replaced what an earlier conversion had left" if finished else "writing into a folder that holds other files")

    def _begin_again(self, before: Run) -> None:
        changed = [
            f"{name}: {before.options.get(name, '-')} -> {self.run.options.get(name, '-')}"
            for name in sorted(set(before.options) | set(self.run.options))
            if before.options.get(name) != self.run.options.get(name)
        ]
        self.notes.append(f"an unfinished run had other inputs ({'; '.join(changed) or 'the source changed'}): starting again")
        self._remove_own(keep_progress=True)
        for path in self.progress.glob("file-*.json"):
            path.unlink()

    def _remove_own(self, keep_progress: bool = False) -> None:
        """Remove what ms-convert itself writes, and nothing else. The marker goes first: without it nothing looks finished."""
        (self.path / self.kind.marker).unlink(missing_ok=True)
        for entry in sorted(self.path.iterdir()):
            if not self.kind.own.fullmatch(entry.name) or (keep_progress and entry.name == PROGRESS_FOLDER):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _take_lock(self) -> None:
        """One byte of the lock file for each place that this run writes: runs for other ranks may go on beside it."""
        self._lock = os.open(self.progress / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        for place in self.lock_places:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError as error:
                os.close(self._lock)
                self._lock = None
                raise refuse("another ms-convert is writing here", str(self.path), "wait for it, or stop it and run this again") from error


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
