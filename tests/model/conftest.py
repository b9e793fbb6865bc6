"""MindSpore's mode is a global: each test starts from the same one."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore as ms
import pytest


@pytest.fixture(autouse=True)
def mindspore_mode(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyNative, synchronous: an operator's error surfaces at that operator. What MindSpore dumps of a failed compilation is kept out of the
    repository.
    """
    settings = {"mode": ms.PYNATIVE_MODE, "pynative_synchronize": True}
    monkeypatch.setenv("MS_OM_PATH", str(tmp_path_factory.getbasetemp()))
    ms.set_context(**settings)
    yield
    ms.set_context(**settings)
