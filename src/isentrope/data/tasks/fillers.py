"""Fillers by name: kinds of text to hide facts in, four that need no file, and any file of yours."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from isentrope.data.corpus import read_documents
from isentrope.data.tasks.haystack import Haystack
from isentrope.data.tasks.needles import needle_haystack, uuid_haystack
from isentrope.data.tasks.vocabulary import NOISE

SENTENCES = "sentences"  # the default
TEXT = "text"  # what files given without a name are called
# long modules of the standard library, in every Python that the package runs on
PYTHON_MODULES = (
    "argparse", "ast", "calendar", "collections/__init__", "dataclasses", "datetime", "decimal", "difflib", "doctest",
    "enum", "fractions", "inspect", "ipaddress", "logging/__init__", "mailbox", "optparse", "pathlib", "pickle",
    "random", "shutil", "statistics", "subprocess", "tarfile", "textwrap", "threading", "turtle", "typing",
    "unittest/mock", "uuid", "zipfile",
)  # fmt: skip


@cache
def _plain_sentences() -> Haystack:
    return Haystack.from_texts()


@cache
def _noise() -> Haystack:
    return Haystack.from_texts([NOISE])


@cache
def _python_source() -> Haystack:
    """Read modules of the standard library; another version of Python has other text, and so another sha256."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for name in PYTHON_MODULES if (path := folder / f"{name}.py").is_file()]
    if not paths:
        raise ValueError(f"filler: no source of the standard library in {folder}; choose another filler than 'python'")
    return Haystack.from_texts(path.read_text(encoding="utf-8") for path in paths)


BUILT_IN: Mapping[str, Callable[[], Haystack]] = {
    SENTENCES: _plain_sentences,  # six paragraphs, repeated
    "noise": _noise,  # five short sentences, repeated
    "needles": needle_haystack,  # needles of other things
    "python": _python_source,  # real text: the standard library's source
}
# what tasks with a haystack of their own are hidden in; "list": nothing but the words of the task
TASK_FILLERS: Mapping[str, Callable[[], Haystack]] = {
    "noise": _noise, "needles": needle_haystack, "identifiers": uuid_haystack, "list": _plain_sentences,
}  # fmt: skip


def load_haystack(paths: Sequence[Path]) -> Haystack:
    """Read the texts of these files as one; a few plain sentences where there are none.

    Args:
        paths: Files of text.
    """
    if not paths:
        return Haystack.from_texts()
    documents = list(read_documents(paths))
    if any(document.text is None for document in documents):
        raise ValueError("text: expected documents with text, got some with tokens alone")
    return Haystack.from_texts(document.text or "" for document in documents)


def load_filler(name: str) -> Haystack:
    """Build a filler that needs no file.

    Args:
        name: One of `BUILT_IN`, or of `TASK_FILLERS`.
    """
    if (build := BUILT_IN.get(name) or TASK_FILLERS.get(name)) is None:
        raise ValueError(f"filler: expected one of {', '.join(BUILT_IN)} or NAME=FILE, got {name!r}")
    return build()


def parse_fillers(
    texts: Sequence[str], find_files: Callable[[str], Sequence[Path]]
) -> dict[str, tuple[Path, ...] | None]:
    """Parse names of fillers, or NAME=FILE for files of text.

    Args:
        texts: Such as "noise" or "book=books/*.txt".
        find_files: Lists the files of a path, folder or glob.

    Returns:
        The files of each name; None for built-in ones.

    Raises:
        ValueError: A name is unknown, twice there, or that of a built-in filler with a file.
    """
    fillers: dict[str, tuple[Path, ...] | None] = {}
    reserved = tuple(dict.fromkeys((*BUILT_IN, *TASK_FILLERS)))
    for text in texts:
        name, is_file, path = (part.strip() for part in text.partition("="))
        if not is_file and name not in BUILT_IN:
            raise ValueError(f"filler: expected one of {', '.join(BUILT_IN)} or NAME=FILE, got {text!r}")
        if is_file and (not name or not path or name in reserved):
            raise ValueError(f"filler: expected NAME=FILE with a name other than {', '.join(reserved)}, got {text!r}")
        if name in fillers:
            raise ValueError(f"filler: expected each name once, got {name!r} twice")
        fillers[name] = tuple(find_files(path)) if is_file else None
    return fillers


def load_fillers(fillers: Mapping[str, Sequence[Path] | None]) -> dict[str, Haystack]:
    """Load fillers as `parse_fillers` returns them.

    Args:
        fillers: The files of each name; None for built-in ones.
    """
    return {name: load_filler(name) if paths is None else load_haystack(paths) for name, paths in fillers.items()}
