"""Rules on a training run: its ranks, scheduler, port and folders, held against this machine."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator

from converter.digits import whole_number
from converter.display import size
from converter.doctor.ascend_rules import visible_devices
from converter.doctor.rank_rules import NO_DEVICE
from converter.doctor.rule import Case, Rules, Sight
from converter.doctor.run_facts import RunFacts
from converter.doctor.version_rules import fits
from converter.machine.disks import SHARED
from converter.machine.facts import Machine
from converter.rank_table.entries import is_address
from converter.untrusted import quoted

RULES = Rules()
MSRUN = "MindSpore tutorials/parallel/msrun_launcher.md"
MANY_RANKS, LONG_TIMEOUT = 128, 900
NOBODYS_NAMES = frozenset({"localhost", "localhost.localdomain", "localhost4", "localhost6", "ubuntu", "debian", "openeuler"})
NEVER_BUILT = "the cluster is not built: after cluster_time_out (600 s) each worker ends with a registration timeout"


@RULES.rule("host-name", "warning", source="MindSpore FAQ, distributed: host names must differ", why=NO_DEVICE)
def _host_name(case: Case) -> Iterator[Sight]:
    """Only one host is seen, so what is found is a name that others are likely to have too."""
    several = (case.run is not None and case.run.nodes > 1) or (case.table is not None and len(case.table.servers) > 1)
    if several and case.machine.hostname.lower() in NOBODYS_NAMES:
        seen = f"this host is called {quoted(case.machine.hostname)}"
        yield Sight(seen, "a name that no other host of the job has", "as root: hostnamectl set-hostname node0")


@RULES.rule("scheduler-variables", "error", source="MindSpore tutorials/parallel/dynamic_cluster.md", why=NEVER_BUILT)
def _scheduler(case: Case) -> Iterator[Sight]:
    port, host = (case.machine.environment.get(name) for name in ("MS_SCHED_PORT", "MS_SCHED_HOST"))
    if port is not None and (whole_number(port) or 0) not in range(1024, 65536):
        yield Sight(f"MS_SCHED_PORT={quoted(port)}", "a port from 1024 to 65535", "unset MS_SCHED_PORT   (msrun sets it)", "MS_SCHED_PORT")
    if host is not None and not is_address(host):
        yield Sight(f"MS_SCHED_HOST={quoted(host)}", "an IP address", "unset MS_SCHED_HOST   (msrun sets it)", "MS_SCHED_HOST")


@RULES.rule(
    "run-device", "error", source="the config", why="Unsupported device target Ascend, or libascendcl.so: cannot open shared object file",
)  # fmt: skip
def _device(case: Case) -> Iterator[Sight]:
    if case.run and case.run.device == "ascend" and not case.machine.has_ascend:
        yield Sight(
            'launch.device = "ascend", and nothing of Ascend\'s is here',
            "driver, CANN and NPUs",
            "ms-train launch --device cpu ...",
            case.run.config,
        )


@RULES.rule("run-nodes", "error", source=f"{MSRUN}: the sum of local_worker_num is worker_num", why=NEVER_BUILT)
def _nodes(case: Case) -> Iterator[Sight]:
    run = case.run
    if run and run.ranks % run.nodes:
        seen = f"{run.ranks} ranks on {run.nodes} hosts"
        yield Sight(seen, f"tp x pp x dp a multiple of launch.nnodes {run.nodes}", "", run.config)


@RULES.rule("run-ranks", "error", source="MindSpore FAQ, distributed", why=NO_DEVICE)
def _ranks(case: Case) -> Iterator[Sight]:
    run, machine = case.run, case.machine
    if not run or run.device != "ascend" or not machine.devices:
        return
    chosen = visible_devices(machine)
    count = len(machine.devices if chosen is None else chosen)
    if run.local_ranks > count:
        seen = f"{run.local_ranks} ranks on this host, {count} devices"
        yield Sight(seen, "a device for each rank", "make parallel.tp, pp or dp smaller, or launch.nnodes larger", run.config)


@RULES.rule(
    "run-table", "error", source="MindFormers FAQ: dp x tp x pp is the number of devices", why="EI0004: The ranktable or rank is invalid"
)
def _table(case: Case) -> Iterator[Sight]:
    run, table = case.run, case.table
    if run and table and table.ranks and table.ranks != run.ranks:
        yield Sight(f"tp x pp x dp is {run.ranks}, {table.path} has {table.ranks} ranks", "the same number", "", run.config)


@RULES.rule(
    "run-node-rank", "warning", source=f"{MSRUN}: without node_rank the ranks are numbered in any order",
    why="no error: hosts get one another's slices. ms-train refuses to start so",
)  # fmt: skip
def _node_rank(case: Case) -> Iterator[Sight]:
    run = case.run
    if run and run.nodes > 1 and run.node_rank is None:
        yield Sight("no launch.node_rank", f"0 to {run.nodes - 1}, another on each host", "ms-train launch --node-rank N ...", run.config)


@RULES.rule(
    "run-master", "error", source="_convert_addr_to_ip in msrun",
    why="DNS resolution has failed. Please verify that the correct hostname has been specified in the '--master_address' parameter",
)  # fmt: skip
def _master(case: Case) -> Iterator[Sight]:
    run = case.run
    if run and not _master_addresses(case.machine, run):
        yield Sight(
            f"launch.master_addr {quoted(run.master)} has no address",
            "an address, or a name in /etc/hosts",
            f"getent hosts {shlex.quote(run.master)}",
            run.config,
        )


def _master_addresses(machine: Machine, run: RunFacts) -> tuple[str, ...]:
    name = run.master.strip("[]")
    return (name,) if is_address(name) else machine.resolved.get(run.master, ())


@RULES.rule("run-master-loopback", "error", source=MSRUN, why=NEVER_BUILT)
def _master_loopback(case: Case) -> Iterator[Sight]:
    """Other hosts that are told 127.0.0.1 look for the scheduler on themselves. Distributions give a host's own name 127.0.1.1."""
    run = case.run
    addresses = _master_addresses(case.machine, run) if run else ()
    if run and run.nodes > 1 and any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        seen = f"launch.master_addr {quoted(run.master)} is {', '.join(addresses)}"
        yield Sight(seen, "an address of host 0 that the other hosts reach", "ip -brief address   (on host 0)", run.config)


@RULES.rule("run-master-elsewhere", "error", source=MSRUN, why=f"no scheduler is started on host 0: {NEVER_BUILT}")
def _master_elsewhere(case: Case) -> Iterator[Sight]:
    run, machine = case.run, case.machine
    addresses = _master_addresses(machine, run) if run else ()
    if not run or not addresses or not machine.addresses or (run.nodes > 1 and run.node_rank != 0):
        return
    if not any(ipaddress.ip_address(a.partition("%")[0]).is_loopback or a in machine.addresses for a in addresses):
        seen = f"launch.master_addr {quoted(run.master)} is {', '.join(addresses)}, not this host"
        own = ", ".join(a for a in machine.addresses if not ipaddress.ip_address(a).is_loopback)
        yield Sight(seen, f"an address of host 0: {own}", "ms-train launch --node-rank N ...   (if this is not host 0)", run.config)


@RULES.rule(
    "run-master-ipv6", "error", source=f"{MSRUN}; dynamic_cluster.md: IPv6 on Ascend only",
    why="Get local ip has failed, or the scheduler does not bind",
)  # fmt: skip
def _master_ipv6(case: Case) -> Iterator[Sight]:
    run, mindspore = case.run, case.machine.mindspore
    addresses = _master_addresses(case.machine, run) if run else ()
    old = mindspore is not None and not fits(mindspore.version, ">=2.10")
    if run and addresses and (old or run.device == "cpu") and all(":" in address for address in addresses):
        yield Sight(f"launch.master_addr {quoted(run.master)} is IPv6", "an IPv4 address", "", run.config)


@RULES.rule("run-port", "error", source=MSRUN, why=f"the scheduler cannot bind: Address already in use; {NEVER_BUILT}")
def _port(case: Case) -> Iterator[Sight]:
    run = case.run
    if run and run.port is not None and run.port in case.machine.listening and (run.nodes == 1 or run.node_rank == 0):
        mend = f"ss -ltnp sport = :{run.port}   (who has it), or launch.master_port = another"
        yield Sight(f"something listens on port {run.port}", "a free port for the scheduler", mend, run.config)


@RULES.rule(
    "run-node-timeout", "warning", source="MindSpore FAQ, distributed: 900 to 1800 for more than 128 devices",
    why="The node ... is timed out: compiling takes longer than the scheduler waits for a sign of life",
)  # fmt: skip
def _node_timeout(case: Case) -> Iterator[Sight]:
    run = case.run
    if run is None or run.ranks <= MANY_RANKS:
        return
    name, where = "launch.node_timeout", run.config
    given = run.node_timeout
    if given is None:  # then the launcher leaves the shell's variable as it is
        name = where = "MS_NODE_TIMEOUT"
        given = whole_number(case.machine.environment.get(name, ""))
    if given is not None and given < LONG_TIMEOUT:
        yield Sight(f"{name} {given} for {run.ranks} ranks", f"{LONG_TIMEOUT} to 1800, or left out", "", where)


@RULES.rule("run-reads", "error", source="the config", why="ms-train refuses to start: the file cannot be read")
def _reads(case: Case) -> Iterator[Sight]:
    for setting, folder in case.run.reads.items() if case.run else ():
        disk = case.machine.disks.get(folder)
        if disk is not None and not disk.exists:
            yield Sight(f"{setting} {quoted(folder)} is not here", "a folder on this host", "", setting)


@RULES.rule("run-writes", "error", source="the config", why="Permission denied, at the first checkpoint or the first line of a log")
def _writes(case: Case) -> Iterator[Sight]:
    for setting, folder in case.run.writes.items() if case.run else ():
        disk = case.machine.disks.get(folder)
        if disk is not None and not disk.writable:
            yield Sight(
                f"{setting} {quoted(folder)} cannot be written", "a folder that you may write to", f"ls -ld {shlex.quote(folder)}", setting
            )


@RULES.rule(
    "run-not-shared", "warning", source="MindFormers resume_training.md: behaves differently without shared storage",
    why="resuming or exporting finds the slices of this host only: the checkpoint is refused as incomplete",
)  # fmt: skip
def _not_shared(case: Case) -> Iterator[Sight]:
    run = case.run
    disk = case.machine.disks.get(run.checkpoint_folder) if run else None
    if run and disk and run.nodes > 1 and disk.kind and disk.kind not in SHARED:
        seen = f"checkpoint.folder {quoted(disk.path)} lies on {disk.kind}, which the other hosts do not see"
        yield Sight(seen, "storage that all hosts share (nfs, lustre, gpfs, ...)", f"df -T {shlex.quote(disk.path)}", "checkpoint.folder")


@RULES.rule(
    "run-disk",
    "error",
    source="each checkpoint has the weights in it, and one more is written before an old one goes",
    why="No space left on device",
)
def _disk(case: Case) -> Iterator[Sight]:
    run = case.run
    disk = case.machine.disks.get(run.checkpoint_folder) if run else None
    needed = run.weight_bytes * (run.kept + 1) if run else 0
    if run and disk and disk.kind not in SHARED:
        needed //= run.nodes  # each host writes its own slices
    if run and disk and needed > disk.free:
        seen = f"{size(disk.free)} free in {quoted(disk.path)}"
        wanted = f"{size(needed)} for {run.kept + 1} times the weights alone; the optimizer's state comes on top"
        yield Sight(seen, wanted, "make checkpoint.keep smaller, or name another checkpoint.folder", "checkpoint.folder")
