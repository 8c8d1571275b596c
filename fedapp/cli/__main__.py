"""`python -m fedapp.cli` is the console script."""

from __future__ import annotations

from fedapp.cli import main

if __name__ == "__main__":
    main()
