"""`python -m isentrope.cli`, which launchers of several processes need."""

from isentrope.cli import app

if __name__ == "__main__":
    app()
