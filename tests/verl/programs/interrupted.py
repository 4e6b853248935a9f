"""A long run of REINFORCE++ on a Ray of its own, for `test_interrupted.py` to stop."""

import sys
from pathlib import Path

from jobs import algorithm, quickstart, train

if __name__ == "__main__":
    model, directory = map(Path, sys.argv[1:])
    try:
        train(
            quickstart(), algorithm(model, steps=50, checkpoint_every=1, adv_estimator="reinforce_plus_plus"),
            directory, heldout=16,
        )  # fmt: skip
    except KeyboardInterrupt:
        sys.exit(130)
