"""The folder that `agl run` puts on PYTHONPATH, for what Python runs first: `sitecustomize`."""
