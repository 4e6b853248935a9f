"""Writes rows to TransferQueue, from which verl's trainers take them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

from agl_verl.rows import Row


def put(partition: str, rows: Seq[Row]) -> None:
    """Write rows to TransferQueue, ragged columns as nested tensors."""
    columns = {name: _column([row.fields[name] for row in rows]) for name in rows[0].fields}
    tq.kv_batch_put(
        keys=[row.key for row in rows],
        partition_id=partition,
        fields=TensorDict(columns, batch_size=[len(rows)]),
        tags=[row.tag for row in rows],
    )


def _column(values: Seq[Any]) -> Any:
    if not isinstance(values[0], np.ndarray):
        stack: Any = NonTensorStack
        return stack(*values)
    return torch.nested.as_nested_tensor([torch.from_numpy(v) for v in values], layout=torch.jagged)
