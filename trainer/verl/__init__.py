"""verl: reading its configuration."""
