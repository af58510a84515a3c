"""The `isentrope` application, and what its commands share."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from isentrope.cli.output import print_error
from isentrope.utils.extras import MissingExtraError, name_missing_extras
from isentrope.utils.files import PARTS_MODULE, explain_os_error

PACKAGE = Path(__file__).parents[1]
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        from isentrope.version import __version__

        typer.echo(f"isentrope {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    parts: Annotated[
        list[Path] | None,
        typer.Option(
            help="A Python file to run first, which registers parts of recipes of your own "
            "(isentrope.recipe.register_part). Repeat for several."
        ),
    ] = None,
) -> None:
    """Read texts longer than a model was trained on: extend models, and measure which recipe works."""
    for path in parts or ():
        _import_file(path)


def _import_file(path: Path) -> None:
    """Run a user's Python file as a module of its own; its errors keep their traceback."""
    if not path.is_file():
        print_error(f"parts: expected a Python file, got {str(path)!r}, which is not there")
        raise typer.Exit(2)
    place = path.resolve()
    name = f"{PARTS_MODULE}{place.stem}_{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))  # files beside it can be imported
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(path.read_bytes(), path, "exec"), vars(module))


def format_warning(
    usual: Any, message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as one line where the package gives it, as usual where another does."""
    if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
        return f"isentrope: {message}\n"
    return str(usual(message, category, filename, lineno, line))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print an expected error as one line on stderr and exit with status 2; also usable as a decorator.

    Warnings of the package are one line too, without the place in its code.
    """
    usual = warnings.formatwarning
    warnings.formatwarning = partial(format_warning, usual)
    try:
        with name_missing_extras():
            yield
    except BrokenPipeError:
        raise  # nobody reads the output any more
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to resume")
        raise typer.Exit(130) from None
    except (ValueError, OSError, MemoryError, MissingExtraError) as error:
        message = explain_os_error(error) if isinstance(error, OSError) else str(error) or "out of memory"
        print_error(message.strip().partition("\n")[0])
        raise typer.Exit(2) from None
    finally:
        warnings.formatwarning = usual


def disable_progress_bars() -> None:
    """Turn off the progress bars that transformers shows while loading a model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """Return the text files of all the given files, folders and globs."""
    from isentrope.data.source import find_text_files

    return [path for pattern in patterns for path in find_text_files(pattern)]
