"""The trainer: everything between an agent's calls and a better policy."""
