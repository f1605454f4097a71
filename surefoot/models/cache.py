"""What decoding remembers: keys and values, MLA's latents, the convolution's last inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class KVState:
    """Keys and values of one attention layer: two [B, capacity, K, Q] buffers, filled from the left."""

    keys: Tensor
    values: Tensor

    def extend(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store k, v: [B, T, K, Q] at `start` and return everything up to their end (views)."""
        end = start + k.shape[1]
        self.keys[:, start:end], self.values[:, start:end] = k, v
        return self.keys[:, :end], self.values[:, :end]


@dataclass
class LatentState:
    """MLA's compressed keys-and-values with the shared rotary key: [B, capacity, kv_rank + rope]."""

    latents: Tensor

    def extend(self, latent: Tensor, start: int) -> Tensor:
        end = start + latent.shape[1]
        self.latents[:, start:end] = latent
        return self.latents[:, :end]


@dataclass
class ConvState:
    """The last width - 1 gated inputs of a short convolution and their documents: [B, width - 1, D], [B, width - 1]."""

    inputs: Tensor
    documents: Tensor


State = KVState | LatentState | ConvState


@dataclass
class Cache:
    """One state a layer, `length` tokens already in them, and the documents of those tokens (None: one document a row)."""

    states: list[State]
    capacity: int
    length: int = 0
    documents: Tensor | None = field(default=None)

    def see(self, documents: Tensor | None, tokens: int) -> Tensor | None:
        """Record the documents of the next `tokens` tokens; return those of all tokens so far."""
        if documents is None:
            return None if self.documents is None else self.documents[:, : self.length + tokens]
        if self.documents is None:
            self.documents = torch.zeros(documents.shape[0], self.capacity, dtype=documents.dtype, device=documents.device)
        self.documents[:, self.length : self.length + tokens] = documents
        return self.documents[:, : self.length + tokens]

    def reorder(self, rows: Tensor) -> None:
        """Keep only the given rows of the batch, in the given order (drops finished sequences)."""
        for state in self.states:
            for name, value in vars(state).items():
                setattr(state, name, value[rows])
        if self.documents is not None:
            self.documents = self.documents[rows]
