"""The `isentrope` command: one subcommand, one function."""

from isentrope.cli import corpora, fitting, looking, studies, training
from isentrope.cli.base import app

__all__ = ["app", "corpora", "fitting", "looking", "studies", "training"]
