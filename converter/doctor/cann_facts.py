"""What vendors say of versions that go together, as data. Where MindSpore's installed package says it itself, the package is asked instead.

Sources: CANN installation guides, dependency page instg_0045, of 8.0.0, 8.5.0 and 9.0.0; for the drivers, version tables of MindFormers
1.2.0, 1.3.2 and 1.5.0; for MindSpore and CANN, version_match.json of ascend-deployer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class CannNeeds:
    """What CANN from release `first` up to, not including, `end` asks of Python packages; "" where its guide asks nothing."""

    first: str
    end: str
    python: str
    numpy: str
    protobuf: str


CANN_NEEDS = (
    CannNeeds("8.0", "8.5", python=">=3.7,<=3.11.4", numpy=">=1.19.2,<1.25", protobuf="==3.20.*"),
    CannNeeds("8.5", "9.0", python=">=3.7,<3.14", numpy="<2", protobuf="==3.20.*"),
    CannNeeds("9.0", "9.1", python="", numpy=">=1.19.2", protobuf="==3.20.*"),
)
DRIVERS = (("8.0.RC2", "24.1.RC2"), ("8.0.0", "24.1.0"), ("8.1.RC1", "25.0.RC1"))
"""A version of CANN and the driver that it was published with. Newer drivers serve older CANN, not the other way round."""
MINDSPORE_CANN = (("2.6.0rc1", "8.1"), ("2.6.0", "8.2"), ("2.7.0rc1", "8.2"), ("2.7.1", "8.3"), ("2.7.2", "8.5"))
"""A version of MindSpore and the release of CANN that it was published with, where its package does not say."""
MINDFORMERS_MINDSPORE = (("1.2.0", "2.3.0"), ("1.3.2", "2.4.10"), ("1.5.0", "2.6.0rc1"))
"""A version of MindFormers and the MindSpore that it was published with."""
_VERSION = re.compile(r"\d+(?:\.\d+)*(?:\.?rc\d+)?", re.IGNORECASE)


def as_version(text: str) -> Version | None:
    """A vendor's version: 8.2.RC1 comes before 8.2.0. None if it is none."""
    match = _VERSION.match(text.strip())
    try:
        return Version(match.group()) if match else None
    except InvalidVersion:
        return None


def needs_of(release: str | None) -> CannNeeds | None:
    """What a release of CANN, given by its first two numbers, asks for."""
    version = as_version(release or "")
    if version is None:
        return None
    return next((needs for needs in CANN_NEEDS if Version(needs.first) <= version < Version(needs.end)), None)


def published_driver(cann: str) -> str | None:
    """The driver of the newest row that is not newer than this CANN, within its release."""
    version = as_version(cann)
    rows = [(as_version(row), driver) for row, driver in DRIVERS]
    fitting = [(row, driver) for row, driver in rows if version and row and row <= version and row.release[:2] == version.release[:2]]
    return max(fitting, key=lambda row: row[0])[1] if fitting else None
