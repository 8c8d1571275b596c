"""The server side of each method: one file a method, each with `METHOD`."""

import fedapp  # noqa: F401  makes `clients` ours too, whatever the user's folder holds
