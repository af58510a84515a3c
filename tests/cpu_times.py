"""Where the processor time of a run of tests goes: `python -m pytest -n 2 -p tests.cpu_times`.

Unlike the wall time of `--durations`, it is the same whatever else the machine does. It counts the processes that a
test starts and waits for.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

TESTS_LISTED = 40


def read_cpu_seconds() -> float:
    """Processor time of this process and of those that it has waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """Time of every test, by phase in the process that runs it, summed in the process that reports."""

    def __init__(self) -> None:
        self.last = 0.0
        self.seconds: dict[str, float] = defaultdict(float)  # by test
        self.collections: list[float] = []  # by worker, with its imports

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.last = read_cpu_seconds()
        self.collections.append(self.last)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = read_cpu_seconds()
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.cpu_seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collections"] = self.collections

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        self.collections += getattr(node, "workeroutput", {}).get("collections", [])

    def pytest_terminal_summary(self, terminalreporter) -> None:
        files: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("processor time")
        for title, times in (("tests", self.seconds), ("files", files)):
            longest = sorted(times.items(), key=lambda entry: -entry[1])
            write(f"{sum(times.values()):8.1f} s  {title}")
            for name, seconds in longest[:TESTS_LISTED] if title == "tests" else longest:
                write(f"{seconds:8.1f} s  {name}")
        write(f"{sum(self.collections):8.1f} s  imports and collection, {len(self.collections)} processes")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes(), "isentrope-cpu-times")
