"""Rules on Ascend's own installation: driver, CANN, the variables that CANN's set_env.sh sets, and the devices.

The rules on variables are those of `AscendEnvChecker._check_env` in the installed mindspore, applied to whole entries of a path.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator

from converter.digits import whole_number
from converter.doctor.cann_facts import as_version, published_driver
from converter.doctor.rule import Case, Rules, Sight
from converter.machine.facts import Machine
from converter.untrusted import quoted

RULES = Rules()
TBE = "opp/built-in/op_impl/ai_core/tbe"
CHECKER = "AscendEnvChecker in the installed mindspore"


def set_env(machine: Machine) -> str:
    """The command that sets CANN's variables."""
    cann = machine.cann or next(iter(machine.cann_on_disk), None)
    home = posixpath.dirname(cann.home) if cann and posixpath.basename(cann.home) == "latest" else (cann.home if cann else "CANN")
    return f"source {shlex.quote(f'{home}/set_env.sh')}"


@RULES.rule(
    "driver-missing", "error", source="CANN installation guide",
    why="libascend_hal.so: cannot open shared object file: No such file or directory",
)  # fmt: skip
def _driver_missing(case: Case) -> Iterator[Sight]:
    machine = case.machine
    if machine.has_ascend and machine.driver is None:
        wanted = "/usr/local/Ascend/driver with its version.info"
        yield Sight("no driver", wanted, "install it, or mount /usr/local/Ascend/driver into the container")


@RULES.rule(
    "devices-missing", "error", source="CANN installation guide",
    why="Call aclrtSetDevice failed, ret[107001]. Got device count[0] and device id[0]",
)  # fmt: skip
def _devices_missing(case: Case) -> Iterator[Sight]:
    machine = case.machine
    if machine.has_ascend and not machine.devices:
        yield Sight(
            "no /dev/davinciN", "a device file for each NPU", "load the driver; in a container docker run --device /dev/davinci0 ..."
        )


@RULES.rule(
    "cann-missing", "error", source="MindSpore installation guide",
    why="libascendcl.so: cannot open shared object file: No such file or directory",
)  # fmt: skip
def _cann_missing(case: Case) -> Iterator[Sight]:
    machine = case.machine
    if machine.has_ascend and machine.cann is None and not machine.cann_on_disk:
        accepted = machine.mindspore.accepted_cann if machine.mindspore else None
        yield Sight("no CANN", f"CANN {', '.join(accepted)}" if accepted else "CANN", "install the toolkit and source its set_env.sh")


@RULES.rule(
    "cann-not-set-up", "error", source=CHECKER, why="libascendcl.so: cannot open shared object file: No such file or directory",
)  # fmt: skip
def _cann_not_set_up(case: Case) -> Iterator[Sight]:
    machine = case.machine
    if machine.cann is None and machine.cann_on_disk:
        home = machine.environment.get("ASCEND_HOME_PATH")
        seen = "ASCEND_HOME_PATH is not set" if home is None else f"ASCEND_HOME_PATH={quoted(home)} is no folder"
        wanted = f"ASCEND_HOME_PATH={machine.cann_on_disk[0].home} (CANN {machine.cann_on_disk[0].version})"
        yield Sight(seen, wanted, set_env(machine), "ASCEND_HOME_PATH")


@RULES.rule(
    "cann-version-unknown", "warning", source=CHECKER,
    why="Using custom Ascend AI software package (Ascend Data Center Solution) path, package version checking is skipped",
)  # fmt: skip
def _cann_version_unknown(case: Case) -> Iterator[Sight]:
    cann = case.machine.cann
    if cann and cann.version is None:
        seen = f"no Version= in {cann.home}/compiler/version.info"
        yield Sight(seen, "the folder of the toolkit itself", set_env(case.machine), "ASCEND_HOME_PATH")


@RULES.rule(
    "cann-two-homes", "error", source="set_env.sh of CANN",
    why="undefined symbol: libraries of one CANN are loaded with operators of another",
)  # fmt: skip
def _two_homes(case: Case) -> Iterator[Sight]:
    home, toolkit = (case.machine.environment.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"))
    if case.machine.cann and home and toolkit and posixpath.normpath(home) != posixpath.normpath(toolkit):
        seen = f"ASCEND_HOME_PATH={quoted(home)}, ASCEND_TOOLKIT_HOME={quoted(toolkit)}"
        yield Sight(seen, "one CANN", f"in a new shell: {set_env(case.machine)}")


@RULES.rule(
    "driver-version", "warning", source="version tables of MindFormers",
    why="the runtime asks the driver for something that it has not: aclInit or aclrtSetDevice fails",
)  # fmt: skip
def _driver_version(case: Case) -> Iterator[Sight]:
    cann, driver = case.machine.cann, case.machine.driver
    wanted = published_driver(cann.version) if cann and cann.version else None
    if cann and driver and wanted:
        have, need = as_version(driver), as_version(wanted)
        if have and need and have < need:
            yield Sight(f"driver {driver}", f"driver {wanted} or later for CANN {cann.version}", "upgrade the driver")


def _entries(machine: Machine, variable: str) -> list[str]:
    return [posixpath.normpath(entry) for entry in machine.environment.get(variable, "").split(":") if entry]


@RULES.rule(
    "env-pythonpath", "error", source=CHECKER,
    why="Cannot find the tbe operator implementation(need by mindspore-ascend). Please check whether the Environment Variable PYTHONPATH "
    "is set",
)  # fmt: skip
def _pythonpath(case: Case) -> Iterator[Sight]:
    if case.machine.cann and not any(entry.endswith(f"/{TBE}") for entry in _entries(case.machine, "PYTHONPATH")):
        seen = f"PYTHONPATH has no entry that ends in {TBE}"
        yield Sight(seen, f"{case.machine.cann.home}/{TBE}", set_env(case.machine), "PYTHONPATH")


@RULES.rule(
    "env-te", "error", source=CHECKER,
    why='MindSpore relies on whl package "te" in Ascend AI software package (Ascend Data Center Solution). No module named \'te\'',
)  # fmt: skip
def _te(case: Case) -> Iterator[Sight]:
    named = any(entry.endswith(f"/{TBE}") for entry in _entries(case.machine, "PYTHONPATH"))
    if case.machine.cann and named and not case.machine.has_te:
        wanted = f"the folder te in {case.machine.cann.home}/python/site-packages, and that in PYTHONPATH"
        yield Sight("`import te` finds nothing", wanted, set_env(case.machine), "PYTHONPATH")


@RULES.rule(
    "env-library-path", "error", source=CHECKER,
    why="Cannot find driver so(need by mindspore-ascend). Please check whether the Environment Variable LD_LIBRARY_PATH is set",
)  # fmt: skip
def _library_path(case: Case) -> Iterator[Sight]:
    if case.machine.cann and not any("lib64" in entry.split("/") for entry in _entries(case.machine, "LD_LIBRARY_PATH")):
        yield Sight("LD_LIBRARY_PATH has no lib64", f"{case.machine.cann.home}/lib64", set_env(case.machine), "LD_LIBRARY_PATH")


@RULES.rule(
    "env-opp-path", "error", source=CHECKER,
    why="Cannot find opp path (need by mindspore-ascend). Please check whether the Environment Variable ASCEND_OPP_PATH is set",
)  # fmt: skip
def _opp_path(case: Case) -> Iterator[Sight]:
    if case.machine.cann and not any("opp" in entry.split("/") for entry in _entries(case.machine, "ASCEND_OPP_PATH")):
        value = case.machine.environment.get("ASCEND_OPP_PATH")
        seen = "ASCEND_OPP_PATH is not set" if not value else f"ASCEND_OPP_PATH={quoted(value)}"
        yield Sight(seen, f"{case.machine.cann.home}/opp", set_env(case.machine), "ASCEND_OPP_PATH")


@RULES.rule(
    "npu-smi", "error", source="npu-smi", why="dcmi module initialize failed. ret is -8005: no process can use a device",
)  # fmt: skip
def _npu_smi(case: Case) -> Iterator[Sight]:
    for command, answer in case.machine.failed_tools.items():
        yield Sight(
            f"`{command}` failed: {answer[:200]}", "a table of devices", "as root: check `dmesg` and the driver; in a container: its mounts"
        )


@RULES.rule("npu-health", "error", source="npu-smi", why="Call aclrtSetDevice failed, or an operator stops in the middle of a run")
def _npu_health(case: Case) -> Iterator[Sight]:
    for npu in case.machine.npus:
        if npu.health.upper() != "OK":
            mend = f"npu-smi info -t health -i {npu.npu}; reset it when nobody uses it: npu-smi set -t reset -i {npu.npu} -c {npu.chip}"
            yield Sight(f"device {npu.device} ({npu.name}): {npu.health}", "OK", mend)


@RULES.rule(
    "npu-busy", "error", source="MindSpore FAQ: it allocates about 80 % of the device's memory at its start",
    why="Malloc device memory failed, size[...], ret[207001], Device ... may be other processes occupying this card",
)  # fmt: skip
def _npu_busy(case: Case) -> Iterator[Sight]:
    chosen = visible_devices(case.machine)
    for npu in case.machine.npus:
        if npu.processes and (chosen is None or npu.device in chosen):
            processes = ", ".join(map(str, npu.processes))
            mend = f"ps -fp {npu.processes[0]}; or choose others: export ASCEND_RT_VISIBLE_DEVICES=..."
            yield Sight(f"device {npu.device} is used by process {processes}", "no process on it", mend)


def visible_devices(machine: Machine) -> tuple[int, ...] | None:
    """The devices in ASCEND_RT_VISIBLE_DEVICES, None if it is unset or not of its form."""
    numbers = [whole_number(piece.strip()) for piece in machine.environment.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")]
    known = tuple(number for number in numbers if number is not None)
    return known if len(known) == len(numbers) else None


@RULES.rule(
    "npu-network", "warning", source="hccn_tool", why="EI0006: Getting socket times out, as soon as devices of two hosts talk",
)  # fmt: skip
def _npu_network(case: Case) -> Iterator[Sight]:
    for device, health in case.machine.network_health.items():
        if health.lower() != "success" and not case.one_host:
            mend = f"hccn_tool -i {device} -link -g; hccn_tool -i {device} -ip -g; hccn_tool -i {device} -netdetect -g"
            yield Sight(f"device {device}: net health {quoted(health)}", "Success", mend)


@RULES.rule(
    "device-address", "warning", source="HCCL user guide: hccn.conf",
    why="between hosts: EJ0004, or EI0006: Getting socket times out",
)  # fmt: skip
def _device_address(case: Case) -> Iterator[Sight]:
    missing = [device for device in case.machine.devices if device not in case.machine.device_addresses]
    if missing and not case.one_host:
        seen = f"no address for device {', '.join(map(str, missing))}"
        yield Sight(seen, "address_N in /etc/hccn.conf", f"hccn_tool -i {missing[0]} -ip -s address ADDRESS netmask MASK", "/etc/hccn.conf")


@RULES.rule(
    "device-address-twice", "error", source="HCCL user guide: device_ip is unique",
    why="EI0004: The ranktable or rank is invalid, Reason:[The IP is used repeatedly.]",
)  # fmt: skip
def _device_address_twice(case: Case) -> Iterator[Sight]:
    first: dict[str, int] = {}
    for device, address in sorted(case.machine.device_addresses.items()):
        if first.setdefault(address, device) != device:
            mend = f"hccn_tool -i {device} -ip -s address ADDRESS netmask MASK"
            yield Sight(f"devices {first[address]} and {device} both have {address}", "an address for each", mend, "/etc/hccn.conf")
