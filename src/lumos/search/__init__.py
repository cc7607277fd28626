"""Search: the best configurations of a run, by time, cost, energy or number of GPUs."""
