"""Communication: records, the selection of arrays, the clients as the server sees them, checkpoints."""
