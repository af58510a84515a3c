"""Style of tables in a terminal."""

from __future__ import annotations

from typing import Any

from rich import box

TABLE_STYLE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "title_style": "bold",
    "title_justify": "left",
    "caption_justify": "left",
    "pad_edge": False,
    "collapse_padding": True,
}
