"""The output folder of a run that may be killed at any moment and continued by the same command.

While a run is unfinished its folder holds `.ms-convert/`: `run.json` (the identity of the run and what it does), one record for each
finished file, and the lock. Files that are being written are named `*.partial`. When everything else is done the file that makes the
folder usable is written (`manifest.json`, or `config.json` of a Hugging Face folder), and the records go away. So a folder that looks
finished is finished.

`run.json` also names every file that the run may write, and is written before the first of them. A file is thus known to be ms-convert's
own by that list, by a record, or by the manifest, never by its name; only such files are ever removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from converter.disk_layouts import paths_of
from converter.folder_contents import in_the_way, leading_out, listed, others, remove_empty_folders, remove_files
from converter.folder_lock import PROGRESS_FOLDER, FolderLock, check_progress_folder
from converter.manifest import MANIFEST, MINDFORMERS2, RANK, SIDE_FOLDER, UNIFIED, is_plain_relative, read_manifest, write_atomically
from converter.mindformers2_folder import TRACKER
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse

RUN_RECORD = "run.json"
MAX_RECORD_BYTES = 256 << 20
MAX_NAMED = 20
_RECORD = re.compile(r"lock|file-.*\.json|\.(file-.*|run)\.json\.partial")


@dataclass(frozen=True)
class FolderKind:
    """A kind of output.

    `marker` is the file that is written last, `work` what a message calls the work. `own` matches files (no folders) that --overwrite may
    replace whoever wrote them. A kind with a `catalogue` has none: the catalogue of a finished folder says what ms-convert wrote, and
    nothing else is replaced. Folders that `reserved` matches may hold nothing foreign, `place` finds the number of a file's place.
    """

    marker: str
    own: re.Pattern[str] | None
    work: str = "conversion"
    catalogue: Callable[[Path], Iterable[str]] | None = None
    reserved: re.Pattern[str] | None = None
    place: re.Pattern[str] | None = None


def _files_of_conversion(folder: Path) -> Iterable[str]:
    """Every file that the manifest of a finished conversion vouches for; none where it cannot be read."""
    try:
        manifest = read_manifest(folder)
    except Refused:
        return
    yield from (MANIFEST, *paths_of(manifest))
    yield from (f"{SIDE_FOLDER}/{side.name}" for side in manifest.source.side_files)


def _conversion(reserved: str, place: str | None) -> FolderKind:
    number = re.compile(place) if place is not None else None
    return FolderKind(MANIFEST, None, catalogue=_files_of_conversion, reserved=re.compile(f"{reserved}|{SIDE_FOLDER}"), place=number)


CONVERSIONS = {
    RANK: _conversion(r"rank_\d+|strategy", r"rank_(\d+)/.*"),
    UNIFIED: _conversion(r".*\.safetensors|param_name_map\.json|strategy|merged_strategy", None),
    MINDFORMERS2: _conversion(rf"iteration_\d+|{re.escape(TRACKER)}", r"iteration_\d+/model-(\d+)-.*"),
}
RANK_TREE = CONVERSIONS[RANK]
HF_FOLDER = FolderKind("config.json", re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|config\.json"))


@dataclass(frozen=True)
class FileRecord:
    """A finished file: its path in the output folder, its size in bytes, and each tensor's xxh3."""

    path: str
    size: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class Run:
    """The identity of a run: equal identities write equal files. `options` is what a person would want to see when they differ.

    `paths` are the files that it, or another host's part of it, may write, and those of an earlier run that it removes first.
    """

    identity: str
    options: dict[str, str]
    paths: tuple[str, ...] = ()


REPLACING = ""
"""The identity of a run that was stopped while it removed what was there before."""


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
        self.places = sorted(lock_places)
        self._lock = FolderLock(self.progress / "lock", self.places)
        self._created = self._began = self._made_progress = False

    def check(self) -> None:
        """Raises Refused when the folder, or a file in it that would be replaced, is somebody else's. Changes nothing; done again later."""
        self._created = not self.path.exists()
        if not self._created and not self.path.is_dir():
            raise refuse("a file, not a folder", str(self.path), "give another -o")
        check_progress_folder(self.path)
        self._refuse_foreign()
        self._refuse_what_is_in_the_way()

    def __enter__(self) -> OutputFolder:
        self.check()
        self._made_progress = not self.progress.exists()
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
            self._replace()
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
            self._say(self.run)
        elif not set(self.run.paths) <= set(before.paths):
            self._say(replace(self.run, paths=tuple(dict.fromkeys([*before.paths, *self.run.paths]))))

    def _say(self, run: Run) -> None:
        write_atomically(self.progress / RUN_RECORD, json.dumps(encode(run)))

    def _leave_no_trace(self) -> None:
        """Undo the beginning of a run that wrote nothing; best effort, after an error that is more important."""
        if not self._lock.is_open or any(self.progress.glob("file-*.json")):
            return
        with contextlib.suppress(OSError, Refused), self._lock.gate():
            if self._began or not (self.progress / RUN_RECORD).exists():
                self._lock.alone()
                remove_empty_folders(self.path, self.run.paths)
                if self._made_progress:
                    shutil.rmtree(self.progress)  # with the unfinished work in it; a link in its place is refused
                remove_records(self.path)
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
        mend = "to replace it" if finished else "to write beside what is there"
        raise refuse(f"the output folder {what}", str(self.path), f"give another -o, or --overwrite {mend}")

    def _begin_again(self, before: Run) -> None:
        """Begin again what this run itself would write; what others wrote for other places is theirs."""
        if before.identity == REPLACING:
            self.notes.append("an earlier run was stopped while it removed what was here: starting again")
        else:
            changed = [
                f"{name}: {before.options.get(name, '-')} -> {self.run.options.get(name, '-')}"
                for name in sorted(set(before.options) | set(self.run.options))
                if before.options.get(name) != self.run.options.get(name)
            ]
            differs = "; ".join(changed[:MAX_NAMED]) or "the source changed"
            self._refuse_to_lose_places(differs)
            self.notes.append(f"an unfinished run had other inputs ({differs}): starting again")
        self._remove(self._owned())

    def _refuse_to_lose_places(self, differs: str) -> None:
        """Raises Refused when finished files of places that this run does not write would go."""
        if self.kind.place is None or self.overwrite:
            return
        matches = [self.kind.place.fullmatch(path) for path in finished_files(self.path)]
        lost = sorted({int(match[1]) for match in matches if match} - set(self.places))
        if lost:
            raise refuse(
                f"an unfinished run with other inputs wrote rank {', '.join(map(str, lost))}, which this call does not write ({differs})",
                str(self.path),
                "give the same inputs (copies of a model on several hosts need equal times: cp -p, rsync -t), or another -o, "
                "or --overwrite to remove those ranks and start again",
            )

    def _owned(self) -> set[str]:
        """The files here that ms-convert wrote: those that the catalogue, the run or a record names, and those that `own` matches."""
        found = set(self.kind.catalogue(self.path)) if self.kind.catalogue else set()
        run = recorded_run(self.path)
        found.update(run.paths if run is not None else ())
        found.update(_recorded_files(self.path))
        if self.kind.own is not None and self.path.is_dir():
            found.update(entry.name for entry in self.path.iterdir() if self.kind.own.fullmatch(entry.name))
        return {path for path in found if is_plain_relative(path) and path.partition("/")[0] != PROGRESS_FOLDER}

    def _refuse_what_is_in_the_way(self) -> None:
        if self._created:
            return
        mend = "--overwrite replaces only what ms-convert wrote: remove or move it yourself, or give another -o"
        problems = [
            Problem("a link leads out of the output folder", str(self.path / path), "remove the link, or give another -o")
            for path in leading_out(self.path, self.run.paths)
        ]
        owned = self._owned()
        taken = in_the_way(self.path, self.run.paths, owned, files_too=self.kind.catalogue is not None)
        if self.kind.reserved is not None and not owned:
            folders = [entry.name for entry in self.path.iterdir() if self.kind.reserved.fullmatch(entry.name)]
            taken += [path for path in listed(self.path, folders) if path not in taken]
        problems += [Problem("in the way, and not written by ms-convert", str(self.path / path), mend) for path in taken]
        if problems:
            raise Refused("the output folder holds something of somebody else's", problems[:MAX_NAMED])

    def _replace(self) -> None:
        """Make room with --overwrite, and say what went and what stays."""
        owned = self._owned()
        had = any(os.path.lexists(self.path / path) for path in {*owned, *self.run.paths})
        self._say(Run(REPLACING, {}, tuple(sorted(owned))))
        self._remove(owned)
        if not had:
            note = "writing beside files that were there before"
        elif self.kind.catalogue is not None:
            note = f"replaced what an earlier {self.kind.work} had left"
        else:
            note = f"replaced files that are named like those of this {self.kind.work}"
        stay = others(self.path, self.run.paths)
        more = f" and {len(stay) - MAX_NAMED} more" if len(stay) > MAX_NAMED else ""
        self.notes.append(f"{note}; not touched: {', '.join(stay[:MAX_NAMED])}{more}" if stay else note)

    def _remove(self, owned: Collection[str]) -> None:
        """Remove these files and their records. The marker goes first: without it nothing looks finished."""
        if self.kind.marker in owned:
            (self.path / self.kind.marker).unlink(missing_ok=True)
        remove_files(self.path, owned)
        for path in self.progress.glob("file-*.json"):
            path.unlink(missing_ok=True)


def recorded_run(folder: Path) -> Run | None:
    """The run whose records a folder holds; None when it holds none that can be read."""
    path = folder / PROGRESS_FOLDER / RUN_RECORD
    if path.parent.is_symlink() or path.is_symlink():
        return None
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            return None
        return decode(Run, json.loads(path.read_text(encoding="utf-8")), RUN_RECORD)
    except (OSError, ValueError, RecursionError, RecordError):
        return None


def record_path(folder: Path, path: str) -> Path:
    """Where the record of a finished file is kept."""
    return folder / PROGRESS_FOLDER / f"file-{path.replace('/', '-')}.json"


def finished_files(folder: Path) -> dict[str, FileRecord]:
    """The records of an unfinished run by path; those that cannot be read, or whose file is gone or of another size, are left out."""
    found = {}
    for record in _recorded_files(folder).values():
        target = folder / record.path
        if target.is_file() and target.stat().st_size == record.size:
            found[record.path] = record
    return found


def _recorded_files(folder: Path) -> dict[str, FileRecord]:
    found: dict[str, FileRecord] = {}
    if (folder / PROGRESS_FOLDER).is_symlink():
        return found
    for path in sorted((folder / PROGRESS_FOLDER).glob("file-*.json")):
        try:
            if path.stat().st_size > MAX_RECORD_BYTES:
                continue
            record = decode(FileRecord, json.loads(path.read_text(encoding="utf-8")), path.name)
        except (OSError, ValueError, RecursionError, RecordError):
            continue
        if path == record_path(folder, record.path) and is_plain_relative(record.path):
            found[record.path] = record
    return found


def remove_records(folder: Path) -> None:
    """Remove the records of a finished run; the one that says which run it was goes last, so that this can be continued too.

    Another host may do the same at the same time. What is not of ms-convert stays, and the folder with it.
    """
    check_progress_folder(folder)
    progress = folder / PROGRESS_FOLDER
    for path in sorted(progress.glob("*")):
        if _RECORD.fullmatch(path.name):
            path.unlink(missing_ok=True)
    (progress / RUN_RECORD).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # gone already, or not empty
        progress.rmdir()


def finish_interrupted(folder: Path, kind: FolderKind, run: Run) -> bool:
    """Whether this very run had written its last file and was stopped before it removed its records; they are removed now."""
    before = recorded_run(folder) if (folder / kind.marker).is_file() else None
    if before is None or before.identity != run.identity:
        return False
    remove_records(folder)
    return True


def missing_space(path: Path, needed: int, replaced: Iterable[str] = ()) -> None:
    """Refuse when the disk that holds `path` has less than `needed` bytes free, those of the `replaced` files in `path` counted as free."""
    place = path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free + _bytes_of(path, replaced)
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


def _bytes_of(folder: Path, paths: Iterable[str]) -> int:
    """Bytes of these files where they exist; hard links of one file count once."""
    found = [(folder / path).lstat() for path in paths if (folder / path).is_file()]
    return sum({(status.st_dev, status.st_ino): status.st_size for status in found}.values())
