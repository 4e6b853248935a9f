"""Training by verl on a cluster: its configuration, and the bridge between its trainer and a run."""
