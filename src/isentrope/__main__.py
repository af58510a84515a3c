"""The command `isentrope`, also `python -m isentrope`: without the packages of commands it says what to install."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from isentrope.utils.extras import MissingExtraError, name_missing_extras


def main() -> None:
    """Run the command line; exit with status 2 and one line if the extra `cli` is not installed."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries are for terminals, not for logs
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding without Greek letters ends no command
    try:
        with name_missing_extras():
            from isentrope.cli import app
    except MissingExtraError as error:
        print(f"isentrope: {error}", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
