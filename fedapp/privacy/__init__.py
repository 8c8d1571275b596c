"""Noised forms of the statistics that clients send."""
