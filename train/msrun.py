"""A job under `msrun`, watched from outside.

msrun starts the ranks of this host and, on host 0, the scheduler through which they find each other; when a rank fails it kills the others.
It does not say which rank failed and why, does not pass signals on (a SIGINT makes it kill the ranks), and after a failure waits for the
scheduler, which takes half a minute to notice: that is what this module adds. It knows the ranks as msrun's child processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from mappings.errors import Problem, Refused, refuse
from train.launch import Launch
from train.processes import end_with_parent
from train.rank_logs import LogTail, last_error, looks_failed

POLL = 0.1
GRACE = 10.0
"""Seconds that msrun has to end after a failure before it is killed."""
PATIENCE = 60.0
"""Seconds that ranks have to save and end after msrun was killed."""
MSRUN_LOG = "msrun.log"
_RANK_FAILED = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)\.")

OnLine = Callable[[str], None]


def run_job(launch: Launch, on_line: OnLine = print, on_poll: Callable[[], None] = lambda: None) -> int:
    """Start the ranks of this host and wait for them. `on_line` gets each line of the first rank's log, `on_poll` is called all the while.

    SIGTERM and SIGINT go to every rank as SIGTERM, and the ranks are waited for: they save and end. A second one kills them.

    Returns:
        0, or 128 + the signal that ended it.

    Raises:
        Refused: when a rank failed, saying which and why, after all others were ended.
    """
    launch.log_folder.mkdir(parents=True, exist_ok=True)
    tail = LogTail(launch.log(launch.first_rank))
    with _noted_signals() as signals:
        job = _Job(launch)
        try:
            while job.goes_on(signals):
                for line in tail.lines():
                    on_line(line)
                on_poll()
                time.sleep(POLL)
        finally:
            job.end(patience=0.0 if len(signals) > 1 or job.failed else PATIENCE)
        for line in tail.lines(ended=True):
            on_line(line)
        on_poll()
    return job.outcome(signals)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The numbers of SIGTERM and SIGINT as they come. Signals reach the main thread only: elsewhere the list stays empty."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Job:
    """msrun and its children. `failed`: process id and exit code of the rank that msrun says has failed."""

    def __init__(self, launch: Launch) -> None:
        self.failed: tuple[int, int] | None = None
        self._launch = launch
        self._ranks: dict[int, Any] = {}
        self._scheduler: Any = None
        self._asked = False
        self._ended_at: float | None = None
        parent = os.getpid()
        self._msrun = subprocess.Popen(
            launch.msrun(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | launch.environment,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
            preexec_fn=lambda: end_with_parent(parent),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read_output, args=(launch.log_folder / MSRUN_LOG,), daemon=True)
        self._reader.start()

    def goes_on(self, signals: list[int]) -> bool:
        """Look after the job for a moment. False when it is over, or is to be ended."""
        if self._msrun.poll() is not None or len(signals) > 1:
            return False
        self._find_processes()
        if signals and not self._asked and len(self._ranks) == self._launch.local_ranks:
            self._asked = True
            self._each_rank(lambda rank: rank.terminate())
        ranks_are_over = self.failed is not None or (self._asked and not self._running())
        if not ranks_are_over:
            return True
        self._ended_at = self._ended_at or time.monotonic()
        if self._scheduler is not None:
            with contextlib.suppress(_psutil().Error):
                self._scheduler.terminate()
        return time.monotonic() - self._ended_at < GRACE

    def end(self, patience: float) -> None:
        """Leave no process behind. Where msrun is gone and ranks are not, they may save first."""
        running = self._running()
        if running and self._msrun.poll() is not None and patience:
            self._each_rank(lambda rank: rank.terminate())
            _psutil().wait_procs(running, timeout=patience)
        self._each_rank(lambda rank: os.killpg(rank.pid, signal.SIGKILL))  # msrun makes each rank the leader of its group
        if self._scheduler is not None:
            with contextlib.suppress(_psutil().Error):
                self._scheduler.kill()
        if self._msrun.poll() is None:
            self._msrun.kill()
        self._msrun.wait()
        self._reader.join(GRACE)

    def outcome(self, signals: list[int]) -> int:
        """The exit code, or the refusal of a job that failed."""
        asked_to_end = bool(signals) and (self.failed is None or self.failed[1] in (-signal.SIGTERM, -signal.SIGKILL))
        if asked_to_end:
            return 128 + signals[0]
        if self._msrun.returncode or self.failed is not None:
            raise self._failure()
        return 0

    def _find_processes(self) -> None:
        """Learn which child of msrun is which rank, from the variables that msrun gives it."""
        psutil = _psutil()
        known = {process.pid for process in (*self._ranks.values(), self._scheduler) if process is not None}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._msrun.pid).children():
                if child.pid not in known:
                    self._identify(child)

    def _identify(self, child: Any) -> None:
        variables: dict[str, str] = {}
        with contextlib.suppress(_psutil().Error, OSError):  # it has ended already, or is not yet the program that it will be
            variables = child.environ()
        if variables.get("MS_ROLE") == "MS_WORKER" and variables.get("RANK_ID", "").isdigit():
            self._ranks[int(variables["RANK_ID"])] = child
        elif variables.get("MS_ROLE") == "MS_SCHED":
            self._scheduler = child

    def _running(self) -> list[Any]:
        return [rank for rank in self._ranks.values() if rank.is_running()]

    def _each_rank(self, action: Callable[[Any], None]) -> None:
        for rank in self._running():
            with contextlib.suppress(_psutil().Error, ProcessLookupError):
                action(rank)

    def _read_output(self, log: Path) -> None:
        """Keep what msrun prints, and notice when it says that a rank has failed."""
        assert self._msrun.stdout is not None
        with open(log, "w", encoding="utf-8") as file:
            for raw in self._msrun.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                file.write(line + "\n")
                match = _RANK_FAILED.search(line)
                if match is not None and self.failed is None:
                    self.failed = (int(match[1]), int(match[2]))

    def _failure(self) -> Refused:
        rank, launch = self._failed_rank(), self._launch
        if rank is None:
            log = launch.log_folder / MSRUN_LOG
            why = "\n".join(["it said", *(f"  {line}" for line in last_error(log))])
            return Refused("msrun failed", [Problem(why, str(log), f"all logs are in {launch.log_folder}")])
        why = "\n".join([_exit_text(self.failed), *(f"  {line}" for line in last_error(launch.log(rank)))])
        mend = f"the other ranks were ended; all logs are in {launch.log_folder}"
        return Refused(f"rank {rank} failed", [Problem(why, str(launch.log(rank)), mend)])

    def _failed_rank(self) -> int | None:
        """The rank that msrun named, or if it ended before it was known, the first one whose log says so."""
        here = range(self._launch.first_rank, self._launch.first_rank + self._launch.local_ranks)
        named = [rank for rank, process in self._ranks.items() if self.failed is not None and process.pid == self.failed[0]]
        return next(iter([*named, *(rank for rank in here if looks_failed(self._launch.log(rank)))]), None)


def _exit_text(failed: tuple[int, int] | None) -> str:
    if failed is None:
        return "it ended with an error"
    code = failed[1]
    if code >= 0:
        return f"it ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"it was ended by {name}" + (", perhaps by the system for want of memory" if name == "SIGKILL" else "")


def _psutil() -> Any:
    """MindSpore needs psutil for msrun, so it is there where msrun is. Raises Refused."""
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise refuse("MindSpore is not installed", "ms-train launch", "pip install 'ms-convert[mindspore]'") from error
    return psutil
