"""HTML fragments: plain tables, embedded figures and folded details."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

MAX_SVG_BYTES = 2 << 20  # a larger SVG is replaced by its PNG
MIME_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def render_table(rows: list[list[str]], name: str) -> str:
    """Render a table without sorting; its first row has the headings."""
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows[1:]
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="plain">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def render_figure(paths: dict[str, Path], caption: str) -> str:
    """Embed a figure, given its files by suffix: the SVG, or the PNG if that is too large."""
    path = paths.get(".svg") or paths[".png"]
    if ".png" in paths and path.stat().st_size > MAX_SVG_BYTES:
        path = paths[".png"]
    data, text = base64.b64encode(path.read_bytes()).decode(), escape(caption)
    return (
        f'<figure><img src="data:{MIME_TYPES[path.suffix]};base64,{data}" alt="{text}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def render_details(title: str, content: Any) -> str:
    return f"<details><summary>{escape(title)}</summary>{render_value(content)}</details>" if content else ""


def render_value(content: Any) -> str:
    if isinstance(content, dict):
        pairs = "".join(f"<dt>{escape(str(key))}</dt><dd>{render_value(value)}</dd>" for key, value in content.items())
        return f"<dl>{pairs}</dl>"
    if isinstance(content, list):
        return ", ".join(render_value(value) for value in content)
    return escape("none" if content is None else str(content))
