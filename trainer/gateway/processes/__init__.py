"""A gateway in several processes; `group` is the run's side."""
