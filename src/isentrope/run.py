"""Run another program with isentrope imported: python -m isentrope.run transformers serve FOLDER

Programs that never import isentrope refuse folders of extended models, by the name of their model type. Under this
launcher they load them, recipe included. PROGRAM is an installed command, a script, or a module after `-m`.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

from isentrope.utils.extras import MissingExtraError, name_missing_extras

USAGE = "usage: python -m isentrope.run (COMMAND | SCRIPT.py | -m MODULE) [ARGUMENT …]"


def main(arguments: list[str]) -> object:
    """Run a program in this process, with the arguments that follow its name; return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(f"{USAGE}\n\n{(__doc__ or '').strip()}")
        return 0 if arguments and arguments[0] != "-m" else 2
    try:
        with name_missing_extras():
            import isentrope.hf  # noqa: F401  # registers the model type, once transformers has imported all of itself
    except MissingExtraError as error:
        print(f"isentrope.run: {error}", file=sys.stderr)
        return 2
    program, *rest = arguments
    if program == "-m":
        sys.argv = rest
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if Path(program).is_file():
        sys.argv = arguments
        sys.path.insert(0, str(Path(program).resolve().parent))
        return runpy.run_path(program, run_name="__main__")
    commands = entry_points(group="console_scripts", name=program)
    if not commands:
        print(f"isentrope.run: no installed command, and no file, is called {program!r}\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv = arguments
    return next(iter(commands)).load()()


if __name__ == "__main__":
    result = main(sys.argv[1:])
    sys.exit(result if isinstance(result, int) else None)
