"""What Ascend has put on the machine: CANN, the driver, devices, and what npu-smi and hccn_tool print.

Outputs were taken from public reports: `npu-smi info` of 910B (A2), Ascend910 (A3, with a Phy-ID column) and 310P; HCCN tool guide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from converter.machine.facts import Cann, Npu
from converter.machine.system import System
from converter.rank_table.sources import HCCN_CONF, hccn_addresses, printed_address

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
INSTALL_INFO = "/etc/ascend_install.info"
USUAL_PLACE = "/usr/local/Ascend"
CANN_FOLDERS = ("cann", "ascend-toolkit/latest", "nnae/latest", "latest")
"""Where CANN lies below its place; it moved from ascend-toolkit to cann."""
_VERSION = re.compile(r"^Version[ \t]*=[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_DEVICE = re.compile(r"davinci(\d{1,4})")
_FIRST_LINE = re.compile(r"\|\s*(\d{1,9})\s+(\S+)\s*\|\s*(\S+)\s*\|")
_SECOND_LINE = re.compile(r"\|\s*(\d{1,9})(?:\s+(\d{1,9}))?\s*\|\s*(?:[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+|NA)\s*\|(.*)\|")
_PROCESS = re.compile(r"\|\s*(\d{1,9})\s+(\d{1,9})\s*\|\s*(\d{1,9})\s*\|")
_MEMORY = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})")


def version_in(text: str | None) -> str | None:
    """The value of `Version=` in a version.info."""
    match = _VERSION.search(text or "")
    return match.group(1) if match else None


def read_cann(system: System, home: str) -> Cann | None:
    """CANN in a folder; None if there is no such folder."""
    if not home.startswith("/") or not os.path.isdir(system.path(home)):
        return None
    return Cann(home.rstrip("/"), version_in(system.text(f"{home}/compiler/version.info")))


def active_cann(system: System) -> Cann | None:
    """The CANN that the environment names."""
    homes = (system.environment.get(name) for name in HOME_VARIABLES)
    return next((cann for home in homes if home and (cann := read_cann(system, home))), None)


def cann_on_disk(system: System) -> Iterator[Cann]:
    """Every CANN in the usual places, named by the environment or not."""
    seen = set()
    for folder in CANN_FOLDERS:
        cann = read_cann(system, f"{USUAL_PLACE}/{folder}")
        if cann is not None and cann.version is not None and (real := system.path(cann.home).resolve()) not in seen:
            seen.add(real)
            yield cann


def installed_folders(system: System) -> tuple[str, ...]:
    """Which of the packages that exclude each other under old MindSpore are there: nnae, ascend-toolkit."""
    return tuple(name for name in ("ascend-toolkit", "nnae") if system.names(f"{USUAL_PLACE}/{name}"))


def driver_version(system: System) -> str | None:
    """The version of the installed driver."""
    place = re.search(r"^Driver_Install_Path_Param=(/\S+)", system.text(INSTALL_INFO) or "", re.MULTILINE)
    return version_in(system.text(f"{place.group(1) if place else USUAL_PLACE}/driver/version.info"))


def device_numbers(system: System) -> tuple[int, ...]:
    """The N of /dev/davinciN."""
    matches = (_DEVICE.fullmatch(name) for name in system.names("/dev"))
    return tuple(sorted(int(match.group(1)) for match in matches if match))


def read_npus(system: System) -> tuple[tuple[Npu, ...], str | None]:
    """The chips that `npu-smi info` shows, and how it failed if it did."""
    tool = system.tool("npu-smi")
    if tool is None:
        return (), None
    ran = system.run([tool, "info"])
    lines = ran.output.strip().splitlines()
    return (parse_npus(ran.output), None) if ran.code == 0 else ((), lines[-1] if lines else f"exit code {ran.code}")


def parse_npus(output: str) -> tuple[Npu, ...]:
    """The chips in the output of `npu-smi info`: two lines for each, then a table of processes."""
    table, _, processes = output.partition("Process id")
    owners: dict[tuple[int, int], list[int]] = {}
    for npu, chip, process in _PROCESS.findall(processes):
        owners.setdefault((int(npu), int(chip)), []).append(int(process))
    found: list[Npu] = []
    first: re.Match[str] | None = None
    for line in table.splitlines():
        second = _SECOND_LINE.match(line)
        if first is not None and second is not None:
            found.append(_npu(first, second, owners))
            first = None
        else:
            first = _FIRST_LINE.match(line)
    return tuple(found)


def _npu(first: re.Match[str], second: re.Match[str], owners: dict[tuple[int, int], list[int]]) -> Npu:
    npu, chip = int(first.group(1)), int(second.group(1))
    used, total = next(((int(a), int(b)) for a, b in reversed(_MEMORY.findall(second.group(3))) if int(b)), (None, None))
    device = npu if second.group(2) is None else int(second.group(2))
    return Npu(npu, chip, device, first.group(2), first.group(3), used, total, tuple(owners.get((npu, chip), ())))


def read_addresses(system: System, devices: tuple[int, ...]) -> dict[int, str]:
    """The address of each device's network port, from hccn.conf, else from hccn_tool."""
    found = hccn_addresses(system.text(f"/{HCCN_CONF}") or "")
    missing = tuple(device for device in devices if device not in found)
    answers = _ask_each(system, missing, ("-ip", "-g"))
    return found | {device: address for device, output in answers.items() if (address := printed_address(output))}


def read_network_health(system: System, devices: tuple[int, ...]) -> dict[int, str]:
    """What `hccn_tool -i N -net_health -g` says of each device: `Success`, or what is wrong."""
    answers = _ask_each(system, devices, ("-net_health", "-g"))
    return {device: output.strip().rpartition(":")[2].strip() for device, output in answers.items()}


def _ask_each(system: System, devices: tuple[int, ...], question: tuple[str, ...]) -> dict[int, str]:
    tool = system.tool("hccn_tool")
    if tool is None or not devices:
        return {}
    with ThreadPoolExecutor(len(devices)) as pool:
        ran = pool.map(lambda device: system.run([tool, "-i", str(device), *question]), devices)
        return {device: result.output for device, result in zip(devices, ran, strict=True)}
