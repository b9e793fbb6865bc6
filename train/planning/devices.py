"""The table of devices (devices.toml, and a user's own)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mappings.config_values import shown_key
from mappings.errors import Problem, Refused
from train.config import read_toml
from train.settings import TableReader, setting

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_DEVICE = "910B-64GB"
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(rf"(\d{{1,12}}(?:\.\d{{1,6}})?) ?({'|'.join(UNITS)})")


@dataclass(frozen=True)
class DeviceRow:
    """A table of devices.toml."""

    memory: str = setting("of one device, as in 64GiB")
    tflops: float = setting("peak of 16-bit matrix products, 10^12 operations a second", low=1e-3, high=1e6)
    host_bandwidth: float = setting("GB/s that a device sends within its host", low=1e-3, high=1e6)
    network_bandwidth: float = setting("GB/s that a device sends to other hosts", 25.0, low=1e-3, high=1e6)
    host_devices: int = setting("devices of one host", 8, low=1, high=1 << 20)
    usable: float = setting("share of the memory that a run can have", 0.9, low=0.01, high=1.0)
    efficiency: float = setting("share of the peak that matrix products reach", 0.45, low=0.001, high=1.0)
    group_buffer: str = setting("device memory of one communication group", "400MiB")


@dataclass(frozen=True)
class _Row:
    device: DeviceRow


@dataclass(frozen=True)
class Device:
    """What a plan assumes of one device: bytes, operations a second, bytes a second."""

    name: str
    memory: int
    usable: float
    flops: float
    efficiency: float
    host_devices: int
    host_bandwidth: float
    network_bandwidth: float
    group_buffer: int

    @property
    def usable_memory(self) -> int:
        """Bytes that a run can have."""
        return int(self.memory * self.usable)

    def bandwidth(self, span: int) -> float:
        """Bytes a second that a device sends in a group whose ranks lie within `span` neighbouring ones: a host's, or the network's."""
        return self.host_bandwidth if span <= self.host_devices else self.network_bandwidth


def parse_size(text: str) -> int | None:
    """`64GiB`, `1.5 GB` in bytes; None for anything else, and for nothing."""
    match = _SIZE.fullmatch(text.strip())
    return (int(float(match[1]) * UNITS[match[2]]) or None) if match else None


def read_devices(path: Path | None = None) -> dict[str, Device]:
    """The bundled devices, and those of a file. Raises Refused with everything that is wrong in it."""
    bundled = files("train.planning").joinpath("devices.toml").read_text(encoding="utf-8")
    found = _parse(tomllib.loads(bundled), "devices.toml")
    if path is not None:
        found |= _parse(read_toml(path), path.name)
    return found


def _parse(data: Mapping[str, Any], where: str) -> dict[str, Device]:
    found, problems = {}, []
    for name, table in data.items():
        place = f"{where}: {shown_key(name)}"
        reader = TableReader(place, {})
        row = reader.read(_Row, {"device": table})
        problems += reader.problems
        if row is None:
            continue
        sizes = {key: parse_size(getattr(row.device, key)) for key in ("memory", "group_buffer")}
        problems += [Problem("is no size", f"{place}.{key}", "write 64GiB or 64GB") for key, size in sizes.items() if size is None]
        found[name] = _device(name, row.device, sizes["memory"] or 0, sizes["group_buffer"] or 0)
    if problems:
        raise Refused("the table of devices cannot be used", problems)
    return found


def _device(name: str, row: DeviceRow, memory: int, group_buffer: int) -> Device:
    return Device(
        name, memory, row.usable, row.tflops * 1e12, row.efficiency, row.host_devices, row.host_bandwidth * 1e9,
        row.network_bandwidth * 1e9, group_buffer,
    )  # fmt: skip
