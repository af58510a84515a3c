"""The `isentrope` command: one subcommand, one function."""

from isentrope.cli import calibrate, data, retrieval, study, train
from isentrope.cli.common import app

__all__ = ["app", "calibrate", "data", "retrieval", "study", "train"]
