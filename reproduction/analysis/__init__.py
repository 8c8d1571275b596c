"""Computations behind the papers' figures."""
