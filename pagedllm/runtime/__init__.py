"""The torch side of a step: memory, batches, one forward pass."""
