"""What a model begins with: embeddings, positions, dropout and the first norm, in one pass."""

from mixassay.kernels.embedding.op import embedding

__all__ = ["embedding"]
