"""Pieces of a page: tables that are only read, figures inside it, and what is folded away."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

HEAVY = 2 << 20  # bytes of an SVG above which the PNG beside it is shown
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


def plain(rows: list[list[str]], name: str) -> str:
    """A table that is only read; its first line has the headings."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows[1:]
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="plain">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(paths: dict[str, Path], caption: str) -> str:
    """One of a figure's files by suffix: the SVG, or the PNG where that is heavy."""
    path = paths.get(".svg") or paths[".png"]
    if ".png" in paths and path.stat().st_size > HEAVY:
        path = paths[".png"]
    data, words = base64.b64encode(path.read_bytes()).decode(), escape(caption)
    return (
        f'<figure><img src="data:{KINDS[path.suffix]};base64,{data}" alt="{words}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def fold(title: str, content: Any) -> str:
    return f"<details><summary>{escape(title)}</summary>{tree(content)}</details>" if content else ""


def tree(content: Any) -> str:
    if isinstance(content, dict):
        pairs = "".join(f"<dt>{escape(str(key))}</dt><dd>{tree(value)}</dd>" for key, value in content.items())
        return f"<dl>{pairs}</dl>"
    if isinstance(content, list):
        return ", ".join(tree(value) for value in content)
    return escape("none" if content is None else str(content))
