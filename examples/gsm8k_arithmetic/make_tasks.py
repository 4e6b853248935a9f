"""Tasks from GSM8K's calculation annotations: python make_tasks.py GSM8K_FOLDER [OUT_FOLDER]"""

import sys
from pathlib import Path

from agl.trainer.quickstart.tasks import gsm8k_tasks, write_jsonl


def main(gsm8k: Path, out: Path) -> None:
    train = gsm8k_tasks(gsm8k, split="train")
    heldout = gsm8k_tasks(gsm8k, split="heldout")
    write_jsonl(out / "train.jsonl", train)
    write_jsonl(out / "heldout.jsonl", heldout)
    write_jsonl(out / "heldout-128.jsonl", heldout[:: len(heldout) // 128][:128])
    print(f"{len(train)} training tasks, {len(heldout)} held-out tasks -> {out}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else "tasks"))
