"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os

# Before a library that reads them is imported: no hub is asked, one thread for each of pytest's processes, MindSpore's errors only.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("GLOG_v", "3")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from tests.real_models import minilm_folder, smollm2_folder
from tests.tiny_models import save_tiny

settings.register_profile("here", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


class TinyFolder(Protocol):
    """What the `tiny_folder` fixture is called with: the arguments of `save_tiny` after the folder."""

    def __call__(self, variant: str, seed: int = 0, **options: Any) -> Path: ...


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Tiny models as Hugging Face folders, each made once. They are shared: a test that changes one calls `save_tiny` itself."""
    made: dict[str, Path] = {}

    def folder(variant: str, seed: int = 0, **options: Any) -> Path:
        key = json.dumps([variant, seed, options], sort_keys=True, default=str)
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(variant) / "model", variant, seed, **options)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, read-only by agreement. A test that uses it is marked `slow`."""
    return smollm2_folder()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as a sentence-transformers folder, read-only by agreement. A test that uses it is marked `slow`."""
    return minilm_folder()
