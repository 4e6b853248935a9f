"""The folder that `agl run` puts on PYTHONPATH, so that Python runs its `sitecustomize` first."""
