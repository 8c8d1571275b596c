"""The client side of each method: `FedClient` and, where the local step differs, one file a method."""
