"""What all HTTP servers share: listening, keys, bounds on requests, errors and OpenAPI documents."""
