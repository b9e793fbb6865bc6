"""The model that is planned for: a Hugging Face folder, a rank tree, or a config.json alone; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from converter.hf_folder import MAX_CONFIG_BYTES, read_json_object
from converter.layout import Coordinates, ParallelLayout, held_slices, make_layout
from converter.manifest import MANIFEST, read_manifest
from converter.source_model import architecture_of, find_table
from mappings.errors import Refused, refuse
from mappings.expand import Expansion, expand, restore_prefix
from mappings.hf_config import read_model_config
from mappings.tables import load_table, parse_table
from model.config import ModelConfig
from train.config import ModelSettings
from train.config_checks import untrainable
from train.model_source import read_model_source

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class PlannedModel:
    """`folder` is what a run's model.path would be. `layout` is there for a rank tree, which fixes tp, pp and the layers of each stage."""

    folder: Path
    config: ModelConfig
    expansion: Expansion
    layout: ParallelLayout | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, unpadded; a tied embedding counts once."""
        return sum(math.prod(item.shape) for item in self.expansion.parameters.values())

    def cut(self, tp: int, pp: int, dp: int) -> ParallelLayout:
        """The layout, as the converter and the trainer make it. Raises Refused when the model cannot be cut so."""
        given = self.layout.layers_per_stage if self.layout is not None and self.layout.pp == pp else None
        return make_layout(self.config, self.expansion, tp=tp, pp=pp, dp=dp, layers_per_stage=given)

    def shapes(self, layout: ParallelLayout, stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The parameters of a rank of this stage, each in the shape of its slice: the same shapes for every tensor-parallel rank."""
        place = Coordinates(layout.rank(stage, 0, 0), stage, 0, 0)
        layers = layout.layers_of(stage)  # passed on alone: large models have thousands of parameters, large plans hundreds of stages
        near = (item for item in self.expansion.parameters.values() if item.layer is None or item.layer in layers)
        for item, piece in held_slices(near, self.expansion.sizes, layout, place, self.config.tied):
            yield item.name, piece.shape(item.shape)


def read_planned_model(settings: ModelSettings) -> PlannedModel:
    """Understand `settings.path`. Raises Refused, also for a model that the bundled trainer does not compute."""
    path = Path(settings.path)
    if (path / MANIFEST).is_file():
        model = _from_rank_tree(path)
    elif path.is_dir() and any((path / name).is_file() for name in WEIGHTS):
        source = read_model_source(settings).hf
        assert source is not None, "no manifest is there"
        model = PlannedModel(path, source.config, source.expansion)
    else:
        model = _from_config(path / "config.json" if path.is_dir() else path, settings)
    problems = list(untrainable(model.config, str(path)))
    if problems:
        raise Refused("ms-train does not train this model", problems)
    return model


def _from_rank_tree(folder: Path) -> PlannedModel:
    manifest = read_manifest(folder)
    table = parse_table(manifest.table, f"{folder / MANIFEST}: table")
    originals = [tensor.name for file in manifest.source.files for tensor in file.tensors]
    names = restore_prefix(table, originals)
    expansion = expand(table, manifest.model, manifest.source.config, set(names.values()))
    return PlannedModel(folder, manifest.model, expansion, manifest.layout.layout())


def _from_config(path: Path, settings: ModelSettings) -> PlannedModel:
    """As converter/source_model.py reads a folder, but the config's word on vocabulary and tied embeddings is all there is."""
    if not path.is_file():
        raise refuse("no such file or folder", str(path), "give a Hugging Face folder, a rank tree, or a config.json")
    data = read_json_object(path, MAX_CONFIG_BYTES, path.parent)
    architecture = architecture_of(data, str(path))
    table = load_table(Path(settings.rules)) if settings.rules else find_table(data, str(path))
    reading = read_model_config(
        data, table.config, family=table.family, architecture=architecture, tensors=(), where=str(path), other_keys=table.config_keys
    )
    return PlannedModel(path.parent, reading.config, expand(table, reading.config, data, ()))
