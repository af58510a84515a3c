"""Packages that are installed only with an extra: where one is missing, the extra is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# packages that isentrope imports, by the extra that brings them
EXTRAS = {
    "transformers": "hf",
    "huggingface_hub": "hf",
    "safetensors": "hf",
    "tokenizers": "hf",
    "accelerate": "train",
    "yaml": "train",
    "sklearn": "data",
    "pyarrow": "data",
    "datasets": "hub",
    "gguf": "smollm2",
    "lm_eval": "harness",
}


class MissingExtraError(ImportError):
    """A package that is not installed, and the extra to install."""


@contextmanager
def named_extras() -> Iterator[None]:
    """Name the extra to install where the block imports a package that is not there.

    Any other ImportError, such as one from inside an installed package, stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None:
            raise
        words = f'{package} is not installed: pip install "isentrope[{EXTRAS[package]}]"'
        raise MissingExtraError(words, name=package) from error


def require(package: str) -> None:
    """The same before a package is needed by another one, which would say less."""
    with named_extras():
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
