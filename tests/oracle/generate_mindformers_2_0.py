"""What MindFormers 2.0 makes of Qwen3 when it loads a Hugging Face folder: `python -m tests.oracle.generate_mindformers_2_0`.

At tp 1 this is `load_hf_checkpoint` into the training network, whose parameters are then read. At tp 2 it is what `load_hf_checkpoint` does
on each rank: `ReshardLoader` cuts q, k, v, gate and up by the network's layouts, and the network's weight template fuses the slices.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.checkpoints import RANKS, record
from tests.oracle.goldens import Golden, Tensors
from tests.oracle.networks import qwen3_2_0, qwen3_config_2_0
from tests.oracle.parallel_compile import compile_network
from tests.oracle.sources import SOURCES

VERSION = "2.0.0"


def main() -> None:
    """Makes one golden output."""
    about = {
        "source": "qwen3",
        "mindformers": VERSION,
        "tp1": "load_hf_checkpoint of checkpoint/checkpoint.py into TrainingQwen3ForCausalLM",
        "tp2": "ReshardLoader and the network's WeightTemplate on each rank, with the layouts of MindSpore's compiler at model_parallel 2",
    }
    with tempfile.TemporaryDirectory() as scratch:
        strategy = compile_network("qwen3-2.0", "qwen3", Path(scratch) / "compiled")
        folder = SOURCES["qwen3"].write(Path(scratch) / "hf")
        whole = _whole(folder)
        record("qwen3-2.0", Golden(whole, tuple(_of_rank(folder, strategy, whole, rank) for rank in range(RANKS)), about))


def _whole(folder: Path) -> Tensors:
    network = qwen3_2_0(SOURCES["qwen3"].config, 1)
    from mindformers.checkpoint.checkpoint import load_hf_checkpoint

    load_hf_checkpoint(str(folder), network)
    return {name: np.ascontiguousarray(value.asnumpy()) for name, value in network.parameters_dict().items()}


def _of_rank(folder: Path, strategy: Path, whole: Tensors, rank: int) -> Tensors:
    from mindformers.checkpoint import reshard
    from mindformers.checkpoint.metadata import get_metadata_of_checkpoint
    from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata

    shapes = {name: tensor.shape for name, tensor in whole.items()}
    wanted = get_sharded_tensor_from_strategy_metadata(_layouts(strategy, shapes), rank)
    template = _template(RANKS)
    sources, files = get_metadata_of_checkpoint(str(folder))
    reshard.get_real_rank = lambda: rank
    loader = reshard.ReshardLoader(str(folder), wanted, sources, files, template=template)
    return {name: np.ascontiguousarray(value.asnumpy()) for name, value in template.get_mf_state_dict(loader.load()).items()}


def _template(tp: int) -> Any:
    """What `register_hf_weight_template` gives the network; the network itself needs its devices at tp > 1."""
    from mindformers.checkpoint.converter.template import WeightTemplate
    from mindformers.models.qwen3.utils import Qwen3PreTrainedModel
    from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config

    template = WeightTemplate(weight_converters=Qwen3PreTrainedModel.weight_converters)
    template.set_model_config(convert_to_transformer_config(qwen3_config_2_0(SOURCES["qwen3"].config, tp)))
    return template


def _layouts(strategy: Path, shapes: dict[str, Any]) -> dict[str, list[Any]]:
    """Parameter -> [ms.Layout, dtype, global shape], which is what a compiled network answers on its device."""
    import mindspore as ms
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    read = ParallelStrategyMap()
    read.ParseFromString(strategy.read_bytes())
    layouts = {}
    for item in read.parallel_layout_item:
        if item.param_name not in shapes:
            continue
        matrix = tuple(item.parallel_layouts.dev_matrix[0].dim)
        names = tuple(f"axis{axis}" for axis in range(len(matrix)))
        # A tensor map counts the device axes from the right.
        cut = [names[-1 - axis] if axis >= 0 else "None" for axis in item.parallel_layouts.tensor_map[0].dim]
        layouts[item.param_name] = [ms.Layout(matrix, names, rank_list=list(range(RANKS)))(*cut), ms.float32, shapes[item.param_name]]
    return layouts


if __name__ == "__main__":
    main()
