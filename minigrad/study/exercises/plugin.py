"""What pytest calls in a folder of exercises: each file is one test, and its failure is a sentence.

The folder's conftest.py imports the three hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minigrad.study.exercises.grade import NotWritten, Wrong, diagnose, load
from minigrad.study.exercises.table import BY_NAME


class _File(pytest.File):
    def collect(self) -> Iterator[_Item]:
        yield _Item.from_parent(self, name=BY_NAME[self.path.stem].function)


class _Item(pytest.Item):
    def runtest(self) -> None:
        exercise = BY_NAME[self.path.stem]
        self.user_properties.append(("exercise", exercise.name))
        try:
            diagnose(exercise, load(self.path, exercise.function))
        except NotWritten:
            pytest.skip("not written yet")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, Wrong) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.stem}, {self.name}"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> _File | None:
    if file_path.suffix != ".py" or file_path.stem not in BY_NAME or parent.session.isinitpath(file_path):
        return None                                      # a file named on the command line comes by the next hook
    return _File.from_parent(parent, path=file_path)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> _File | None:
    return _File.from_parent(parent, path=module_path) if module_path.stem in BY_NAME else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A line for each exercise: right, not written yet, or the first thing that is wrong."""
    rows = {}
    for kind in ("passed", "skipped", "failed"):
        for report in terminalreporter.getreports(kind):
            name = dict(report.user_properties).get("exercise")
            if name is not None and (report.when == "call" or kind == "failed"):
                words = str(report.longrepr).splitlines()[:1] if kind == "failed" else []
                rows[name] = {"passed": "right", "skipped": "not written yet"}.get(kind) or "WRONG  " + "".join(words)
    if rows:
        terminalreporter.section("exercises")
        for name in sorted(rows):
            terminalreporter.line(f"{name:20}{rows[name]}")
