"""Find the small models that ship with the repository."""

from __future__ import annotations

from pathlib import Path

SHIPPED_MODELS = Path(__file__).parents[1] / "models" / "shipped"


def find_shipped_model(name: str) -> Path:
    """Return the folder of a model that ships with the repository and its sdist.

    Args:
        name: of its folder: `llama`, `dot` or `cosine`.

    Raises:
        ValueError: there is no such model, or the package came as a wheel, which has none.
    """
    folder = SHIPPED_MODELS / name
    if (folder / "config.json").is_file():
        return folder
    if not SHIPPED_MODELS.is_dir():
        raise ValueError(
            f"the model {name!r} is in isentrope's repository and not in its wheel: clone the repository, or unpack "
            "the sdist, and run `pip install -e .` there"
        )
    names = sorted(path.parent.name for path in SHIPPED_MODELS.glob("*/config.json"))
    raise ValueError(f"shipped: expected one of {', '.join(names)}, got {name!r}")
