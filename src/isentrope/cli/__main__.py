"""`python -m isentrope.cli`, for launchers of several processes."""

from isentrope.__main__ import main

if __name__ == "__main__":
    main()
