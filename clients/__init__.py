"""The client side of each method: `FedClient` and, where the local step differs, one file a method."""

import fedapp  # noqa: F401  makes `strategies` ours too, whatever the user's folder holds
