"""`ms-convert rank-table`: what `make` writes is what HCCL wants, and `check` finds every mistake, each on its line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.findings import Finding
from converter.rank_table.check import MAX_BYTES, check_file
from converter.rank_table.located_json import MAX_DEPTH, MAX_SLIPS, Node, read
from mappings.errors import Refused
from tests.converter.command_line import done, ms_convert, refused
from tests.converter.fake_machine import device_ip, healthy_table

Table = dict[str, Any]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def plain(node: Node) -> Any:
    """A located document without its lines."""
    if isinstance(node.value, dict):
        return {key: plain(value) for key, value in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


@given(JSON, st.sampled_from([None, 0, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_a_document_is_read_as_the_standard_library_reads_it(document: Any, indent: int | None) -> None:
    text = json.dumps(document, indent=indent)
    node, slips = read(text)
    assert node is not None and slips == []
    assert plain(node) == json.loads(text)


@given(st.lists(st.dictionaries(st.text(min_size=1), st.integers(), min_size=1, max_size=3), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_every_value_is_on_the_line_where_it_stands(document: list[dict[str, int]]) -> None:
    lines = json.dumps(document, indent=1).split("\n")
    node, _ = read("\n".join(lines))
    assert node is not None and isinstance(node.value, list)
    for item in node.value:
        assert isinstance(item.value, dict) and lines[item.line - 1].strip() == "{"
        for key, value in item.value.items():
            assert lines[value.line - 1].strip().rstrip(",") == f"{json.dumps(key)}: {value.value}"


def test_comments_and_commas_and_repeated_keys_are_told_and_read_over() -> None:
    text = '{ // one\n "a": 1, # two\n /* three\n */ "b": [1, 2,],\n "a": "// no comment",\n}'
    node, slips = read(text)
    assert node is not None and plain(node) == {"a": "// no comment", "b": [1, 2]}
    assert [(slip.what, slip.line) for slip in slips] == [
        ("a comment, which JSON has not", 1), ("a comment, which JSON has not", 2), ("a comment, which JSON has not", 3),
        ("a comma before ']'", 4), ("the key 'a' a second time in one object", 5), ("a comma before '}'", 5),
    ]  # fmt: skip


@given(st.text(alphabet='{}[]",:/*#1eE-.tn \n\\', max_size=40))
@settings(max_examples=200, deadline=None)
def test_what_is_no_json_is_never_taken_for_json_and_never_breaks_the_reader(text: str) -> None:
    node, slips = read(text)
    try:
        document = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    except ValueError:
        assert slips
        return
    assert node is not None and plain(node) == document
    assert all(slip.what.startswith("the key") for slip in slips)


@pytest.mark.parametrize("text", ["[" * (MAX_DEPTH + 2), '{"a":' * 100, "NaN", "-Infinity", "9" * 5000, '"\n"', "{} {}", "\ufeff{}"])
def test_hostile_documents_are_refused_with_a_line(text: str) -> None:
    _, slips = read(text)
    assert [slip.line for slip in slips] == [1]


def checked(tmp_path: Path, table: Table) -> tuple[list[str], tuple[Finding, ...]]:
    """The lines of a table's file, and what is found in it."""
    text = json.dumps(table, indent=1)
    file = tmp_path / "rank_table.json"
    file.write_text(text, encoding="utf-8")
    return text.split("\n"), check_file(file).findings


def super_pod_table() -> Table:
    table = healthy_table() | {"version": "1.2"}
    for index, server in enumerate(table["server_list"]):
        for device in server["device"]:
            device["super_device_id"] = str(37748736 + 262144 * index + int(device["device_id"]))
    table["super_pod_list"] = [{"super_pod_id": "0", "server_list": [{"server_id": entry["server_id"]} for entry in table["server_list"]]}]
    return table


def device(table: Table, server: int, number: int) -> dict[str, str]:
    entry: dict[str, str] = table["server_list"][server]["device"][number]
    return entry


def put(place: Callable[[Table], dict[str, Any]], key: str, value: object) -> Callable[[Table], object]:
    return lambda table: place(table).pop(key) if value is None else place(table).update({key: value})


def root(table: Table) -> Table:
    return table


def swap_ranks(first: tuple[int, int], second: tuple[int, int]) -> Callable[[Table], object]:
    def swap(table: Table) -> None:
        a, b = device(table, *first), device(table, *second)
        a["rank_id"], b["rank_id"] = b["rank_id"], a["rank_id"]

    return swap


def unequal(table: Table) -> None:
    table["server_list"][1]["device"].pop()


Mistake = tuple[Callable[[Table], object], str, str, str]
MISTAKES: list[Mistake] = [  # the change, the rule that sees it, its severity, what stands on the line
    (put(root, "status", "initializing"), "status", "error", "status"),
    (put(root, "status", None), "missing", "error", "{"),
    (put(root, "version", "1.1"), "version", "error", "version"),
    (put(root, "server_count", "3"), "server-count", "error", "server_count"),
    (put(root, "server_count", 2), "type", "error", "server_count"),
    (put(root, "server_count", "two"), "number", "error", "server_count"),
    (put(root, "server_list", {}), "type", "error", "server_list"),
    (put(root, "super_pod_list", []), "version", "warning", "super_pod_list"),
    (put(lambda table: table["server_list"][1], "server_id", "10.0.0.1"), "server-id", "error", '"10.0.0.1"'),
    (put(lambda table: table["server_list"][1], "server_id", "node_1"), "server-id", "warning", "node_1"),
    (put(lambda table: table["server_list"][1], "server_id", "2" * 64), "server-id", "error", "2222"),
    (put(lambda table: table["server_list"][1], "host_ip", "10.0.0"), "address", "error", "host_ip"),
    (put(lambda table: table["server_list"][1], "device", []), "type", "error", "device"),
    (put(lambda table: device(table, 1, 2), "device_id", "1"), "device-id", "error", "device_id"),
    (put(lambda table: device(table, 1, 2), "device_id", "16"), "number", "error", "device_id"),
    (put(lambda table: device(table, 1, 2), "device_id", None), "missing", "error", "{"),
    (put(lambda table: device(table, 1, 2), "device_ip", "192.168.1.100"), "device-ip", "error", "192.168.1.100"),
    (put(lambda table: device(table, 1, 2), "device_ip", "192.168.1"), "address", "error", "192.168.1"),
    (put(lambda table: device(table, 1, 2), "device_ip", None), "device-ip", "error", "{"),
    (put(lambda table: device(table, 1, 2), "device_ip", "fd00::1"), "device-ip", "error", "{"),
    (put(lambda table: device(table, 1, 2), "device_port", "65536"), "number", "error", "device_port"),
    (put(lambda table: device(table, 1, 3), "rank_id", "8"), "rank-id", "error", "rank_id"),
    (put(lambda table: device(table, 1, 3), "rank_id", "6"), "rank-id", "error", "rank_id"),
    (put(lambda table: device(table, 1, 3), "rank_id", "-1"), "number", "error", "rank_id"),
    (swap_ranks((1, 1), (1, 2)), "device-order", "warning", "server_id"),
    (unequal, "device-count", "warning", "server_id"),
    (lambda table: table["server_list"][0].update(server_id="9.0.0.1"), "server-order", "warning", "server_id"),
    (put(lambda table: device(table, 1, 2), "device_ip", "fe80::1%eth0"), "address", "error", "fe80"),
]
SUPER_POD_MISTAKES: list[Mistake] = [
    (put(lambda table: device(table, 1, 2), "super_device_id", None), "missing", "error", "{"),
    (put(lambda table: device(table, 1, 2), "super_device_id", "37748736"), "super-pod", "error", "37748736"),
    (put(root, "super_pod_list", None), "missing", "error", "{"),
    (put(lambda table: table["super_pod_list"][0], "super_pod_id", ""), "super-pod", "error", "super_pod_id"),
    (lambda table: table["super_pod_list"][0]["server_list"].append({"server_id": "10.0.0.1"}), "super-pod", "error", "10.0.0.1"),
    (lambda table: table["super_pod_list"][0]["server_list"].append({"server_id": "10.0.0.3"}), "super-pod", "error", "10.0.0.3"),
    (lambda table: table["super_pod_list"][0]["server_list"].pop(), "super-pod", "error", "server_id"),
]


@pytest.mark.parametrize("table", [healthy_table(), super_pod_table()], ids=["1.0", "1.2"])
def test_a_table_as_the_guides_show_it_gives_no_finding(table: Table, tmp_path: Path) -> None:
    assert checked(tmp_path, table)[1] == ()


@pytest.mark.parametrize(
    ("healthy", "mistake"),
    [*((healthy_table, mistake) for mistake in MISTAKES), *((super_pod_table, mistake) for mistake in SUPER_POD_MISTAKES)],
)
def test_one_mistake_gives_one_kind_of_finding_on_its_line(healthy: Callable[[], Table], mistake: Mistake, tmp_path: Path) -> None:
    change, rule, severity, on_line = mistake
    table = healthy()
    change(table)
    lines, findings = checked(tmp_path, table)
    assert {(finding.rule, finding.severity) for finding in findings} == {(f"rank-table-{rule}", severity)}
    assert on_line in lines[int(findings[0].where.rpartition(":")[2]) - 1]
    assert findings[0].wanted and findings[0].why


def test_interleaved_ranks_are_an_error_on_each_server(tmp_path: Path) -> None:
    table = healthy_table()
    swap_ranks((0, 3), (1, 0))(table)
    _, findings = checked(tmp_path, table)
    assert [finding.rule for finding in findings if finding.severity == "error"] == ["rank-table-server-order"] * 2


def test_every_mistake_of_a_file_is_told_in_one_pass(tmp_path: Path) -> None:
    table = healthy_table()
    for change, _, _, _ in (MISTAKES[0], MISTAKES[3], MISTAKES[13], MISTAKES[20], MISTAKES[22]):
        change(table)
    file = tmp_path / "rank_table.json"
    file.write_text(json.dumps(table, indent=1).replace('"1.0",', '"1.0", // the version'), encoding="utf-8")
    ran = ms_convert("rank-table", "check", file, "--json")
    assert ran.code == 1
    rules = {finding["rule"].removeprefix("rank-table-") for finding in ran.facts["findings"]}
    assert rules == {"json", "status", "server-count", "device-id", "number", "rank-id"}
    numbers = [int(finding["where"].rpartition(":")[2]) for finding in ran.facts["findings"]]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"[1]", b'{"a": ', b"null", b'{"server_list": [[]]}', b'{"server_list": [{"device": [3]}]}']
)
def test_a_file_that_is_no_table_gives_findings_and_no_defect(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_bytes(content)
    ran = ms_convert("rank-table", "check", file)
    assert ran.code == 1 and re.search(r"error  t\.json:\d+: ", ran.out)


def test_hccl_reads_files_called_json_only(tmp_path: Path) -> None:
    file = tmp_path / "hccl.txt"
    file.write_text(json.dumps(healthy_table()), encoding="utf-8")
    assert [finding.rule for finding in check_file(file).findings] == ["rank-table-file-name"]
    assert "HCCL reads files called *.json only" in refused(
        "rank-table", "make", "--servers", "10.0.0.1:1", "--device-ips", "10.0.0.1=1.2.3.4", "-o", tmp_path / "x.txt"
    )
    assert "cannot be read" in refused("rank-table", "check", tmp_path / "absent.json")


SERVERS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=4, unique_by=lambda server: server[0]
)


@given(servers=SERVERS, super_pods=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_made_table_is_one_that_check_finds_nothing_in_and_that_numbers_the_ranks_from_0(
    servers: list[tuple[int, int, int]], super_pods: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("table") / "rank_table.json"
    hosts = {f"10.0.0.{host}": range(first, first + count) for host, first, count in servers}
    options: list[str] = ["--servers", ",".join(f"{host}:{numbers[0]}-{numbers[-1]}" for host, numbers in hosts.items())]
    for host, numbers in hosts.items():
        options += ["--device-ips", f"{host}={','.join(device_ip(host, number) for number in numbers)}"]
        if super_pods:
            options += ["--super-device-ids", f"{host}={','.join(str(int(host[7:]) * 1000 + number) for number in numbers)}"]
    done("rank-table", "make", *options, "-o", file, *(["--version", "1.2"] if super_pods else []))
    assert {finding.rule for finding in check_file(file).findings} <= {"rank-table-device-count"}
    entries = json.loads(file.read_text(encoding="utf-8"))["server_list"]
    rows = [(entry["server_id"], int(row["device_id"]), row["device_ip"], row["rank_id"]) for entry in entries for row in entry["device"]]
    wanted = [(host, number) for host in sorted(hosts) for number in hosts[host]]
    assert rows == [(host, number, device_ip(host, number), str(rank)) for rank, (host, number) in enumerate(wanted)]


def test_addresses_come_from_a_copy_of_hccn_conf_or_from_what_hccn_tool_printed(tmp_path: Path) -> None:
    conf, printed = tmp_path / "hccn.conf", tmp_path / "printed.txt"
    conf.write_text("address_0=192.168.1.1\nnetmask_0=255.255.255.0\ngateway_0=192.168.1.254\naddress_1=192.168.1.2\n", encoding="utf-8")
    printed.write_text("ipaddr:192.168.2.1\nnetmask:255.255.255.0\nipaddr:192.168.2.2\nnetmask:255.255.255.0\n", encoding="utf-8")
    sources = ["--device-ips", f"10.0.0.1={conf}", "--device-ips", f"10.0.0.2={printed}"]
    ran = done("rank-table", "make", "--servers", "10.0.0.1:2,10.0.0.2:2", *sources)
    table = json.loads(ran.out)
    assert [row["device_ip"] for entry in table["server_list"] for row in entry["device"]] == [
        "192.168.1.1", "192.168.1.2", "192.168.2.1", "192.168.2.2",
    ]  # fmt: skip


def test_what_is_not_known_is_told_for_all_servers_with_the_command_that_asks_for_it() -> None:
    message = refused("rank-table", "make", "--servers", "10.0.0.1:2,10.0.0.2:2", "--version", "1.2", "--device-ips", "10.0.0.3=1.1.1.1")
    assert "10.0.0.3" in message and "hccn_tool -i DEVICE_ID -ip -g" in message and "npu-smi info -t spod-info" in message
    assert "--device-ips 10.0.0.1=..." in message and "--device-ips 10.0.0.2=..." in message


@pytest.mark.parametrize(
    "servers", ["", "10.0.0.1", "node1:8", "10.0.0.1:0", "10.0.0.1:17", "10.0.0.1:7-3", "10.0.0.1:²", "1.1.1.1:8,1.1.1.1:8"]
)
def test_servers_that_are_none_are_refused(servers: str) -> None:
    assert "--servers" in refused("rank-table", "make", "--servers", servers)


def test_two_devices_with_one_address_are_refused() -> None:
    message = refused("rank-table", "make", "--servers", "10.0.0.1:2", "--device-ips", "10.0.0.1=192.168.1.1,192.168.1.1")
    assert "192.168.1.1 is also the address of 10.0.0.1 device 0" in message


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "rank_table.json"
    file.write_text("mine", encoding="utf-8")
    arguments = ("rank-table", "make", "--servers", "10.0.0.1:1", "--device-ips", "10.0.0.1=192.168.1.1", "-o", file)
    assert "the file exists" in refused(*arguments)
    assert file.read_text(encoding="utf-8") == "mine"
    done(*arguments, "--overwrite")
    assert check_file(file).ranks == 1


def test_the_msrun_lines_are_ones_that_msrun_understands_and_start_the_ranks_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspore.parallel.cluster.run import get_args

    file = tmp_path / "rank_table.json"
    file.write_text(json.dumps(healthy_table()), encoding="utf-8")
    lines = done("rank-table", "check", file, "--json").facts["msrun"]
    assert [line["server"] for line in lines] == ["10.0.0.1", "10.0.0.2"]
    for node, line in enumerate(lines):
        monkeypatch.setattr("sys.argv", shlex.split(line["command"]))
        args = get_args()
        assert (args.worker_num, args.local_worker_num, args.node_rank, args.master_addr) == (8, 4, node, "10.0.0.1")
        assert (args.master_port, args.cluster_time_out, args.join, args.task_script) == (8118, 600, True, "train.py")


def test_a_server_that_lends_some_of_its_devices_shows_them_to_msrun() -> None:
    ran = done("rank-table", "make", "--servers", "10.0.0.1:4-7", "--device-ips", "10.0.0.1=1.1.1.4,1.1.1.5,1.1.1.6,1.1.1.7")
    assert "  on 10.0.0.1: ASCEND_RT_VISIBLE_DEVICES=4,5,6,7 msrun --worker_num=4 --local_worker_num=4 " in ran.err


def test_what_a_strangers_table_says_is_one_word_of_the_shell(tmp_path: Path) -> None:
    for hostile in ("$(touch pwned)", "a;reboot", "fe80::1%;reboot", "'`x`", "node 1"):
        table = healthy_table()
        table["server_list"][0]["server_id"] = hostile
        file = tmp_path / "rank_table.json"
        file.write_text(json.dumps(table), encoding="utf-8")
        lines = ms_convert("rank-table", "check", file, "--json").facts["msrun"]
        assert lines
        for line in lines:
            assert all(character.isprintable() for character in line["command"])
            (master,) = {word for word in shlex.split(line["command"]) if word.startswith("--master_addr=")}
            assert master.removeprefix("--master_addr=") in {entry["server"] for entry in lines}


def test_a_file_of_comments_is_given_up_and_a_huge_one_is_not_read(tmp_path: Path) -> None:
    document, slips = read("#\n" * 5000 + "{}")
    assert document is None and len(slips) == MAX_SLIPS + 1 and slips[-1].line == MAX_SLIPS + 1
    file = tmp_path / "rank_table.json"
    with open(file, "wb") as large:
        large.truncate(MAX_BYTES + 1)
    with pytest.raises(Refused, match="8 MiB"):
        check_file(file)


def test_names_and_ranks_of_any_length_are_told_in_a_line(tmp_path: Path) -> None:
    table = healthy_table()
    for name, server in zip("zy", table["server_list"], strict=True):
        server["server_id"] = name * 5000
        server["device"] = [
            {"device_id": str(15 - n % 16), "rank_id": str(n + 1000 * (name == "y")), "device_ip": f"10.0.{ord(name)}.{n % 250}"}
            for n in range(1000)
        ]
    table["server_list"][0]["device"][0]["rank_id"], table["server_list"][1]["device"][0]["rank_id"] = "1000", "0"
    _, findings = checked(tmp_path, table)
    assert {"rank-table-server-order", "rank-table-device-order"} <= {finding.rule for finding in findings}
    assert max(len(f"{finding.seen}{finding.wanted}") for finding in findings) < 1000


def test_an_address_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    table = healthy_table()
    for number, server in enumerate(table["server_list"]):
        for entry in server["device"]:
            entry["device_ip"] = f"fd00::{number}:{entry['device_id']}"
    assert checked(tmp_path, table)[1] == ()
    device(table, 1, 2)["device_ip"] = "FD00:0:0:0:0:0:0001:1"
    assert [finding.rule for finding in checked(tmp_path, table)[1]] == ["rank-table-device-ip"]
