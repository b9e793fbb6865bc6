"""What a run starts from: a Hugging Face folder, or a rank tree (the output of hf2ms, or a checkpoint of the trainer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from converter.hf_folder import read_hf_folder
from converter.layout import ParallelLayout
from converter.manifest import MANIFEST, SIDE_FOLDER, Manifest, read_manifest
from converter.source_model import SourceModel, understand
from mappings.errors import Problem, refuse
from mappings.tables import load_table
from model.config import ModelConfig
from train.config import ModelSettings, ParallelSettings


@dataclass(frozen=True)
class ModelSource:
    """One of `hf` and `manifest` is there. No tensor data was read."""

    path: Path
    config: ModelConfig
    hf: SourceModel | None = None
    manifest: Manifest | None = None

    @property
    def layout(self) -> ParallelLayout | None:
        """How a rank tree is cut; None for a Hugging Face folder, which any layout can be cut from."""
        return self.manifest.layout.layout() if self.manifest is not None else None

    @property
    def tokenizer_folder(self) -> Path:
        """Where the model's tokenizer is, if it has one."""
        return self.path if self.manifest is None else self.path / SIDE_FOLDER


def read_model_source(settings: ModelSettings) -> ModelSource:
    """Understand the folder from its headers alone. Raises Refused."""
    path = Path(settings.path)
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        if manifest.target is not None:
            raise refuse(
                f"a rank tree in the names of {manifest.target.dialect}, which the bundled model does not have",
                f"model.path: {path}",
                f"ms-convert translate {path} --target ms-convert -o SLICES",
            )
        return ModelSource(path, manifest.model, manifest=manifest)
    if not (path / "config.json").is_file():
        raise refuse(
            f"neither a config.json nor a {MANIFEST} is there" if path.is_dir() else "no such folder",
            f"model.path: {path}",
            "give a Hugging Face folder, the output of hf2ms, or a checkpoint of ms-train",
        )
    model = understand(read_hf_folder(path), load_table(Path(settings.rules)) if settings.rules else None, settings.tie_embeddings)
    return ModelSource(path, model.config, hf=model)


def check_layout(source: ModelSource, parallel: ParallelSettings) -> Iterator[Problem]:
    """A rank tree can only be trained on with the layout that it was cut for; dp is free, for its ranks hold the same."""
    layout = source.layout
    if layout is None:
        return
    differences = [
        f"{word} {here}, the run wants {wanted}"
        for word, here, wanted in (
            ("tp", layout.tp, parallel.tp),
            ("pp", layout.pp, parallel.pp),
            ("layers per stage", layout.layers_per_stage, parallel.layers_per_stage or layout.layers_per_stage),
        )
        if here != wanted
    ]
    if differences:
        flags = f"--tp {parallel.tp} --pp {parallel.pp}"
        if parallel.layers_per_stage:
            flags += f" --layers-per-stage {','.join(map(str, parallel.layers_per_stage))}"
        mend = (
            f"cut it anew: ms-convert ms2hf {source.path} -o WHOLE && ms-convert hf2ms WHOLE -o SLICES {flags}; or let model.path be WHOLE"
        )
        yield Problem(f"was cut for {'; '.join(differences)}", f"model.path: {source.path}", mend)
