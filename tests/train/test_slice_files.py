"""A rank's arrays on disk, read by the safetensors library and by MindSpore."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from train.slice_files import read_arrays, record_of, write_arrays


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
def test_arrays_come_back_bit_for_bit_from_files_that_mindspore_reads(tmp_path: Path, file_format: str) -> None:
    import mindspore as ms

    random = np.random.default_rng(0)
    arrays = [
        (f"w.{kind}", (random.standard_normal((3, 5)) * 2).astype(kind)) for kind in (np.float32, np.float16, ml_dtypes.bfloat16)
    ]  # fmt: skip
    arrays = [(f"w.{index}", array) for index, (_, array) in enumerate(arrays)]
    size = write_arrays(tmp_path, f"deep/file.{file_format}", file_format, arrays, {"rank": "0"})
    path = tmp_path / "deep" / f"file.{file_format}"
    assert path.stat().st_size == size
    found = dict(read_arrays(path, file_format))
    assert {name: (array.dtype, array.tobytes()) for name, array in arrays} == {name: (a.dtype, a.tobytes()) for name, a in found.items()}
    theirs = ms.load_checkpoint(str(path), format=file_format)
    for name, array in arrays:
        np.testing.assert_array_equal(theirs[name].float().asnumpy(), array.astype(np.float32))
        assert record_of(name, array) == record_of(name, found[name])
