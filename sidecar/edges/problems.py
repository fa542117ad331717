"""The problems of a backend in the log: each said once when it comes, and once when it is over."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from sidecar.model import Problem

log = structlog.get_logger()


def log_changes(told: frozenset[Problem], found: Iterable[Problem]) -> frozenset[Problem]:
    """Log what is new since `told`, and what is over. Returns what has been told now."""
    problems = frozenset(found)
    for new in sorted(problems - told, key=lambda p: (p.where, p.message)):
        log.warning("backend_problem", where=new.where, message=new.message)
    for gone in sorted(told - problems, key=lambda p: (p.where, p.message)):
        log.info("backend_problem_over", where=gone.where, message=gone.message)
    return problems
