"""Reports of runs: one HTML file with the curves, read from the folders of the runs."""
