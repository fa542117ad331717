"""Kubernetes label selectors: what they match, and what may stand in one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sidecar.model import Requirement, Selector

_LABEL_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_DNS_LABEL}(?:\.{_DNS_LABEL})*")
_NAMESPACE = re.compile(_DNS_LABEL)


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Whether every part of the selector holds for `labels`; the empty selector matches everything.

    As in Kubernetes: `In` needs the key, `NotIn` also matches where the key is missing.
    """
    return all(labels.get(k) == v for k, v in selector.labels.items()) and all(
        _holds(requirement, labels) for requirement in selector.expressions
    )


def _holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    value = labels.get(requirement.key)
    if requirement.operator == "In":
        return value is not None and value in requirement.values
    if requirement.operator == "NotIn":
        return value is None or value not in requirement.values
    return (value is not None) == (requirement.operator == "Exists")


def is_subdomain(text: str, limit: int = 253) -> bool:
    """Whether `text` is a DNS-1123 subdomain of at most `limit` characters: what most Kubernetes names must be."""
    return 0 < len(text) <= limit and _SUBDOMAIN.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    """Whether `text` is a DNS-1123 label: what a namespace must be."""
    return 0 < len(text) <= 63 and _NAMESPACE.fullmatch(text) is not None


def key_fault(key: str) -> str:
    """Why `key` can't be a label's key, "" if it can."""
    prefix, slash, name = key.rpartition("/")
    if _LABEL_PART.fullmatch(name) and (not slash or is_subdomain(prefix)):
        return ""
    return (
        "is no label key: at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit,"
        " and optionally a DNS name and '/' in front, like example.com/gpu"
    )


def value_fault(value: str) -> str:
    """Why `value` can't be a label's value, "" if it can."""
    if not value or _LABEL_PART.fullmatch(value):
        return ""
    return (
        "is no label value: at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
    )
