"""The `isentrope` command: one module per subcommand."""

from isentrope.utils.extras import name_missing_extras

with name_missing_extras():
    from isentrope.cli import (
        calibrate,
        compare,
        data,
        demo,
        evaluate,
        explore,
        far_laws,
        inspect,
        laws,
        perplexity,
        plan_scale,
        recipes,
        report,
        retrieval,
        study,
        train,
    )
    from isentrope.cli.common import app

__all__ = [
    "app", "calibrate", "compare", "data", "demo", "evaluate", "explore", "far_laws", "inspect", "laws", "perplexity",
    "plan_scale", "recipes", "report", "retrieval", "study", "train",
]  # fmt: skip
