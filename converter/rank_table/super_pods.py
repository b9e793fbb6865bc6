"""Super-pods in a rank table of version 1.2 (Atlas A3): rules of HCCL's `GetSuperPodList` and `CheckSuperPodInfo`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from converter.rank_table.entries import INVALID, Entry, Findings, ServerEntry
from converter.untrusted import quoted


def check_super_pods(root: Entry, servers: Sequence[ServerEntry], findings: Findings) -> None:
    """Adds what is wrong with `super_pod_list` and with the super_device_ids."""
    pods: dict[str, str] = {}
    names: set[str] = set()
    known = {server.server_id for server in servers}
    for entry in root.entries("super_pod_list"):
        name = entry.text("super_pod_id")
        if name is not None and (not name or name in names):
            why = f"{INVALID} Reason:[the 'super_pod_id' in the ranktable is invalid or empty]"
            seen = f"super_pod_id {quoted(name)} {'again' if name else 'is empty'}"
            findings.add("super-pod", entry.line_of("super_pod_id"), seen, wanted="a name of its own for each", why=why)
        names.add(name or "")
        for member in entry.entries("server_list"):
            _check_member(member, name or "", pods, known, findings)
    if root.has("super_pod_list"):
        _check_servers(pods, servers, findings)


def _check_member(member: Entry, pod: str, pods: dict[str, str], known: Collection[str | None], findings: Findings) -> None:
    server = member.text("server_id")
    if server is None:
        return
    line = member.line_of("server_id")
    if server not in known:
        why = f"{INVALID} Reason:[the 'server_id' in the ranktable 'super_pod_list' is invalid or not found in server_list]"
        findings.add("super-pod", line, f"server {quoted(server)} is not in server_list", wanted="a server_id of server_list", why=why)
    elif server in pods:
        seen = f"server {quoted(server)} is in super-pod {quoted(pods[server])} already"
        findings.add("super-pod", line, seen, wanted="each server in one super-pod", why=INVALID)
    pods.setdefault(server, pod)


def _check_servers(pods: dict[str, str], servers: Sequence[ServerEntry], findings: Findings) -> None:
    used: dict[tuple[str, int], int] = {}
    for server in servers:
        pod = pods.get(server.server_id or "")
        if pod is None:
            why = "HCCL logs: serverNum[...] in super_pod_list and serverNum[...] in server_list are inconsistent"
            seen = f"server {quoted(server.server_id or '')} is in no super-pod"
            findings.add("super-pod", server.line, seen, wanted="each server in one super-pod", why=why)
            continue
        for device in server.devices:
            line = device.line_of("super_device_id")
            key = (pod, -1 if device.super_device_id is None else device.super_device_id)
            if device.super_device_id is not None and used.setdefault(key, line) != line:
                why = "HCCL logs: superDeviceId[...] in superPod[...] is already exist."
                seen = f"super_device_id {device.super_device_id} again in super-pod {quoted(pod)}, first on line {used[key]}"
                mend = "on the server: npu-smi info -t spod-info -i NPU -c CHIP   (SDID)"
                findings.add("super-pod", line, seen, wanted="each device's own number", why=why, mend=mend)
