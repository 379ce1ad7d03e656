"""Policies: who is admitted next, and who gives its blocks back when none is left.

A policy sees one request at a time and returns sort keys; the Scheduler does the rest. Keys depend on the requests
alone (no clock), so that several processes that schedule the same requests agree. Whatever the victim key says, the
request that comes first by admission key is never preempted: something always advances.
"""

from __future__ import annotations

from typing import Protocol

from pagedllm.config import SchedulingPolicy
from pagedllm.request import Request

PolicyKey = tuple[int, ...]


class Policy(Protocol):
    plans_ahead: bool
    """Whether who waits is known well enough to keep blocks for them, and to leave room for outputs to come."""

    def admission_key(self, request: Request) -> PolicyKey:
        """The smallest is admitted, and served, first."""
        ...

    def victim_key(self, request: Request) -> PolicyKey:
        """The largest is preempted first."""
        ...


class FCFSPolicy:
    """First come, first served; the latest comer is preempted."""

    plans_ahead = False

    def admission_key(self, request: Request) -> PolicyKey:
        return (request.arrival,)

    def victim_key(self, request: Request) -> PolicyKey:
        return (request.arrival,)


class PriorityPolicy:
    """Lower `priority` first, then first come; the least urgent is preempted, the latest among equals."""

    plans_ahead = False

    def admission_key(self, request: Request) -> PolicyKey:
        return (request.priority, request.arrival)

    def victim_key(self, request: Request) -> PolicyKey:
        return (request.priority, request.arrival)


class OfflinePolicy:
    """By the rank that the plan of the whole job gives (offline_plan.py); the last in the plan is preempted."""

    plans_ahead = True

    def admission_key(self, request: Request) -> PolicyKey:
        return (request.rank, request.arrival)

    def victim_key(self, request: Request) -> PolicyKey:
        return (request.rank, request.arrival)


def make_policy(name: SchedulingPolicy) -> Policy:
    if name == "fcfs":
        return FCFSPolicy()
    if name == "priority":
        return PriorityPolicy()
    if name == "offline":
        return OfflinePolicy()
    raise ValueError(f"scheduling_policy must be 'fcfs', 'priority' or 'offline', got {name!r}")
