"""Ten lives of two workers in the same two processes: connections are made and closed."""

from __future__ import annotations

import torch
import torch.distributed.rpc as rpc
from _worker import RANK, join, leave, tell

for life in range(10):
    join(life)
    answers = [rpc.rpc_async(f"w{1 - RANK}", torch.add, args=(torch.ones(1 << 18), 1)) for _ in range(8)]
    assert all(torch.equal(answer.wait(), torch.full((1 << 18,), 2.0)) for answer in answers)
    leave()
    tell(lives=life + 1)
