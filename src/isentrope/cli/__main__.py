"""`python -m isentrope.cli`, for launchers of several processes."""

from isentrope.cli import app

if __name__ == "__main__":
    app()
