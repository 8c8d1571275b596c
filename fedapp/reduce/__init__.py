"""Reductions of the replies of all clients: their declaration, and their plain, robust and noised forms."""
