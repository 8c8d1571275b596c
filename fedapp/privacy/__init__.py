"""Statistics with noise, in place of what methods send without `dp`."""
