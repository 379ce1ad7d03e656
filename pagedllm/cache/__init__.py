"""The host side of the paged KV cache: blocks, their queue, their hashes, who holds them. Imports no torch."""
