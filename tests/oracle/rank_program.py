"""One rank of a compilation: `python rank_program.py NETWORK SOURCE FOLDER`, started by `parallel_compile`.

Compiles a network of MindFormers under semi_auto_parallel; MindSpore's compiler writes FOLDER/strategy_RANK.ckpt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Exits with 1 when the compiler wrote no strategy file."""
    import mindspore as ms
    from mindspore.common.api import _cell_graph_executor
    from mindspore.communication import get_group_size, get_rank, init

    from tests.oracle.networks import NETWORKS
    from tests.oracle.sources import SOURCES

    network, source, folder = sys.argv[1:]
    ms.set_context(mode=ms.GRAPH_MODE, device_target="GPU")
    init()
    written = Path(folder) / f"strategy_{get_rank()}.ckpt"
    every = {"save_file": str(written), "only_trainable_params": False}
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True, strategy_ckpt_config=every)
    config = SOURCES[source].config
    cell = NETWORKS[network](config, get_group_size())
    tokens = ms.Tensor(np.arange(32, dtype=np.int32).reshape(2, 16))
    try:
        _cell_graph_executor.compile(cell, tokens, phase="predict")
    except RuntimeError as stopped:
        # Behind the parallel front end, which has written its file by then, the stub device cannot go on.
        print("the compiler stopped:", stopped, flush=True)
    sys.exit(0 if written.is_file() else 1)


if __name__ == "__main__":
    main()
