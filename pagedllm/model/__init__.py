"""Models as data: one decoder, families that translate to it, weights and their formats."""
