"""Where a run runs: in this process, on a simulation SuperLink with Ray, on real devices; and what it needs there."""
