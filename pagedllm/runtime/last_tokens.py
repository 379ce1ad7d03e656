"""LastTokens: the token that each row drew last, kept on the GPU: a step can be launched before the host knows it.

On the host a placeholder stands for such a token: the negative number ~row, in the runner's rows and in a batch's token
ids. `fill` puts the tokens in, as the first thing that a step does on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LastTokens:
    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.nowhere = max_num_seqs  # a row for draws that nobody keeps
        self._token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    def keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """rows [R] int64, token_ids [R] int32: negative where nothing could be drawn. Such a request fails once the
        host knows; a step launched before computes it with token 0, for nobody."""
        self._token_ids.index_copy_(0, rows, token_ids.clamp_min(0))

    def fill(self, token_ids: Tensor) -> None:
        """token_ids [T] int32, in place."""
        rows = token_ids.bitwise_not().clamp_min(0)
        kept = self._token_ids.index_select(0, rows)
        token_ids.copy_(torch.where(token_ids < 0, kept, token_ids))
