"""What surrounds the steps of a run: how it is asked to end, and that it has its checkpoint folder to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mappings.errors import Refused
from train.loop import _asked_to_stop, _only_run

HOLD = """
import sys
from pathlib import Path
from train.loop import _only_run
with _only_run(Path(sys.argv[1]), 0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_first_interrupt_asks_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with _asked_to_stop(alone=True) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [signal.SIGINT, signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_checkpoint_folder_belongs_to_one_run_until_its_process_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=Path(__file__).resolve().parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(Refused, match="another run"), _only_run(tmp_path, 0):
            pass
        with _only_run(tmp_path, 1):
            pass  # the other ranks of a job write what rank 0 answers for
        other.kill()
    with _only_run(tmp_path, 0):
        pass
