"""Search for the best configuration by time, cost, energy or number of GPUs."""
