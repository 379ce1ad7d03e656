"""Operators: for each its schema, its readable twin, its fake and its typed wrapper."""
