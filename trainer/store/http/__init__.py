"""The store behind HTTP: its server and its client."""
