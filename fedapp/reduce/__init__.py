"""Reductions: what a server makes of the replies of all clients, and in which form it does so."""
