"""The model card of an extended model: what it is, what was measured, how to load it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from isentrope.hf.names import CONFIG_KEY
from isentrope.recipe import Recipe
from isentrope.utils.files import write_atomically

CARD = "README.md"
GENERATED_MARK = "<!-- isentrope: this card is written anew with every save; remove this line to keep your own -->"
FIRST_COLUMNS = ("tokens", "law", "perplexity, plain", "perplexity, extended")  # config.json sorts them by name


def write_card(folder: Path, config: Any) -> None:
    """Write the model card of an extended model, unless somebody wrote one of their own."""
    path = folder / CARD
    if path.exists() and GENERATED_MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    with write_atomically(path) as partial:
        partial.write_text(render_card(config), encoding="utf-8")


def render_card(config: Any) -> str:
    """Render the model card of an extended model from its config."""
    saved: dict[str, Any] = getattr(config, CONFIG_KEY)
    recipe = Recipe.from_dict(saved["recipe"])
    base = str(getattr(config, "name_or_path", "") or "")
    on_hub = base.count("/") == 1 and not Path(base).exists() and not base.startswith((".", "/", "~"))
    parts = tuple({str(part): part for part in recipe.parts}.values())
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {base}"] if on_hub else []),
        "tags:",
        "- isentrope",
        "- long-context",
        "---",
        GENERATED_MARK,
        "",
        f"# {base.rstrip('/').rpartition('/')[2] or config.model_type}, extended",
        "",
        f"A {config.model_type} model whose attention follows the recipe `{shorten_recipe(str(recipe))}` "
        "([isentrope](https://pypi.org/project/isentrope/)).",
        "",
        "| part | what it does |",
        "|---|---|",
        *(f"| `{shorten_recipe(str(part))}` | {_summarize(part)} |" for part in parts),
        *(["| `plain` | nothing changed |"] if not parts else []),
        "",
        "## Load it",
        "",
        "```python",
        "import isentrope  # pip install 'isentrope[hf]'; without it the model type is unknown and loading fails",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this folder")  # or isentrope.load("this folder")',
        "print(isentrope.describe(model))",
        "```",
        "",
        "Programs that do not import isentrope run through it: `python -m isentrope.run transformers serve FOLDER`.",
        "",
        "## Measured",
        "",
        *_render_measurements(saved.get("measured")),
        *(["", f"**Warning.** {saved['warning']}"] if "warning" in saved else []),
    ]
    return "\n".join(lines) + "\n"


def _render_measurements(rows: list[dict[str, Any]] | None) -> list[str]:
    if not rows:
        return ["Nothing was measured when this was saved: `isentrope evaluate MODEL --data TEXTS` compares recipes."]
    given = dict.fromkeys(key for row in rows for key in row)
    columns = [*(key for key in FIRST_COLUMNS if key in given), *(key for key in given if key not in FIRST_COLUMNS)]
    body = ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    table = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]
    return ["When the recipe was chosen; what the model was trained on since is not in these numbers.", "", *table]


def shorten_recipe(text: str, max_length: int = 160) -> str:
    """Cut the text of a recipe or of a part: those with fitted tables are long."""
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _summarize(part: object) -> str:
    text = inspect.getdoc(type(part)) or type(part).__name__
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
