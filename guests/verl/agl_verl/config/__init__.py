"""verl's config: read, checked against verl's own schema, and completed."""
