"""Policies: who is admitted next, and who gives its blocks back when none is left.

A policy sees one request at a time and returns sort keys; the Scheduler does the rest. Keys depend on the requests
alone (no clock), so that several processes that schedule the same requests agree. Whatever the victim key says, the
request that comes first by admission key is never preempted: something always advances.
"""

from __future__ import annotations

from typing import Protocol

from pagedllm.config import SchedulingPolicy
from pagedllm.errors import NotSupportedError
from pagedllm.request import Request

PolicyKey = tuple[int, ...]


class Policy(Protocol):
    def admission_key(self, request: Request) -> PolicyKey:
        """The smallest is admitted, and served, first."""
        ...

    def victim_key(self, request: Request) -> PolicyKey:
        """The largest is preempted first."""
        ...


class FCFSPolicy:
    """First come, first served; the latest comer is preempted."""

    def admission_key(self, request: Request) -> PolicyKey:
        return (request.arrival,)

    def victim_key(self, request: Request) -> PolicyKey:
        return (request.arrival,)


class PriorityPolicy:
    """Lower `priority` first, then first come; the least urgent is preempted, the latest among equals."""

    def admission_key(self, request: Request) -> PolicyKey:
        return (request.priority, request.arrival)

    def victim_key(self, request: Request) -> PolicyKey:
        return (request.priority, request.arrival)


def make_policy(name: SchedulingPolicy) -> Policy:
    if name == "fcfs":
        return FCFSPolicy()
    if name == "priority":
        return PriorityPolicy()
    if name == "offline":
        raise NotSupportedError("scheduling_policy='offline' is not supported yet: pass 'fcfs' or 'priority'")
    raise ValueError(f"scheduling_policy must be 'fcfs', 'priority' or 'offline', got {name!r}")
