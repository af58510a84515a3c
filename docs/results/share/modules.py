"""The test documents of a prepared corpus of SymPy's sources as texts.

python docs/results/share/modules.py CORPUS --out texts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from isentrope.data.prepared import PreparedCorpus
from isentrope.data.source import Source
from isentrope.utils.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="folder that isentrope data prepare sympy wrote")
    parser.add_argument("--out", type=Path, default=Path("texts"))
    options = parser.parse_args()
    held_out = set(PreparedCorpus.open(options.corpus).hashes("test"))
    texts = [{"id": d.name, "text": d.text or ""} for d in Source("sympy").documents() if d.sha256 in held_out]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "modules.jsonl"
    with write_atomically(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
    print(f"{path}: {len(texts)} modules")


if __name__ == "__main__":
    main()
