"""The round loop of a run, the rollback, and the check of a new state."""
