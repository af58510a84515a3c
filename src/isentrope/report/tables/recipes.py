"""The parts of recipes for a terminal: all of them in short, or one in detail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from isentrope.recipe.catalog import PartDescription

INDENT = (0, 0, 0, 4)  # above, right, below, left
TRAINING_NOTE = "A model must be trained with it."


def render_catalog(parts: Sequence[PartDescription]) -> Iterator[RenderableType]:
    """Render every part in three lines or so, under a heading for each kind."""
    for kind, group in groupby(parts, lambda part: part.kind):
        yield Text(f"\n{kind}", style="bold underline")
        for part in group:
            yield Group(
                _render_heading(part),
                Padding(Text(part.formula), INDENT),
                *([Padding(Text(_list_options(part), style="cyan"), INDENT)] if part.options else []),
            )
    yield Text("\nisentrope recipes PART shows one in detail; a recipe joins parts by +.")


def render_part(part: PartDescription) -> Group:
    """Render one part: formula, paper, options with their meaning, and details."""
    blocks: list[RenderableType] = [_render_heading(part), Text(part.formula)]
    if part.details:
        blocks.append(Text(f"\n{part.details}"))
    if part.needs_training:
        blocks.append(Text(f"\n{TRAINING_NOTE}", style="yellow"))
    if part.options:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="bold")
        for head in ("\noption", "\ndefault", "\nmeaning"):
            table.add_column(head, overflow="fold")
        for option in part.options:
            default = "required" if option.required else option.text.removeprefix(option.name).removeprefix("=")
            table.add_row(Text(option.name, style="cyan"), Text(default or "–"), Text(option.meaning))
        blocks.append(table)
    return Group(*blocks)


def _render_heading(part: PartDescription) -> Text:
    heading = Text.assemble((part.name, "bold"))
    if part.source:
        heading.append(f"  {part.source}", style="dim")
    return heading


def _list_options(part: PartDescription) -> str:
    return ", ".join(option.text for option in part.options)
