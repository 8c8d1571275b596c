"""Tests of `reproduction`."""
