"""The programs of a federation of real devices: the server's gate, the supervised node, the deployment check."""
