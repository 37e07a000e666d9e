"""Draws tokens on the device, from what it keeps of the sequences: rows without penalties."""

import torch

from nanovllm.engine.decode_state import DecodeState
from nanovllm.kernels.sample import sample
from nanovllm.kernels.sampling_threshold import sampling_threshold


class DeviceSampler:
    """The noise and the order of filters are those of `layers.sampler.Sampler`.

    Args:
        state: whose rows are sampled.
        max_rows: of one call. Results are in the same buffers each time, as graphs need it.
        device: where.
    """

    def __init__(self, state: DecodeState, max_rows: int, device: torch.device) -> None:
        self.state = state
        self.thresholds = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.last_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def draw(
        self, logits: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Token ids, int64 [B], valid until the next call; -1 where none can be drawn.

        Args:
            logits: [B, V].
            seats: int32 [B].
            positions: int32 [B], what the noise depends on besides the row's seed.
        """
        state, rows = self.state, slice(len(logits))
        thresholds, last_ids, tokens = self.thresholds[rows], self.last_ids[rows], self.tokens[rows]
        filters = state.top_k, state.top_p, state.min_p
        sampling_threshold(logits, state.temperatures, *filters, seats, thresholds, last_ids)
        kept = thresholds, last_ids
        sample(logits, state.temperatures, state.streams, seats, positions, *kept, tokens)
        return tokens
