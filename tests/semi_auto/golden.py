"""What MindSpore wrote for each case, kept so that tests need no compilation.

python -m tests.semi_auto.golden CASE...       compiles cases anew (all of them takes half an hour on two cores)

tests/data/semi_auto/CASE/strategy_{stage}.ckpt      MindSpore's strategy file of the stage
                          communication_{stage}.json the communication in the graph of the stage's first rank
                          declared.json              the strategies that our cells were given when that was compiled
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converter.records import decode, encode
from tests.semi_auto.cases import CASES, Case
from tests.semi_auto.compiling import Communication, Compiled, compile_on_stubs
from tests.semi_auto.declared import declared_strategies

FOLDER = Path(__file__).resolve().parents[1] / "data" / "semi_auto"


def write_golden(case: Case, compiled: Compiled) -> None:
    """Keep what a compilation gave."""
    folder = FOLDER / case.name
    folder.mkdir(parents=True, exist_ok=True)
    for stage, strategy in compiled.strategies.items():
        (folder / f"strategy_{stage}.ckpt").write_bytes(strategy)
    for stage, counted in compiled.communication.items():
        rows = sorted(f'{{"count": {count}, "of": {json.dumps(encode(item))}}}' for item, count in counted.items())
        (folder / f"communication_{stage}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


def write_declared(case: Case, declared: Mapping[str, Any]) -> None:
    """Keep the strategies that a compilation was given."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(strategy)}" for name, strategy in sorted(declared.items()))
    (FOLDER / case.name / "declared.json").write_text(f"{{\n{rows}\n}}\n")


def read_declared(case: Case) -> dict[str, Any]:
    """What `write_declared` kept."""
    found: dict[str, Any] = json.loads((FOLDER / case.name / "declared.json").read_text())
    return found


def read_golden(case: Case) -> Compiled:
    """What was kept of a case."""
    folder, stages = FOLDER / case.name, range(case.pp)
    return Compiled(
        {stage: (folder / f"strategy_{stage}.ckpt").read_bytes() for stage in stages},
        {stage: _counted(folder / f"communication_{stage}.json") for stage in stages},
    )


def _counted(path: Path) -> Counter[Communication]:
    return Counter({decode(Communication, row["of"]): row["count"] for row in json.loads(path.read_text())})


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            write_golden(CASES[name], compile_on_stubs(CASES[name], Path(scratch) / "job"))
        write_declared(CASES[name], declared_strategies(CASES[name]))
