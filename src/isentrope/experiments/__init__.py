"""Plans of experiments, and running them."""
