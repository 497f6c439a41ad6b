"""What any part may use and what knows no trainer: annotations, constraints, arguments, paths."""
