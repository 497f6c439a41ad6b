"""Programs around a run: launchers, the supervisor, plans, tests, reports, foreign files."""
