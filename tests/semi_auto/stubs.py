"""Stub CUDA and NCCL libraries, so that MindSpore's parallel compiler runs where there is neither Ascend nor GPU.

MindSpore refuses to compile a parallel graph for "CPU", but its wheel ships a GPU plugin too. Libraries of the names that the plugin
loads, in which every call returns 0 and computes nothing, let the parallel front end run in full: it checks strategies, puts in
communication operators, and writes its strategy files. Nothing can be executed. Needs gcc and nm. Written for MindSpore 2.10's CUDA 11.6
plugin.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

PLUGINS = ("plugin/libmindspore_gpu.so.11.6", "plugin/gpu/libcuda_ops.so.11", "plugin/gpu11.6/libnvidia_collective.so")
LIBRARIES = {
    "cublas": "libcublas.so.11", "curand": "libcurand.so.10", "cudnn": "libcudnn.so.8", "cusolver": "libcusolver.so.11",
    "cufft": "libcufft.so.10", "cusparse": "libcusparse.so.11", "nvrtc": "libnvrtc.so.11.2", "cuda": "libcudart.so.11.0",
}  # fmt: skip
"""Prefix of a symbol -> its library; any other `cu...` belongs to the driver."""
DRIVER = "libcuda.so.1"
NCCL = "libnccl.so.2"
NCCL_CALLS = (
    "AllGather", "AllReduce", "Broadcast", "CommAbort", "GroupEnd", "GroupStart", "Recv", "ReduceScatter", "Send",
)  # fmt: skip
HEADERS = "#include <stdlib.h>\n#include <string.h>\n"
DEFAULT = "long {0}(void) {{ return 0; }}"
HANDLE = "int {0}(void **handle) {{ *handle = calloc(1, 64); return 0; }}"
TEXT = 'const char *{0}(int code) {{ return "stub"; }}'
HANDLES = ("cudaStreamCreate", "cudaEventCreate", "cublasCreate_v2", "cusolverDnCreate", "cusparseCreate", "curandCreateGenerator")
TEXTS = ("cudaGetErrorString", "cudaGetErrorName", "cudnnGetErrorString", "cublasGetStatusString", "nvrtcGetErrorString")
# A device of compute capability 7.0 with 16 GiB. Offsets in cudaDeviceProp (CUDA 11): total memory 288, shared memory per block 296, block
# limits 312 to 343, capability 360, multiprocessors 388
PROPERTIES = """int cudaGetDeviceProperties(char *p, int device) {
    memset(p, 0, 700);
    strcpy(p, "stub");
    *(size_t *)(p + 288) = (size_t)16 << 30;
    *(size_t *)(p + 296) = 49152;
    for (int i = 312; i < 344; i += 4) *(int *)(p + i) = 1024;
    *(int *)(p + 360) = 7;
    *(int *)(p + 388) = 80;
    return 0;
}"""
ANSWERS = {
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
    "cudaGetDeviceProperties": PROPERTIES,
    "__cudaRegisterFatBinary": "static void *binary[4]; void **__cudaRegisterFatBinary(void *p) { return binary; }",
    **{name: HANDLE.format(name) for name in HANDLES},
    **{name: TEXT.format(name) for name in TEXTS},
}
"""The calls from which the plugin wants more than a 0, in C."""
_SYMBOL = re.compile(r"(?:__)?(?:cu[A-Z]|" + "|".join(LIBRARIES) + ")")


def build_stubs(mindspore: Path, folder: Path) -> dict[str, str]:
    """Build the stubs for the MindSpore package at this path. -> the environment variables with which a process uses them.

    Raises:
        subprocess.CalledProcessError: gcc or nm failed.
    """
    for library, symbols in _wanted(mindspore / "lib").items():
        _build(folder / library, _source(symbols), _version_script(symbols))
    _build(folder / NCCL, _nccl_source(), "")
    compiler = folder / "cuda" / "bin" / "nvcc"  # MindSpore asks it for its version
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.124"\n')
    compiler.chmod(0o755)
    folders = (folder, mindspore / "lib/plugin/gpu11.6", mindspore / "lib", mindspore / "lib/plugin/gpu")
    return {
        "CUDA_HOME": str(folder / "cuda"),
        "LD_PRELOAD": str(folder / NCCL),
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
    }


def _wanted(lib: Path) -> dict[str, dict[str, str]]:
    """Library -> symbol -> version tag ("" for none), of all that the plugins ask for."""
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    for plugin in PLUGINS:
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(lib / plugin)], capture_output=True, text=True, check=True
        )
        for line in listed.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _SYMBOL.match(name):
                bare = name.lstrip("_")
                library = next((library for prefix, library in LIBRARIES.items() if bare.startswith(prefix)), DRIVER)
                wanted[library][name] = version.lstrip("@")
    return wanted


def _source(symbols: Mapping[str, str]) -> str:
    def body(name: str) -> str:
        return ANSWERS.get(name) or (HANDLE if name.startswith("cudnnCreate") else DEFAULT).format(name)

    return HEADERS + "\n".join(body(name) for name in sorted(symbols))


def _nccl_source() -> str:
    calls = "\n".join(DEFAULT.format(f"nccl{name}") for name in NCCL_CALLS)
    return f"""{HEADERS}
int ncclGetUniqueId(char *id) {{ memset(id, 7, 128); return 0; }}
int ncclCommInitRank(void **comm) {{ *comm = malloc(64); return 0; }}
{calls}"""


def _version_script(symbols: Mapping[str, str]) -> str:
    by_version: dict[str, list[str]] = defaultdict(list)
    for name, version in symbols.items():
        if version:
            by_version[version].append(name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())


def _build(target: Path, source: str, version_script: str) -> None:
    code, script = target.with_suffix(".c"), target.with_suffix(".map")
    code.write_text(source)
    command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(target), str(code), f"-Wl,-soname,{target.name}"]
    if version_script:
        script.write_text(version_script)
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True, capture_output=True)
