"""The host side of a step: what runs next, and what became of it. Imports no torch."""
