"""Figures of the papers, drawn from run directories."""
