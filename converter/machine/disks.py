"""Folders and the filesystems below them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from converter.machine.facts import Disk
from converter.machine.system import System

SHARED = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "dpc", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "gfs2",
    "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "pvfs2", "smb3", "wekafs",
})  # fmt: skip
"""Kinds of filesystems that other hosts see as well."""


def read_disk(system: System, path: str) -> Disk:
    """What is below a path, which need not exist yet."""
    place = system.place(path)
    nearest = next(parent for parent in (place, *place.parents) if os.path.exists(parent))
    return Disk(
        path=path,
        exists=os.path.exists(place),
        kind=_kind(system, nearest),
        free=system.free_bytes(nearest),
        writable=system.may_write(nearest),
    )


def _kind(system: System, place: Path) -> str:
    """The kind of the filesystem that holds a folder, "" if /proc/mounts does not tell."""
    real, root = Path(os.path.realpath(place)), Path(os.path.realpath(system.root))
    inside = str(Path("/") / real.relative_to(root)) if real.is_relative_to(root) else str(real)
    best, kind = -1, ""
    for line in (system.text("/proc/mounts") or "").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), fields[1])
        if os.path.commonpath([mount, inside]) == mount and len(mount) >= best:
            best, kind = len(mount), fields[2]
    return kind
