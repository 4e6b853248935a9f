"""One package per framework, all of one shape: `tracer.py` turns its hooks into spans, `runnable.py` runs its agents,
and the package has `<Framework>Tracer` and `wrap`, which makes agents trainable."""
