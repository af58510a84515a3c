"""What templates are given: rendering with escapes, embedded figures, and headings of sections."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isentrope.utils.extras import name_missing_extras

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

MAX_SVG_BYTES = 2 << 20  # a larger SVG is replaced by its PNG
MIME_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
MAX_NAMES = 3  # more are counted


@dataclass(frozen=True)
class Section:
    """One section of a page.

    Attributes:
        id: of its element.
        title: what was studied.
        kind: what is shown, the heading where the page has no other section.
        model: which model.
        texts: which texts.
        body: rendered HTML.
        note: more, beside model and texts.
        count: a note in the table of contents.
    """

    id: str
    title: str
    kind: str
    model: str
    texts: str
    body: Markup
    note: str = ""
    count: str = ""


@cache
def build_environment() -> Environment:
    """Build the environment of the templates: everything is escaped, and a name that is not given is an error."""
    with name_missing_extras():
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["break_recipe"] = break_recipe
    return environment


def render(template: str, **values: Any) -> Markup:
    """Render a template; what it returns is not escaped again in another."""
    from markupsafe import Markup

    return Markup(build_environment().get_template(template).render(values))


def render_page_template(template: str, **values: Any) -> Markup:
    """Render a whole page, with its style and its script in it."""
    from markupsafe import Markup

    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return render(template, style=Markup(style), script=Markup(script), **values)


def embed_figure(paths: dict[str, Path], caption: str) -> dict[str, str]:
    """Return source and caption of a figure, given its files by suffix: the SVG, or the PNG if that is too large."""
    path = paths.get(".svg") or paths[".png"]
    if ".png" in paths and path.stat().st_size > MAX_SVG_BYTES:
        path = paths[".png"]
    data = base64.b64encode(path.read_bytes()).decode()
    return {"source": f"data:{MIME_TYPES[path.suffix]};base64,{data}", "caption": caption}


def find_figure(stem: Path) -> dict[str, Path]:
    """Return the files of a figure by suffix, given its path without one."""
    return {suffix: path for suffix in MIME_TYPES if (path := stem.with_name(stem.name + suffix)).is_file()}


def break_recipe(recipe: str) -> Markup:
    """Let a long recipe, alone or in a sentence, wrap at its parts and options."""
    from markupsafe import Markup, escape

    text = str(escape(recipe))
    return Markup(text.replace("+", "<wbr>+").replace(",", ",<wbr>").replace(":", ":<wbr>"))


def list_names(names: Iterable[str]) -> str:
    """Join a few names, each once; further ones are counted."""
    known: Sequence[str] = [name for name in dict.fromkeys(names) if name]
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(known[:MAX_NAMES]) + more
