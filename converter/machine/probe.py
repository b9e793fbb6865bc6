"""Reading a machine's facts, once, in well under a second where no tool of Ascend's has to be asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from converter.machine.ascend import (
    active_cann,
    cann_on_disk,
    device_numbers,
    driver_version,
    installed_folders,
    read_addresses,
    read_network_health,
    read_npus,
)  # fmt: skip
from converter.machine.disks import read_disk
from converter.machine.facts import Machine
from converter.machine.network import ephemeral_ports, interfaces, listening_ports, own_addresses, reserved_ports
from converter.machine.packages import installed, read_mindspore
from converter.machine.system import System

FILE_VARIABLES = ("RANK_TABLE_FILE", "HCCL_WHITELIST_FILE")
LIBRARY_FOLDERS = ("usr/lib64", "usr/lib", "lib64", "lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/local/lib64")
LIBGOMP = "libgomp.so.1"


def probe(system: System, *, names: Iterable[str] = (), folders: Iterable[str] = ()) -> Machine:
    """The facts of a machine. `names` are hosts to resolve besides this one, `folders` those whose filesystem matters."""
    devices = device_numbers(system)
    with ThreadPoolExecutor(4) as pool:  # each asks something that may be slow
        npus = pool.submit(read_npus, system)
        addresses = pool.submit(read_addresses, system, devices)
        health = pool.submit(read_network_health, system, devices)
        resolved = pool.submit(lambda: {name: system.resolve(name) for name in sorted({system.hostname, *names}) if name})
    chips, failure = npus.result()
    mindspore = read_mindspore(system)
    return Machine(
        python=system.python,
        environment=system.environment,
        packages=installed(system, mindspore),
        mindspore=mindspore,
        architecture=system.architecture,
        cann=active_cann(system),
        cann_on_disk=tuple(cann_on_disk(system)),
        cann_folders=installed_folders(system),
        driver=driver_version(system),
        devices=devices,
        npus=chips,
        failed_tools={} if failure is None else {"npu-smi info": failure},
        device_addresses=addresses.result(),
        network_health=health.result(),
        has_te=_has_package(system, "te"),
        shadows=_shadows(system),
        has_libgomp=_has_libgomp(system),
        hostname=system.hostname,
        addresses=own_addresses(system),
        interfaces=interfaces(system),
        resolved=resolved.result(),
        listening=listening_ports(system),
        reserved_ports=reserved_ports(system),
        ephemeral_ports=ephemeral_ports(system),
        disks={folder: read_disk(system, folder) for folder in folders},
        existing_files=frozenset(
            value for value in map(system.environment.get, FILE_VARIABLES) if value and os.path.isfile(system.place(value))
        ),
    )


def _python_path(system: System) -> list[str]:
    return [entry for entry in system.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _has_package(system: System, name: str) -> bool:
    """Whether `import name` would find a folder: in PYTHONPATH, or where Python looks anyway."""
    folders = (*map(system.place, _python_path(system)), *(system.folder / entry for entry in system.search_path))
    return any(os.path.isdir(folder / name) for folder in folders)


def _shadows(system: System) -> tuple[str, ...]:
    """What `import mindspore` finds here before the installed package: a folder or a file in the working directory."""
    names = (name for name in ("mindspore", "mindspore.py") if os.path.exists(system.folder / name))
    return tuple(name for name in names if not os.path.isdir(system.folder / name / "run_check"))


def _has_libgomp(system: System) -> bool:
    """Whether the library that MindSpore loads first stands where a loader looks."""
    entries = [entry for entry in system.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry.startswith("/")]
    folders = (*LIBRARY_FOLDERS, *entries, f"{system.prefix}/lib")
    return any(os.path.exists(system.path(f"{folder}/{LIBGOMP}")) for folder in folders) or LIBGOMP in (
        system.text("/etc/ld.so.cache") or ""
    )
