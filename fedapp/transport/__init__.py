"""What travels and how: records, the choice of arrays, the clients as the server sees them, checkpoints."""
