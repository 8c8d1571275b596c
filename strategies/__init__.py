"""The server side of each method: one file a method, each with `METHOD`."""
