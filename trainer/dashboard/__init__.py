"""Runs in the browser: a read-only page and JSON API over stores."""
