"""Several runs at a time: comparisons, recipes of published tables, studies and the ledger of claims."""
