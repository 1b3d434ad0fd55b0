"""Pytest plug-in: `pytest --mixassay-mixer NAME` adds the conformance checks of a mixer as tests, in front of others.

NAME is a registered mixer, FILE.py:Class or package.module:Class; the option may be given several times. Without it
nothing is imported: other runs of pytest pay one small module.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mixassay.runners.conformance.subject import Subject
    from mixassay.runners.conformance.table import Check


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mixassay")
    group.addoption("--mixassay-mixer", action="append", default=[], metavar="MIXER", help="Check this mixer, too.")
    group.addoption("--mixassay-device", default="cpu", metavar="DEVICE", help="Where: cpu or cuda.")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    names: list[str] | None = config.getoption("mixassay_mixer")
    if not names:
        return
    from mixassay.errors import UserError
    from mixassay.runners.conformance.subject import device, find
    from mixassay.runners.conformance.table import CHECKS

    added: list[pytest.Item] = []
    for name in names:
        try:
            subject = find(name, device=device(str(config.getoption("mixassay_device"))))
        except UserError as fault:
            raise pytest.UsageError(str(fault)) from fault
        added += [Conformance.of(session, subject, check) for check in CHECKS]
    items[:0] = added


class Conformance(pytest.Item):
    """One check of one mixer."""

    subject: "Subject"
    check: "Check"

    @classmethod
    def of(cls, session: pytest.Session, subject: "Subject", check: "Check") -> "Conformance":
        node = f"{subject.name}::{check.name}"
        item: Conformance = cls.from_parent(session, name=f"{subject.name}[{check.name}]", nodeid=node)
        item.subject, item.check = subject, check
        return item

    def runtest(self) -> None:
        from mixassay.runners.conformance.table import judge

        result = judge(self.subject, self.check)
        if result.status == "not offered":
            pytest.skip(result.message)
        if result.status == "fail":
            smallest = f"\nsmallest failing input: {result.smallest}" if result.smallest else ""
            pytest.fail(f"{self.check.claim}\n{result.message}{smallest}", pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, self.nodeid
