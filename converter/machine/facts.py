"""A machine as facts: everything that the rules of `ms-convert doctor` look at, read once and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MindSpore:
    """The installed package. `accepted_cann` is its own list, None if it has none; `custom_ops_cann` what its operators were built with."""

    version: str
    folder: str
    requires_python: str | None
    requirements: tuple[str, ...]
    accepted_cann: tuple[str, ...] | None
    custom_ops_cann: str | None


@dataclass(frozen=True)
class Cann:
    """CANN at `home`. `version` is the whole of `Version=` in compiler/version.info, None where there is no such file."""

    home: str
    version: str | None

    @property
    def release(self) -> str | None:
        """The first two numbers, as MindSpore compares them: 8.2 for 8.2.RC1."""
        return None if self.version is None else ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class Npu:
    """A chip as `npu-smi info` shows it. Memory in MB."""

    npu: int
    chip: int
    device: int
    name: str
    health: str
    memory_used: int | None
    memory_total: int | None
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Disk:
    """A folder, or the nearest one above it that exists: its filesystem's kind, its free bytes, whether this user may write there."""

    path: str
    exists: bool
    kind: str
    free: int
    writable: bool


@dataclass(frozen=True)
class Machine:
    """The facts. Device numbers are those of /dev/davinciN; ports are those that something listens on."""

    python: str
    environment: Mapping[str, str]
    packages: Mapping[str, str] = field(default_factory=dict)
    mindspore: MindSpore | None = None
    architecture: str = ""
    cann: Cann | None = None
    cann_on_disk: tuple[Cann, ...] = ()
    cann_folders: tuple[str, ...] = ()
    driver: str | None = None
    devices: tuple[int, ...] = ()
    npus: tuple[Npu, ...] = ()
    failed_tools: Mapping[str, str] = field(default_factory=dict)
    device_addresses: Mapping[int, str] = field(default_factory=dict)
    network_health: Mapping[int, str] = field(default_factory=dict)
    has_te: bool = False
    shadows: tuple[str, ...] = ()
    has_libgomp: bool = True
    hostname: str = ""
    addresses: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    resolved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    listening: frozenset[int] = frozenset()
    reserved_ports: tuple[tuple[int, int], ...] = ()
    ephemeral_ports: tuple[int, int] = (32768, 60999)
    disks: Mapping[str, Disk] = field(default_factory=dict)
    existing_files: frozenset[str] = frozenset()

    @property
    def has_ascend(self) -> bool:
        """Whether anything of Ascend's is here: then what is missing of it is an error, else the machine is one without NPUs."""
        return bool(self.driver or self.devices or self.npus or self.failed_tools or self.cann or self.cann_on_disk)
