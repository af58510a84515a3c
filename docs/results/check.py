"""Recompute the numbers of the results pages from the raw files beside them.

    python docs/results/check.py            # exits with 1 and a line for each mismatch
    python docs/results/check.py --write    # writes hashes and marked blocks anew

Checked: the hash of every raw file (hashes.json, with the commits that measured it); the numbers of every plan's
table.md and beside.md, and its claims.json; the leaderboards of frontier/README.md; and in pages the blocks between
`<!-- numbers: NAME ARGUMENTS -->` and `<!-- end -->`, each printed by the function `render_NAME` of study_blocks.py,
paper_blocks.py, share_blocks.py, fit_blocks.py, study_costs.py or benchmark_blocks.py.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from isentrope.report.tables.plan_tables import write_tables

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # what prints the blocks is beside this file

import benchmark_blocks  # noqa: E402
import fit_blocks  # noqa: E402
import paper_blocks  # noqa: E402
import share_blocks  # noqa: E402
import study_blocks  # noqa: E402
import study_costs  # noqa: E402

ROOT = HERE.parents[1]
HASHES = HERE / "hashes.json"
RAW_FILES = (
    "results.jsonl",
    "results.jsonl.gz",
    "plan.json",
    "perplexity.json",
    "retrieval.json",
    "times.json",
    "calibrate.json",
    "peaks.json",
)
RECORD = "measured anew? record it: python docs/results/check.py --write"
PAGES = (
    "docs/results/README.md",
    "docs/results/paper/README.md",
    "docs/results/archive/README.md",
    "docs/results/share/README.md",
    "docs/laws.md",
    "docs/performance.md",
    "docs/performance-details.md",
    "README.md",
)
BLOCK = re.compile(r"(<!-- numbers: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write hashes and marked blocks anew")
    write = parser.parse_args().write
    problems = [*check_hashes(write), *check_tables(), *check_pages(write), *check_frontier()]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} mismatches" if problems else "every number checked is that of its raw file")
    sys.exit(1 if problems else 0)


def list_raw_files() -> list[Path]:
    """List the raw results files, in order."""
    return sorted(path for name in RAW_FILES for path in HERE.rglob(name))


def describe_file(path: Path) -> dict[str, Any]:
    """Return a raw file's hash, and the commits that it names."""
    content = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    commits = sorted(set(re.findall(r'"commit": ?"([0-9a-z-]+)"', content.decode("utf-8"))))
    return {"sha256": hashlib.sha256(content).hexdigest(), "commits": commits}


def check_hashes(write: bool) -> Iterator[str]:
    """Compare every raw file with its recorded hash."""
    files = {str(path.relative_to(HERE)): describe_file(path) for path in list_raw_files()}
    for name, file in files.items():
        if not file["commits"] or "unknown" in file["commits"]:
            yield f"{name}: expected the commit that measured it, got none; run it again with ISENTROPE_COMMIT set"
    if write:
        HASHES.write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
        return
    known = json.loads(HASHES.read_text(encoding="utf-8"))
    for name in sorted(known.keys() | files.keys()):
        if name not in files or name not in known:
            yield f"{name}: {'missing' if name not in files else 'not in hashes.json'}; {RECORD}"
        elif files[name] != known[name]:
            yield f"{name}: changed since its hash was recorded; {RECORD}"


def list_plans() -> list[Path]:
    """List the folders of plans for masked models."""
    return sorted(path.parent for path in HERE.rglob("plan.json"))


def check_tables(plans: list[Path] | None = None) -> Iterator[str]:
    """Write each plan's table and claims anew in a temporary folder, and compare."""
    for folder in list_plans() if plans is None else plans:
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary)
            for name in ("plan.json", "results.jsonl", "results.jsonl.gz", "timings.jsonl"):
                if (folder / name).is_file():
                    shutil.copy(folder / name, copy)
            write_tables(copy)
            for name in ("table.md", "claims.json", "beside.md"):
                kept, anew = folder / name, copy / name
                if kept.is_file() and anew.is_file() and read_numbers(kept) != read_numbers(anew):
                    yield f"{kept.relative_to(ROOT)}: not what its results.jsonl gives"


def read_numbers(path: Path) -> object:
    """Return the rows of a page's tables, or what a JSON file holds: words around tables may change.

    Numbers of a JSON file count up to nine digits, since processors add in different orders.
    """
    text = path.read_text(encoding="utf-8")
    rounded = partial(json.loads, parse_float=lambda number: float(f"{float(number):.9g}"))
    return rounded(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.startswith("|")]


def check_pages(write: bool) -> Iterator[str]:
    """Print every marked block anew, and compare or replace it."""
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        anew = BLOCK.sub(lambda match: match[1] + render(match[2], match[3].split()) + match[5], text)
        if anew == text:
            continue
        if write:
            path.write_text(anew, encoding="utf-8")
            continue
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(anew), strict=True):
            if old[4] != new[4]:
                yield f"{name}: the block {old[2]}{old[3]} is not what the raw files give"


def check_frontier() -> Iterator[str]:
    """Print the leaderboards of the comparison anew, and compare; `frontier/tables.py` writes them."""
    page = HERE / "frontier" / "README.md"
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "frontier"
        shutil.copytree(page.parent, copy)
        command = [sys.executable, str(HERE / "frontier" / "tables.py"), "--folder", str(copy)]
        subprocess.run(command, check=True, capture_output=True)
        if (copy / page.name).read_text(encoding="utf-8") != page.read_text(encoding="utf-8"):
            yield f"{page.relative_to(ROOT)}: not what its raw files give; python docs/results/frontier/tables.py"


def render(name: str, arguments: list[str]) -> str:
    """Print a block by the name of its function."""
    if name not in RENDERERS:
        raise ValueError(f"numbers: expected one of {', '.join(RENDERERS)}, got {name!r}")
    return RENDERERS[name](*arguments)


RENDERERS: dict[str, Callable[..., str]] = {
    name.removeprefix("render_"): function
    for module in (study_blocks, paper_blocks, share_blocks, fit_blocks, study_costs, benchmark_blocks)
    for name, function in vars(module).items()
    if name.startswith("render_")
}

if __name__ == "__main__":
    main()
