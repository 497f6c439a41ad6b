"""Programs around a run: launchers, the supervisor, plans, reports, foreign configurations."""
