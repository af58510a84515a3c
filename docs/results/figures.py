"""Draw the figures of README.md that no run draws itself, from the raw files: python docs/results/figures.py"""

from __future__ import annotations

from pathlib import Path

from study_blocks import load_fitted_models

from isentrope.report.figures.temperatures import draw_fitted_models

FIGURES = Path(__file__).parent / "figures"

if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for path in draw_fitted_models(load_fitted_models(), FIGURES / "temperatures"):
        if path.suffix == ".svg":
            path.unlink()  # the page shows the other
        else:
            print(path)
