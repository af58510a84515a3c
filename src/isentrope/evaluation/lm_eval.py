r"""lm-evaluation-harness: its model type `isentrope`, any transformers model under a recipe.

Importing this module registers it. The harness's own command line, with this type among its models:

    python -m isentrope.evaluation.lm_eval run --model isentrope --tasks … \
        --model_args "pretrained=…,recipe=…,max_length=…"
"""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from isentrope.evaluation.recipe_texts import PLAIN, check_recipes
from isentrope.hf.extend import extend
from isentrope.hf.extension import get_extension
from isentrope.hf.loading import load
from isentrope.hf.names import CONFIG_KEY
from isentrope.positions import CLEX, NTK
from isentrope.recipe import LAYERS, PARTS, Recipe
from isentrope.utils.extras import name_missing_extras
from isentrope.version import __version__

with name_missing_extras():
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

logger = logging.getLogger("isentrope")


@register_model(CONFIG_KEY)
class Isentrope(HFLM):  # type: ignore[misc, unused-ignore]
    """The harness's own type `hf`, with all its arguments, and a recipe for the model's attention.

    Args:
        pretrained: a model, or its folder or name on the hub.
        recipe: its text, with `;` for `,`, at which the harness splits arguments; of a recipe per layer the semicolons
            stay as they are. None or "plain" changes nothing. A model saved with a recipe has its own.
        allow_untrained: as in `isentrope.extend`.
        **options: those of `hf`. Among them `max_length`, to which inputs are cut; by default the length in the
            model's config, and nothing is measured beyond it.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        recipe: str | None = None,
        allow_untrained: bool = False,
        **options: Any,
    ) -> None:
        self.recipe_text = _parse_argument(recipe, options)
        super().__init__(pretrained, **options)
        if self.recipe_text not in (None, PLAIN):
            extend(self.model, self.recipe_text, allow_untrained=allow_untrained)
        if self.batch_size != 1 and _depends_on_row(self.recipe):
            raise ValueError(
                f"batch_size: expected 1 under {str(self.recipe)!r}, which depends on the length of the row, got "
                f"{self.batch_size}: the harness pads rows without a mask"
            )
        if self.recipe != Recipe() and not options.get("max_length"):
            logger.warning("max_length: left out, so inputs are cut to %d tokens as without recipe", self.max_length)

    @property
    def recipe(self) -> Recipe:
        """The model's recipe, with open lengths filled in."""
        return get_extension(self.model).recipe if hasattr(self.model.config, CONFIG_KEY) else Recipe()

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a reply; of a model without one its first token, which replies do not have."""
        end: int | None = super().eot_token_id
        return self.prefix_token_id if end is None else end

    def _create_model(self, pretrained: str, **options: Any) -> None:
        if (saved := getattr(self.config, CONFIG_KEY, None)) is not None:
            if self.recipe_text is not None:
                own = str(Recipe.from_dict(saved["recipe"]))
                raise ValueError(f"recipe: expected none for a model saved with {own!r}, got {self.recipe_text!r}")
            self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=load)
        super()._create_model(pretrained, **options)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into its results beside the arguments."""
        return super().get_model_info() | {"model_recipe": str(self.recipe), "isentrope_version": __version__}


def _parse_argument(recipe: Any, options: dict[str, Any]) -> str | None:
    """Check a recipe's text before a model is loaded, and restore its commas."""
    if recipe is None:
        return None
    if not isinstance(recipe, str):
        raise ValueError(f"recipe: expected its text, got {recipe!r}")
    known = {option for _, part in PARTS.values() for option in part.options()}
    if astray := sorted(known & set(options)):
        raise ValueError(
            f"recipe: expected ; in place of , between its options, as in 'selfextend:window=1024;group=8', got "
            f"{recipe!r} and {', '.join(astray)} apart from it"
        )
    text = _restore_commas(recipe.strip())
    check_recipes([text])
    return text


def _restore_commas(text: str) -> str:
    """Put commas in place of semicolons, except before layers=… of a recipe per layer, where a semicolon belongs."""
    text = text.replace(";", ",")
    if text.partition(":")[0].strip() != LAYERS:
        return text
    layers = r"\s*[\d*][\d,*\s-]*="
    return re.sub(rf"(^[^:]*:{layers})|,({layers})", lambda match: match[1] or f";{match[2]}", text)


def _depends_on_row(recipe: Recipe) -> bool:
    """Whether padding at the end of a row changes how its tokens are read."""
    by_length = (
        isinstance(part, CLEX)
        or (isinstance(part, NTK) and part.dynamic)
        or getattr(part, "depends_on_row_length", False)
        for part in recipe.parts
    )
    laws = (law for one in recipe.recipes for law in one.temperatures)
    return any(by_length) or any(getattr(law, "count", "visible") == "sequence" for law in laws)


if __name__ == "__main__":
    cli_evaluate()
