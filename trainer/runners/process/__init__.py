"""Workers in processes: a stuck agent is killed with everything it started."""
