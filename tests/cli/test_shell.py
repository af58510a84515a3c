"""The first screen is quick, since it does without PyTorch, and names are completed in a real shell."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time

import pytest

from isentrope import cli
from isentrope.__main__ import main

MAIN = "import sys; sys.argv[0] = 'isentrope'; from isentrope.__main__ import main; main()"
MAX_SECONDS = 120  # of waiting for a shell; it answers within one on an idle machine


def modules_after(*words, **environment):
    """The modules that a command has imported by the time it exits, and what it printed."""
    code = f"import atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {MAIN}"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=os.environ | environment)
    assert done.returncode == 0, done.stdout
    return set(done.stderr.split()), done.stdout


@pytest.mark.parametrize("words", [("--help",), ("recipes", "--help"), ("--version",)], ids=" ".join)
def test_help_imports_neither_torch_nor_numpy(words):
    modules, printed = modules_after(*words)
    assert "isentrope.cli" in modules and not modules & {"torch", "numpy", "transformers", "matplotlib"}
    assert printed.strip()


def test_an_encoding_without_greek_letters_ends_no_command(monkeypatch):
    """As of pipes on Windows: the work is done by the time a table is printed."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(cli, "app", lambda: print("share: β = ½"))
    main()
    stream.flush()
    assert stream.buffer.getvalue().split() == [b"share:", b"?", b"=", b"?"]


def test_completion_imports_no_torch():
    words = {"_ISENTROPE_COMPLETE": "complete_bash", "COMP_WORDS": "isentrope recipes rer", "COMP_CWORD": "2"}
    modules, printed = modules_after(**words)
    assert printed.split() == ["rerope"] and not modules & {"torch", "numpy", "transformers"}


@pytest.mark.parametrize(
    ("shell", "options", "start"),
    [
        ("bash", ["--norc", "-i"], "source ~/.bashrc"),
        ("zsh", ["-f", "-i"], "source ~/.zshrc"),
    ],
)
def test_names_are_completed_in_a_shell(shell, options, start, tmp_path):
    """`--install-completion` in a shell; then its set-up is read, and a name typed in part is completed by the key."""
    if shutil.which(shell) is None or sys.platform == "win32":
        pytest.skip(f"no {shell} here")
    program = tmp_path / "bin" / "isentrope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{MAIN}" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(tmp_path), "PATH": path, "TERM": "dumb", "PS1": "$ "}
    terminal = Terminal([shell, *options], environment)
    try:
        terminal.type("isentrope --install-completion\n", f"{shell} completion installed in")
        terminal.type(f"{start}; echo read''y\n", "ready")
        terminal.type("isentrope recipes rer", "recipes rer")
        terminal.type("\t\t", "ope")  # the first key only loads the function in zsh
    finally:
        terminal.close()


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command, environment):
        import pty

        self.process, self.file = pty.fork()
        if self.process == 0:
            os.execvpe(command[0], command, environment)

    def type(self, text, expected):
        """Type a text, and read until the expected words have come."""
        import select

        os.write(self.file, text.encode())
        read, end = b"", time.monotonic() + MAX_SECONDS
        while expected.encode() not in read:
            if not select.select([self.file], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"expected {expected!r}, read {read.decode(errors='replace')!r}")
            read += os.read(self.file, 4096)

    def close(self):
        import signal

        os.kill(self.process, signal.SIGHUP)
        os.close(self.file)
        os.waitpid(self.process, 0)
