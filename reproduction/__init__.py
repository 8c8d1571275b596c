"""The papers' figures, the ledger of their claims, and measuring studies: `python -m reproduction`, from a clone."""
