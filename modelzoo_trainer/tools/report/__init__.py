"""Reports of runs: one HTML file with curves and tables, made from the run folders."""
