"""What MindFormers 2.x itself writes as `metadata.json` for a few parameters of tp 2 x dp 2 x pp 2.

`python -m tests.oracle.generate_metadata_2_0`, where mindformers 2.0 or 2.1 is installed; both write the same. Fails when it is not what
`tests/data/mindformers2_metadata.json` stores; with a FILE it writes it there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.oracle.absent import stand_in_for

DP, TP, PP = 2, 2, 2
RANKS = DP * TP * PP
STORED = Path(__file__).parents[1] / "data" / "mindformers2_metadata.json"


def layouts(stage: int) -> dict[str, list[Any]]:
    """Name -> [Layout, dtype, whole shape] of a pipeline stage; the embedding is on both."""
    import mindspore as ms
    from mindspore.parallel import Layout

    ranks = list(range(stage * DP * TP, (stage + 1) * DP * TP))

    def cut(*axes: str, matrix: Sequence[int] = (DP, TP), names: Sequence[str] = ("dp", "tp")) -> Any:
        return Layout(tuple(matrix), tuple(names), ranks)(*axes)

    layer = f"decoder.layers.{stage}."
    return {
        f"{layer}self_attention.linear_qkv.weight": [cut("tp", "None"), ms.bfloat16, (24, 6)],
        f"{layer}mlp.linear_fc2.weight": [cut("None", "tp"), ms.bfloat16, (6, 10)],
        f"{layer}input_layernorm.weight": [cut("None"), ms.float32, (6,)],
        f"{layer}self_attention.k.bias": [cut("kv", matrix=(DP, 1, TP), names=("dp", "kv", "replica")), ms.float16, (4,)],
        "embedding.word_embeddings.weight": [cut("tp", "None"), ms.bfloat16, (128, 6)],
    }


def write(path: Path) -> None:
    """Let MindFormers write the file."""
    metadata: Any = import_module("mindformers.checkpoint.metadata")
    describe: Any = import_module("mindformers.checkpoint.sharded_tensor").get_sharded_tensor_from_strategy_metadata
    metadata.get_group_size = lambda: RANKS
    sharded = {rank: describe(layouts(rank // (DP * TP)), rank) for rank in range(RANKS)}
    names = {name for tensors in sharded.values() for name in tensors}
    files = metadata.get_total_params_file_mapping_info(sharded, None, names)
    metadata.save_metadata(sharded, files, str(path))


def main() -> None:
    """Write the file that is named, or compare with the stored one."""
    stand_in_for("hyper_parallel")
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / STORED.name
        write(path)
        if json.loads(path.read_text()) != json.loads(STORED.read_text()):
            raise SystemExit(f"MindFormers writes another metadata.json than {STORED} stores")
    print("== metadata.json of MindFormers 2.x: as stored")


if __name__ == "__main__":
    main()
