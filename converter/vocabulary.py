"""The three sizes of a vocabulary that can disagree: rows of the embedding, config.json, and the tokenizer."""

from __future__ import annotations

from typing import Any

from converter.hf_folder import read_json_object
from converter.source_model import SourceModel
from mappings.config_values import shown
from mappings.errors import Refused

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 128 << 20


def vocabulary_sizes(source: SourceModel) -> dict[str, Any]:
    """Rows of the embedding (what counts), `vocab_size` of config.json, and one more than the tokenizer's highest id (None: not known)."""
    return {"rows": source.config.vocab, "config": source.folder.config.get("vocab_size"), "tokenizer": _tokenizer_size(source)}


def vocabulary_notes(source: SourceModel) -> list[str]:
    """What a person should see where the three do not agree."""
    sizes = vocabulary_sizes(source)
    if sizes["tokenizer"] is None or sizes["tokenizer"] == sizes["rows"]:
        return []
    told = f"the embedding has {sizes['rows']} rows, config.json says {shown(sizes['config'])}, the tokenizer uses {sizes['tokenizer']} ids"
    return [told + ("" if sizes["tokenizer"] < sizes["rows"] else ": ids past the rows have no embedding")]


def _tokenizer_size(source: SourceModel) -> int | None:
    """One more than the highest id in tokenizer.json; None without one, or where it is of a form that this does not read."""
    path = source.folder.path / TOKENIZER
    if not path.is_file():
        return None
    try:
        data = read_json_object(path, MAX_TOKENIZER_BYTES, source.folder.path)
    except Refused:
        return None
    model, added = data.get("model"), data.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary)) if isinstance(vocabulary, list) else []
    extra = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    numbers = [number for number in (*ids, *extra) if isinstance(number, int)]
    return max(numbers) + 1 if numbers else None
