"""Optional packages: an import that fails names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# the extra that installs each optional package; where several do, the smallest
EXTRAS = {
    "scipy": "hf",
    "transformers": "hf",
    "huggingface_hub": "hf",
    "safetensors": "hf",
    "tokenizers": "hf",
    "matplotlib": "report",
    "jinja2": "report",
    "typer": "cli",
    "rich": "cli",
    "yaml": "cli",
    "pydantic": "cli",
    "accelerate": "train",
    "sklearn": "train",
    "pyarrow": "train",
    "filelock": "train",
    "datasets": "hub",
    "gguf": "smollm2",
    "lm_eval": "harness",
}


class MissingExtraError(ImportError):
    """An optional package is not installed; the message names the extra."""


@contextmanager
def name_missing_extras() -> Iterator[None]:
    """Turn a failed import of an optional package in the block into a `MissingExtraError`.

    Any other ImportError, such as one from inside an installed package, is left as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None:
            raise
        message = f'{package} is not installed: pip install "isentrope[{EXTRAS[package]}]"'
        raise MissingExtraError(message, name=package) from error


def require_package(package: str) -> None:
    """Raise `MissingExtraError` if a package is missing that another one imports without naming the extra."""
    with name_missing_extras():
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
