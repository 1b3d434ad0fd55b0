"""What lm-eval reads by itself: task files, and the functions that they name."""
