"""Packed documents with gradients: one after another against FlexAttention on all of them, by their length.

    python benchmarks/rows.py [--tokens 32768] [--lengths 512,1024,2048,4096,8192] --out results/rows.json

Forward and backward of one packed row, in 32 heads of 128 and in 9 of 64 on 3 key heads. From which length on the first
is faster decides `MIN_ROW_ELEMENTS` in dispatch.py; a row of the table has its elements of q in a document.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from unittest.mock import patch

from calls import CAUSAL, Case, Shape, make_call, make_tensors
from measure import Row, save, sizes, times
from methods import branched, windowed

from isentrope import dispatch
from isentrope.core.switches import DEFAULTS
from isentrope.utils.provenance import collect_provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="of documents")
    parser.add_argument("--out", type=Path, default=Path("results/rows.json"))
    options = parser.parse_args()
    size = sizes()
    if size.device != "cuda":
        parser.error("expected a GPU: elsewhere rows never go to FlexAttention")
    rows: list[Row] = []
    for method in (branched(1024)[0], windowed(1024)[0]):
        for heads, key_heads, d in ((32, 32, 128), (9, 3, 64)):
            for length in map(int, options.lengths.split(",")):
                shape = Shape(1, heads, key_heads, options.tokens, options.tokens, d)
                lengths = (length,) * (options.tokens // length)
                case = Case("rows", method.name, method.recipe, shape, 0, None, None, CAUSAL, lengths, grad=True)
                tensors = make_tensors(size, case)
                calls = []
                for least in (0, float("inf")):
                    with patch.object(dispatch, "MIN_ROW_ELEMENTS", least):
                        call = make_call(case, tensors, DEFAULTS)
                        call()  # the choice is kept with the layout
                    calls.append(partial(run, call, least))
                one_by_one, together = times(calls, size)
                elements = heads * length * d
                rows.append(
                    {"method": method.name, "heads": heads, "size": d, "length": length, "elements": elements}
                    | {"rows_ms": one_by_one, "flex_ms": together, "ratio": one_by_one / together}
                )
                print(*(f"{x:.3g}" if isinstance(x, float) else x for x in rows[-1].values()), sep="\t", flush=True)
                save(options.out, rows, run=collect_provenance(), tokens=options.tokens)


def run(call, least: float) -> object:  # type: ignore[no-untyped-def]
    with patch.object(dispatch, "MIN_ROW_ELEMENTS", least):
        return call()


if __name__ == "__main__":
    main()
