"""Runs MindSpore's parallel compiler on a machine that has neither Ascend nor GPU.

MindSpore refuses to compile a parallel graph for the CPU ("Invalid backend: CPU"), but its wheel ships a GPU plugin. Here *stub* CUDA and
NCCL libraries are built with gcc (every call answers 0 and computes nothing) and a program is started under msrun with the loader pointed
at them. The parallel front end then runs in full: shard statements are checked and MindSpore writes its own strategy files. Nothing can be
executed. Needs gcc and nm.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

LIBRARY_OF = {
    "cublas": "libcublas.so.11", "curand": "libcurand.so.10", "cudnn": "libcudnn.so.8", "cufft": "libcufft.so.10",
    "cusparse": "libcusparse.so.11", "cusolver": "libcusolver.so.11", "nvrtc": "libnvrtc.so.11.2", "cuda": "libcudart.so.11.0",
}  # fmt: skip
"""By the prefix of a symbol; "cuda" comes last. Every other cu... symbol is the driver's."""
DRIVER = "libcuda.so.1"
PLUGINS = ("plugin/libmindspore_gpu.so.11.6", "plugin/gpu/libcuda_ops.so.11", "plugin/gpu11.6/libnvidia_collective.so")
CUDA_NAME = re.compile(r"(__)?(cu[A-Z]|cuda|cublas|cudnn|curand|cusolver|cufft|cusparse|nvrtc)")
MSRUN = "from mindspore.parallel.cluster.run import main; main()"
INCLUDES = "#include <stdlib.h>\n#include <string.h>\n"
ANSWERS_ZERO = "long {name}(void) {{ return 0; }}"
NEW_HANDLE = "int {name}(void **handle) {{ *handle = calloc(1, 64); return 0; }}"
ERROR_TEXT = 'const char *{name}(int code) {{ return "stub"; }}'
# cudaDeviceProp of CUDA 11: name, memory (288), shared memory of a block (296), block limits (312-343), capability 7.0 (360), SMs (388)
DEVICE_PROPERTIES = """int cudaGetDeviceProperties(char *p, int d) {
    memset(p, 0, 700); strcpy(p, "stub"); *(size_t *)(p + 288) = (size_t)16 << 30; *(size_t *)(p + 296) = 49152;
    for (int i = 312; i < 344; i += 4) *(int *)(p + i) = 1024;
    *(int *)(p + 360) = 7; *(int *)(p + 388) = 80; return 0; }"""
BODIES = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 8; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
    "cudaMalloc": "int cudaMalloc(void **p, size_t n) { *p = malloc(n > 1 << 20 ? 1 << 20 : n); return 0; }",
    "cudaMallocHost": "int cudaMallocHost(void **p, size_t n) { *p = malloc(n); return 0; }",
    "cudaHostAlloc": "int cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return 0; }",
    "cudaMemGetInfo": "int cudaMemGetInfo(size_t *a, size_t *b) { *a = *b = (size_t)16 << 30; return 0; }",
    "cudaStreamCreateWithFlags": "int cudaStreamCreateWithFlags(void **s, unsigned f) { *s = malloc(8); return 0; }",
    "cudaStreamCreateWithPriority": "int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { *s = malloc(8); return 0; }",
    "cudaEventCreateWithFlags": "int cudaEventCreateWithFlags(void **s, unsigned f) { *s = malloc(8); return 0; }",
    "cudnnGetVersion": "size_t cudnnGetVersion(void) { return 8500; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { *v = 11060; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *v) { *v = 11060; return 0; }",
    "cudaDeviceGetAttribute": "int cudaDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 7 : 1; return 0; }",
    "cuDeviceGetAttribute": "int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 7 : 0; return 0; }",
    "cudaDeviceGetPCIBusId": 'int cudaDeviceGetPCIBusId(char *b, int n, int d) { strncpy(b, "0000:00:00.0", n); return 0; }',
    "cudaGetDeviceProperties": DEVICE_PROPERTIES,
    "__cudaRegisterFatBinary": "static void *fat_binary[4]; void **__cudaRegisterFatBinary(void *p) { return fat_binary; }",
}
for _name in ("cudaStreamCreate", "cudaEventCreate", "cublasCreate_v2", "cusolverDnCreate", "cusparseCreate", "curandCreateGenerator"):
    BODIES[_name] = NEW_HANDLE.format(name=_name)
for _name in ("cudaGetErrorString", "cudaGetErrorName", "cudnnGetErrorString", "cublasGetStatusString", "nvrtcGetErrorString"):
    BODIES[_name] = ERROR_TEXT.format(name=_name)
NCCL = [
    "int ncclGetUniqueId(char *id) { memset(id, 7, 128); return 0; }",
    "int ncclCommInitRank(void **comm) { *comm = malloc(64); return 0; }",
    *(
        ANSWERS_ZERO.format(name="nccl" + name)
        for name in ("AllGather", "AllReduce", "Broadcast", "CommAbort", "GroupEnd", "GroupStart", "Recv", "ReduceScatter", "Send")
    ),
]


def compile_network(network: str, source: str, folder: Path, ranks: int = 2, port: int = 8391) -> Path:
    """Compiles `networks.NETWORKS[network]` at tp `ranks`; returns the strategy file of rank 0 in `folder`.

    Raises RuntimeError, with the end of rank 0's log, when the compiler wrote none.
    """
    program = Path(__file__).parent / "rank_program.py"
    logs = folder / "logs"
    msrun = [sys.executable, "-c", MSRUN, f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}"]
    command = [*msrun, f"--log_dir={logs}", "--join=True", str(program), network, source, str(folder)]
    with tempfile.TemporaryDirectory() as stubs:
        environment = _environment(Path(stubs))
        code = subprocess.run(command, env=environment, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    written = folder / "strategy_0.ckpt"
    if code or not written.is_file():
        log = logs / "worker_0.log"
        end = log.read_text(errors="replace")[-3000:] if log.is_file() else "no log"
        raise RuntimeError(f"{network} was not compiled (msrun answered {code}):\n{end}")
    return written


def _environment(stubs: Path) -> dict[str, str]:
    """The environment in which MindSpore takes the libraries that are made in `stubs` for CUDA and NCCL."""
    found = importlib.util.find_spec("mindspore")
    if found is None or found.origin is None:
        raise RuntimeError("MindSpore is not installed")
    lib = Path(found.origin).parent / "lib"
    _make_stubs(lib, stubs)
    repository = Path(__file__).resolve().parents[2]
    return dict(
        os.environ,
        CUDA_HOME=str(stubs / "home"),
        LD_PRELOAD=str(stubs / "libnccl.so.2"),
        LD_LIBRARY_PATH=":".join(map(str, (stubs, lib / "plugin/gpu11.6", lib, lib / "plugin/gpu"))),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        PYTHONPATH=str(repository),
    )


def _make_stubs(lib: Path, out: Path) -> None:
    """Writes the stub libraries, and an nvcc that answers the version question, into `out`."""
    for library, symbols in _undefined_symbols(lib).items():
        bodies = []
        by_version: dict[str, list[str]] = defaultdict(list)
        for name, version in sorted(symbols.items()):
            default = NEW_HANDLE if name.startswith("cudnnCreate") else ANSWERS_ZERO
            bodies.append(BODIES.get(name, default.format(name=name)))
            if version:
                by_version[version].append(name)
        script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())
        _build(bodies, out / library, script)
    _build(NCCL, out / "libnccl.so.2", "")
    nvcc = out / "home" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.124"\n')
    nvcc.chmod(0o755)


def _undefined_symbols(lib: Path) -> dict[str, dict[str, str]]:
    """Library -> {symbol: version tag} of every CUDA symbol that MindSpore's GPU plugin asks for."""
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    for plugin in PLUGINS:
        command = ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(lib / plugin)]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if CUDA_NAME.match(name):
                library = next((file for prefix, file in LIBRARY_OF.items() if name.lstrip("_").startswith(prefix)), DRIVER)
                wanted[library][name] = version
    return wanted


def _build(bodies: list[str], target: Path, version_script: str) -> None:
    source = target.with_suffix(".c")
    source.write_text(INCLUDES + "\n".join(bodies) + "\n")
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(target), str(source), f"-Wl,-soname,{target.name}"]
    if version_script:
        script = target.with_suffix(".map")
        script.write_text(version_script)
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
