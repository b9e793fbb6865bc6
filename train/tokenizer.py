"""The model's tokenizer: text to ids, with nothing added and nothing cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from converter.hf_folder import check_inside, read_json_object
from converter.manifest import MANIFEST, SIDE_FOLDER
from mappings.errors import refuse

MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class TextTokenizer:
    """`encode` gives the ids of each text, special tokens in the text included as Transformers does, none added.

    `vocabulary` is the largest id plus one; a special id that it does not have is None. `digest` is the xxh3_128 of the tokenizer's files,
    `vocabulary_digest` of its tokens and their ids, which stay when a release of Transformers writes the files differently.
    """

    name: str
    encode: Callable[[Sequence[str]], list[list[int]]]
    vocabulary: int
    eos_id: int | None
    pad_id: int | None
    digest: str
    vocabulary_digest: str


def load_tokenizer(folder: Path, eos_token: str | None = None, pad_token: str | None = None) -> TextTokenizer:
    """The tokenizer of a Hugging Face folder or of a rank tree: tokenizer.json, or what Transformers makes of older files.

    `eos_token` and `pad_token` take the place of those that the folder names. Raises Refused when there is no tokenizer or no such token.
    """
    folder = folder / SIDE_FOLDER if (folder / MANIFEST).is_file() else folder
    if not folder.is_dir():
        raise refuse("no such folder", str(folder), "give the model's folder, or one with its tokenizer.json")
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder, eos_token, pad_token)
    return _from_transformers(folder, eos_token, pad_token)


def _from_tokenizer_json(folder: Path, eos_token: str | None, pad_token: str | None) -> TextTokenizer:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise refuse("the tokenizers library is needed to read tokenizer.json", str(folder), "pip install tokenizers") from error
    path = folder / "tokenizer.json"
    check_inside(path, folder)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise refuse(f"larger than {MAX_JSON_BYTES >> 20} MiB", str(path), "this is no tokenizer")
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise refuse(f"not a tokenizer: {str(error)[:200]}", str(path), "download it again") from error
    tokenizer.no_truncation()  # a limit and padding are stored in the file, for sentence encoders for example
    tokenizer.no_padding()
    named, vocabulary = _named_tokens(folder), tokenizer.get_vocab(with_added_tokens=True)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return TextTokenizer(
        name=folder.name,
        encode=encode,
        vocabulary=max(vocabulary.values(), default=-1) + 1,
        eos_id=_token_id(tokenizer.token_to_id, eos_token or named.get("eos_token"), folder),
        pad_id=_token_id(tokenizer.token_to_id, pad_token or named.get("pad_token"), folder),
        digest=xxhash.xxh3_128_hexdigest(content),
        vocabulary_digest=_vocabulary_digest(vocabulary),
    )


def _named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the side files name, tokenizer_config.json before special_tokens_map.json."""
    named: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            data = read_json_object(folder / name, MAX_JSON_BYTES, folder)
            for key in ("eos_token", "pad_token"):
                token = data.get(key)
                text = token.get("content") if isinstance(token, Mapping) else token
                if isinstance(text, str):
                    named.setdefault(key, text)
    return named


def _token_id(find: Callable[[str], int | None], token: str | None, folder: Path) -> int | None:
    if token is None:
        return None
    found = find(token)
    if found is None:
        raise refuse(f"has no token {token!r}", str(folder), "give one that it has with --eos-token or --pad-token")
    return found


def _from_transformers(folder: Path, eos_token: str | None, pad_token: str | None) -> TextTokenizer:
    mend = "give the model's folder, or one with its tokenizer.json"
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise refuse("there is no tokenizer.json, and Transformers is needed to read older files", str(folder), mend) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise refuse(f"Transformers finds no tokenizer: {str(error).strip().splitlines()[0][:200]}", str(folder), mend) from error
    vocabulary = tokenizer.get_vocab()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(
            list(texts), add_special_tokens=False, truncation=False, padding=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids

    return TextTokenizer(
        name=folder.name,
        encode=encode,
        vocabulary=max(vocabulary.values(), default=-1) + 1,
        eos_id=_token_id(vocabulary.get, eos_token or tokenizer.eos_token, folder),
        pad_id=_token_id(vocabulary.get, pad_token or tokenizer.pad_token, folder),
        digest=_digest(folder, sorted(set(tokenizer.vocab_files_names.values()))),
        vocabulary_digest=_vocabulary_digest(vocabulary),
    )


def _digest(folder: Path, names: Sequence[str]) -> str:
    state = xxhash.xxh3_128()
    for name in names:
        if (folder / name).is_file():
            state.update(json.dumps(name).encode())
            state.update((folder / name).read_bytes())
    return state.hexdigest()


def _vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    pairs = sorted((number, token) for token, number in vocabulary.items())
    return xxhash.xxh3_128_hexdigest(json.dumps(pairs).encode())
