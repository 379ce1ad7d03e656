"""Measuring: workloads, ourselves, peers."""
