"""The round loop of a run, and what may take a round back."""
