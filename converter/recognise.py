"""What a file is, from its first bytes: so that a wrong one is named instead of misread."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from converter.protobuf_wire import LENGTH, BytesSource, WireError, fields, read_field
from converter.untrusted import opened
from mappings.errors import Refused, refuse

MAX_SAFETENSORS_HEADER = 100_000_000  # bytes; `MAX_HEADER_SIZE` in safetensors/src/tensor.rs
_OPENING = 4096  # bytes that are looked at

_SAVE_AGAIN = "load it where it came from and save it again as safetensors"
_DOWNLOAD = "download it again"


@dataclass(frozen=True, slots=True)
class FileKind:
    """How a kind of file is called in a message, and what to do with one that was not wanted."""

    phrase: str
    mend: str


KINDS = {
    "safetensors": FileKind("a safetensors file", "give it the ending .safetensors"),
    "safetensors_truncated": FileKind("a truncated safetensors file", _DOWNLOAD),
    "ckpt": FileKind("a MindSpore checkpoint", "give it the ending .ckpt"),
    "ckpt_truncated": FileKind("a truncated MindSpore checkpoint", "copy it again from where it was saved"),
    "ckpt_encrypted": FileKind(
        "an encrypted MindSpore checkpoint", "load it with mindspore.load_checkpoint(..., dec_key=...) and save it without a key"
    ),
    "strategy": FileKind(
        "a MindSpore strategy file (it tells how weights are cut and holds none)", "name the checkpoint that belongs to it"
    ),
    "torch_zip": FileKind("a PyTorch file (zip)", "give it the ending .bin"),
    "torch_legacy": FileKind(
        "a PyTorch file of the format before 1.6 (not a zip)",
        "open it with torch.load(..., weights_only=True) and save it again with safetensors.torch.save_file",
    ),
    "pickle": FileKind("a Python pickle", "a pickle is a program: do not open it unless you trust its author; ask for safetensors"),
    "zip": FileKind("a zip archive", "unpack it"),
    "archive": FileKind("a compressed archive", "unpack it"),
    "npz": FileKind("a numpy .npz archive", _SAVE_AGAIN),
    "npy": FileKind("a numpy .npy array", _SAVE_AGAIN),
    "gguf": FileKind("a GGUF file", "transformers reads it (gguf_file=...) and save_pretrained writes a folder that can be converted"),
    "hdf5": FileKind(
        "an HDF5 file (TensorFlow or Keras weights)", "transformers reads it (from_tf=True) and save_pretrained writes a folder"
    ),
    "lfs_pointer": FileKind(
        "a Git LFS pointer (three lines of text that stand for the file)", "fetch the file itself: `git lfs pull` in its folder"
    ),
    "html": FileKind("an HTML page (a login or error page in place of the download)", _DOWNLOAD + ", signed in if the model is gated"),
    "json": FileKind("a JSON text", _DOWNLOAD),
    "text": FileKind("a text", _DOWNLOAD),
    "zeros": FileKind("filled with zero bytes (a download that was never finished)", _DOWNLOAD),
    "empty": FileKind("an empty file", _DOWNLOAD),
    "unknown": FileKind("a file of an unknown kind", _DOWNLOAD),
}

_MAGIC = {
    b"GGUF": "gguf",
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"\x93NUMPY": "npy",
    b"version https://git-lfs.github.com/spec/": "lfs_pointer",
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e": "torch_legacy",  # `MAGIC_NUMBER` in torch/serialization.py, pickled
    b"\x80\x02": "pickle",
    b"\x80\x03": "pickle",
    b"\x80\x04": "pickle",
    b"\x80\x05": "pickle",
    b"\x1f\x8b": "archive",  # gzip
    b"\x28\xb5\x2f\xfd": "archive",  # zstd
    b"\xfd7zXZ\x00": "archive",
    b"BZh": "archive",
    b"7z\xbc\xaf\x27\x1c": "archive",
}


def recognise(path: Path) -> str:
    """The kind of the file: a key of `KINDS`. Reads at most 4 KiB. Raises Refused if there is no regular, readable file."""
    with opened(path) as (descriptor, size):
        return recognise_opening(os.pread(descriptor, _OPENING, 0), size)


def recognise_opening(opening: bytes, size: int) -> str:
    """The kind of a file of `size` bytes that begins with `opening` (its first 4 KiB, or all of it)."""
    if not size:
        return "empty"
    for look in (_safetensors, _magic, _zip, _ckpt, _strategy, _text):
        kind = look(opening, size)
        if kind:
            return kind
    return "unknown" if opening.strip(b"\0") else "zeros"


def not_a(wanted: str, path: Path, opening: bytes, size: int) -> Refused:
    """The refusal of a file that is not of kind `wanted` (a key of `KINDS`), saying what it is instead."""
    kind = recognise_opening(opening, size)
    expected = KINDS[wanted].phrase
    if kind in (wanted, "unknown"):
        return refuse(f"not {expected}, nor anything else that is known", str(path), _DOWNLOAD)
    return refuse(f"this is {KINDS[kind].phrase}, not {expected}", str(path), KINDS[kind].mend)


def _safetensors(opening: bytes, size: int) -> str:
    length = int.from_bytes(opening[:8], "little")
    if opening[8:9] != b"{" or length > MAX_SAFETENSORS_HEADER:
        return ""
    return "safetensors" if 8 + length <= size else "safetensors_truncated"


def _magic(opening: bytes, size: int) -> str:
    # MindSpore's block marks 0x7F3A5ED8 and up, one per cipher (`MAGIC_NUM` in mindspore/ccsrc/utils/crypto.cc)
    if opening[1:4] == b"\x5e\x3a\x7f" and 0xD8 <= opening[0] <= 0xDF:
        return "ckpt_encrypted"
    return next((kind for magic, kind in _MAGIC.items() if opening.startswith(magic)), "")


def _zip(opening: bytes, size: int) -> str:
    if opening[:4] != b"PK\x03\x04":
        return "archive" if opening[:2] == b"PK" else ""
    member = opening[30 : 30 + int.from_bytes(opening[26:28], "little")]  # of the first local header: APPNOTE.TXT 4.3.7
    if member.endswith(b".npy"):
        return "npz"
    # PyTorch writes "<archive>/data.pkl" first, TorchScript too; the other places of a zip are left to those who read it
    return "torch_zip" if member.split(b"/")[-1] in (b"data.pkl", b"constants.pkl", b"version", b"byteorder") else "zip"


def _protobuf(look: Callable[[BytesSource], str]) -> Callable[[bytes, int], str]:
    """A look at the first fields of a message; what is no message at all is simply another kind of file."""

    def recognised(opening: bytes, size: int) -> str:
        try:
            return look(BytesSource(opening, size))
        except WireError:
            return ""

    return recognised


@_protobuf
def _ckpt(source: BytesSource) -> str:
    value = read_field(source, 0, 2**63, beyond=True)
    if (value.number, value.wire) != (1, LENGTH):
        return ""
    tag = read_field(source, value.start, value.end)
    if (tag.number, tag.wire) != (1, LENGTH) or not source.read(tag.start, tag.end - tag.start).decode("utf-8", "replace").isprintable():
        return ""
    content = read_field(source, tag.end, value.end)
    if content.number not in (2, 3) or content.wire != LENGTH:
        return ""
    return "ckpt" if value.end <= source.size else "ckpt_truncated"


@_protobuf
def _strategy(source: BytesSource) -> str:
    numbers = [(field.number, field.wire) for _, field in zip(range(2), fields(source, 0, source.size), strict=False)]
    return "strategy" if numbers in ([(1, 0), (2, LENGTH)], [(1, 0), (3, LENGTH)]) else ""


def _text(opening: bytes, size: int) -> str:
    text = opening.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "html"
    if text[:1] in (b"{", b"[") and b"\0" not in opening:
        return "json"
    return "text" if not any(byte < 9 or 13 < byte < 32 for byte in opening) and opening.isascii() else ""
