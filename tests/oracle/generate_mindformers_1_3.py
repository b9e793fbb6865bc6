"""What MindFormers 1.3.2's converters make of GPT-2, Llama and Qwen2: `python -m tests.oracle.generate_mindformers_1_3` in its environment.

Its fused layout is another one in each rank, so it is made the way its users made it: the whole checkpoint is cut first, and
`convert_to_qkv_concat` is run over the rank folders.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.oracle.absent import stand_in_for
from tests.oracle.checkpoints import read_ckpt, record, save_ckpt, sliced
from tests.oracle.goldens import Golden, Tensors
from tests.oracle.networks import GONE_FROM_MINDSPORE
from tests.oracle.parallel_compile import compile_network
from tests.oracle.sources import SOURCES

VERSION = "1.3.2"
CUT = "cut by ms.transform_checkpoints with the strategy file that MindSpore's compiler wrote for {} at model_parallel 2"


def main() -> None:
    """Makes five golden outputs."""
    stand_in_for(*GONE_FROM_MINDSPORE)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        strategy = compile_network("gpt2-1.3", "gpt2", folder / "gpt2")
        whole = _gpt2(folder)
        route = "convert_pt_to_ms of models/gpt2/convert_weight.py, given the names without `transformer.` that it expects"
        record("gpt2-1.3", Golden(whole, sliced(whole, strategy), _about("gpt2", route, CUT.format("GPT2LMHeadModel"))))
        route = "convert_pt_to_ms of models/llama/convert_weight.py"
        _both_llamas("llama", _llama(folder), route, folder)
        route = "the names by name_replace of models/llama/convert_weight.py (it reads only Llama; the wheel holds no Qwen2 converter)"
        _both_llamas("qwen2", _qwen2(), route, folder)


def _both_llamas(source: str, whole: Tensors, route: str, folder: Path) -> None:
    strategy = compile_network("llama-1.3", source, folder / source)
    ranks = sliced(whole, strategy)
    record(f"{source}-1.3", Golden(whole, ranks, _about(source, route, CUT.format("LlamaForCausalLM"))))
    fused = _fused([whole], folder / f"{source}-whole")[0]
    then = "convert_to_qkv_concat of models/llama/convert_weight.py over "
    about = _about(source, f"{route}, then {then} the whole file", f"{source}-1.3, then {then} its rank folders")
    record(f"{source}-1.3-fused", Golden(fused, tuple(_fused(list(ranks), folder / f"{source}-ranks")), about))


def _about(source: str, whole: str, ranks: str) -> dict[str, str]:
    return {"source": source, "mindformers": VERSION, "tp1": whole, "tp2": ranks}


def _gpt2(folder: Path) -> Tensors:
    import torch
    from mindformers.models.gpt2.convert_weight import convert_pt_to_ms

    source = SOURCES["gpt2"]
    state = {name.removeprefix("transformer."): torch.from_numpy(value) for name, value in source.tensors().items()}
    torch.save(state, folder / "gpt2.bin")
    convert_pt_to_ms(str(folder / "gpt2.bin"), str(folder / "gpt2.ckpt"), layers=source.config["n_layer"])
    return read_ckpt(folder / "gpt2.ckpt")


def _llama(folder: Path) -> Tensors:
    from mindformers.models.llama.convert_weight import convert_pt_to_ms

    source = SOURCES["llama"].write(folder / "llama-hf")
    convert_pt_to_ms(str(source / "model.safetensors"), str(folder / "llama.ckpt"))  # it takes the folder of the file that it is given
    return read_ckpt(folder / "llama.ckpt")


def _qwen2() -> Tensors:
    from mindformers.models.llama.convert_weight import name_replace

    return {name_replace(name): value for name, value in SOURCES["qwen2"].tensors().items()}


def _fused(ranks: list[Tensors], folder: Path) -> list[Tensors]:
    from mindformers.models.llama.convert_weight import convert_to_qkv_concat

    files = [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(len(ranks))]
    for file, tensors in zip(files, ranks, strict=True):
        save_ckpt(tensors, folder / "separate" / file)
    convert_to_qkv_concat(str(folder / "separate"), str(folder / "fused"))
    return [read_ckpt(folder / "fused" / file) for file in files]


if __name__ == "__main__":
    main()
