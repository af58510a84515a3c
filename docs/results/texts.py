"""The texts of the long-context plans, from a file of novels (one JSON object a line, `id` and `text`).

    python docs/results/texts.py en_books.jsonl.xz --out texts

novels.jsonl: ten novels, every 14th of the file, each from its 20,000th character on (past the front matter) to its
240,000th. pairs.jsonl: no novel there has 131,072 tokens, so sixteen times two of the others, joined.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from isentrope.data.corpus import read_documents
from isentrope.utils.files import write_atomically

START, END = 20_000, 240_000
TEN = range(0, 140, 14)
LONG = 400_000  # characters, at which the file cuts its novels
PAIRS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("--out", type=Path, default=Path("texts"))
    options = parser.parse_args()
    books = [(document.name, document.text or "") for document in read_documents([options.books])]
    others = [book for index, book in enumerate(books) if index not in TEN and len(book[1]) >= LONG]
    write(options.out / "novels.jsonl", [(name, text[START:END]) for name, text in (books[i] for i in TEN)])
    write(
        options.out / "pairs.jsonl",
        [joined(*pair) for pair in zip(others[: 2 * PAIRS : 2], others[1::2], strict=False)],
    )


def joined(one: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    return f"{one[0]} + {other[0]}", f"{one[1][START:]}\n\n{other[1][START:]}"


def write(path: Path, texts: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts)
    print(f"{path}: {len(texts)} texts")


if __name__ == "__main__":
    main()
