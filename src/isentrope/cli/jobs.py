"""Further processes that share the work of a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from signal import SIGINT, Signals
from threading import Thread
from types import TracebackType

from isentrope.cli.output import print_error


class Jobs:
    """Run this command in further processes, and say at once, and at the end, which of them have failed.

    The block waits for them where it succeeds, and ends them where it does not.

    Args:
        count: number of processes besides this one, which is the first.
        folder: for their output, in 2.log and so on.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.numbers = folder, range(2, count + 2)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.watchers: list[Thread] = []
        self.failed: list[int] = []
        self.stopped = False

    def __enter__(self) -> Jobs:
        for number in self.numbers:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._log(number).open("wb") as log:
                command = [sys.executable, "-m", "isentrope.cli", *sys.argv[1:], "--jobs", "1", "--helps"]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            self.processes.append(process)
            self.watchers.append(Thread(target=self._report_failure, args=(number, process), daemon=True))
            self.watchers[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.stopped = True
            for process in self.processes:
                process.terminate()
        if kind is None and self.failed:
            logs = ", ".join(str(self._log(number)) for number in sorted(self.failed))
            print_error(
                f"{len(self.failed)} of {len(self.numbers) + 1} processes failed, and the others did their work: {logs}"
            )

    def wait(self) -> None:
        """Wait until every process has ended."""
        for watcher in self.watchers:
            watcher.join()

    def yield_memory(self) -> bool:
        """Wait until every process has ended and left its memory; return whether any was still running."""
        running = any(watcher.is_alive() for watcher in self.watchers)
        if running:
            print_error("the other processes continue, and this one after them")
        self.wait()
        return running

    def _report_failure(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process has ended, and report a failure; an interruption is of all processes."""
        status = process.wait()
        if status in (0, -SIGINT, 128 + SIGINT) or self.stopped:
            return
        self.failed.append(number)
        ended = f"was ended by {Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = self._log(number).read_text(encoding="utf-8", errors="replace").splitlines()
        reason = f"{lines[-1].removeprefix('isentrope: ')} " if lines else ""
        print_error(f"process {number} {ended}, and the others continue: {reason}({self._log(number)})")

    def _log(self, number: int) -> Path:
        return self.folder / f"{number}.log"
