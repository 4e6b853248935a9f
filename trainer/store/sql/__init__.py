"""The store on SQLite and PostgreSQL."""
