"""From a configuration to what one client works on, in a simulation and on a real node."""
