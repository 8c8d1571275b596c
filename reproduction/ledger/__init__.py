"""The ledger of the papers' claims: its runs, the rules that decide them, and the archive of runs as text."""
