r"""lm-evaluation-harness: its model type `isentrope`, any transformers model under a recipe.

Importing this module registers it. The harness's own command line, with this type among its models:

    python -m isentrope.evaluation.lm_eval run --model isentrope --tasks … \
        --model_args "pretrained=…,recipe=…,max_length=…"
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from isentrope import __version__
from isentrope.evaluation.recipes import PLAIN, check_recipes
from isentrope.hf.extend import extend, get_extension
from isentrope.hf.loading import load
from isentrope.hf.names import CONFIG_KEY
from isentrope.positions import CLEX, NTK
from isentrope.recipe import PARTS, Recipe
from isentrope.utils.extras import name_missing_extras

with name_missing_extras():
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

logger = logging.getLogger("isentrope")


@register_model(CONFIG_KEY)
class Isentrope(HFLM):  # type: ignore[misc, unused-ignore]
    """The harness's own type `hf`, with all its arguments, and a recipe under which its model attends.

    recipe: its text, in which `;` may stand for `,`, at which the harness splits arguments. None or "plain": nothing is
    changed. A model saved with a recipe brings its own.
    max_length: tokens that are read of an input, as in `hf`: what is longer is cut. Left out it is what the model's
    config says, and nothing is measured beyond it.
    allow_untrained: as in `isentrope.extend`.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        recipe: str | None = None,
        allow_untrained: bool = False,
        **options: Any,
    ) -> None:
        self.asked = _text(recipe, options)
        super().__init__(pretrained, **options)
        if self.asked not in (None, PLAIN):
            extend(self.model, self.asked, allow_untrained=allow_untrained)
        if self.batch_size != 1 and _by_row(self.recipe):
            raise ValueError(
                f"batch_size: expected 1 under {str(self.recipe)!r}, which goes by the length of the row, got "
                f"{self.batch_size}: the harness pads rows and does not say where"
            )
        if self.recipe != Recipe() and not options.get("max_length"):
            logger.warning("max_length: left out, so inputs are cut to %d tokens as without recipe", self.max_length)

    @property
    def recipe(self) -> Recipe:
        """What the model attends under, open lengths filled in."""
        return get_extension(self.model).recipe if hasattr(self.model.config, CONFIG_KEY) else Recipe()

    def _create_model(self, pretrained: str, **options: Any) -> None:
        if (saved := getattr(self.config, CONFIG_KEY, None)) is not None:
            if self.asked is not None:
                own = str(Recipe.from_dict(saved["recipe"]))
                raise ValueError(f"recipe: expected none for a model saved with {own!r}, got {self.asked!r}")
            self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=load)
        super()._create_model(pretrained, **options)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results beside the arguments."""
        return super().get_model_info() | {"model_recipe": str(self.recipe), "isentrope_version": __version__}


def _text(recipe: Any, options: dict[str, Any]) -> str | None:
    """The recipe's text, looked at before a model is loaded."""
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
    text = recipe.replace(";", ",").strip()
    check_recipes([text])
    return text


def _by_row(recipe: Recipe) -> bool:
    """Whether a token is read otherwise in a longer row, were it only padding at the end."""
    position = recipe.position
    turns = isinstance(position, CLEX) or (isinstance(position, NTK) and position.dynamic)
    return turns or getattr(recipe.temperature, "count", "visible") == "sequence"


if __name__ == "__main__":
    cli_evaluate()
