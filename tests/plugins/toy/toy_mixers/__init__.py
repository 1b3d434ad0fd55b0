"""An example of an installed plug-in: the mixer `toy_gate` and the task `toy_echo`."""
