"""Files that cannot be read or written: which, why, and what to do."""

from __future__ import annotations

import errno
import os

import filelock
import pytest
from safetensors import SafetensorError
from typer.testing import CliRunner

from isentrope.cli import app
from isentrope.utils.files import BrokenFileError, explain_os_error, lock_file, read_fields, read_json, write_atomically


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EPERM, "here/file: writing is not permitted; choose another folder"),
        (errno.EEXIST, "here/file: already exists and is not a folder; choose another name or move it away"),
        (errno.EACCES, "here/file: no permission; change that of the file or folder, or choose another"),
        (errno.ENOSPC, "here/file: no space is left on the disk; make room, then run the same command again"),
        (errno.ENODEV, "here/file: no such device; choose another file or folder"),
    ],
)
def test_errors_of_the_system_say_where_and_what_to_do(number, words):
    assert explain_os_error(OSError(number, os.strerror(number), "here/file")) == words


def test_words_of_a_library_stay():
    assert explain_os_error(OSError("nothing there by that name")) == "nothing there by that name"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EEXIST, errno.ENOTDIR])
def test_a_command_shows_no_bare_number(monkeypatch, tmp_path, number):
    def refuse(*args, **options):
        raise OSError(number, os.strerror(number), str(tmp_path / "out"))

    monkeypatch.setattr("isentrope.analysis.entropy_laws.measure_laws", refuse)
    result = CliRunner().invoke(app, ["laws", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "Errno" not in result.stderr
    assert f"{tmp_path / 'out'}: " in result.stderr and "; choose another" in result.stderr


def test_a_file_where_a_folder_is_needed(tmp_path):
    (tmp_path / "out").write_text("")
    result = CliRunner().invoke(app, ["laws", "--length", "128", "--queries", "2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "Errno" not in result.stderr
    assert f"{tmp_path / 'out'}: already exists and is not a folder; choose another name" in result.stderr


def test_a_full_disk_is_said_of_the_file_by_its_own_name(tmp_path):
    with pytest.raises(OSError, match="No space") as caught, write_atomically(tmp_path / "file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert explain_os_error(caught.value).startswith(f"{tmp_path / 'file'}: no space is left")
    with pytest.raises(FileNotFoundError) as missing, write_atomically(tmp_path / "no" / "file") as partial:
        partial.write_text("")
    assert explain_os_error(missing.value) == f"{tmp_path / 'no' / 'file'}: no such file or folder; check its name"


def test_a_full_disk_of_a_library_is_said_too(tmp_path):
    """safetensors raises an error of its own, which is no OSError."""
    with pytest.raises(OSError, match="No space") as caught, write_atomically(tmp_path / "model"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert explain_os_error(caught.value).startswith(f"{tmp_path / 'model'}: no space is left")
    assert not any(tmp_path.iterdir())
    with pytest.raises(SafetensorError, match="header"), write_atomically(tmp_path / "model"):
        raise SafetensorError("header too large")


def test_a_folder_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(OSError, match="lock") as caught, lock_file(tmp_path / "lock"):
        pass
    assert explain_os_error(caught.value).startswith(f"{tmp_path / 'lock'}: files cannot be locked there")
    with lock_file(tmp_path / "lock", optional=True) as locked:
        assert locked


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_named_with_a_remedy(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(BrokenFileError) as caught:
        read_json(path, "write it again")
    message = str(caught.value)
    assert message.startswith(f"{path}: expected JSON, got a broken file (") and message.endswith("; write it again")
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(("content", "words"), [("{}", "expected a, b,"), ('{"a": 1}', "expected b,"), ("[]", "a, b,")])
def test_fields_that_are_missing(tmp_path, content, words):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(BrokenFileError, match=words):
        read_fields(tmp_path / "file.json", "write it again", "a", "b")


def test_writers_of_one_process_id_leave_each_other_alone(tmp_path):
    """As in two containers that share a folder."""
    with write_atomically(tmp_path / "a") as first, write_atomically(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "first"


def test_a_claim_is_one_process_at_a_time(tmp_path):
    with lock_file(tmp_path / "a") as mine, lock_file(tmp_path / "a") as theirs, lock_file(tmp_path / "b") as other:
        assert mine and not theirs and other
    with lock_file(tmp_path / "a") as mine:
        assert mine
