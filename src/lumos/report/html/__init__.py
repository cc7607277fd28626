"""Reports as one HTML file that needs nothing else: no network, and no script for its tables."""
