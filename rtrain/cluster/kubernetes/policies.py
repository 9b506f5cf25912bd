"""Which pods a NetworkPolicy closes, and what it leaves open. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rtrain.cluster.kubernetes import walk
from rtrain.cluster.kubernetes.walk import Part
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found

FEWEST_BITS = 8
"""A block of addresses with a shorter prefix is open to strangers: 10.0.0.0/8 is the largest that is private."""
SELECTORS = ("podSelector", "namespaceSelector")


def check(documents: Sequence[Document], around: Around) -> Found:
    closing = [one for one in documents if walk.kind(one) == "NetworkPolicy" and _closes(one)]
    for pod in walk.pods(list(documents)):
        labels, space = pod.get("metadata", "labels") or {}, pod.document.get("metadata", "namespace")
        if not any(_selects(one, labels) and one.get("metadata", "namespace") == space for one in closing):
            what = "no NetworkPolicy closes this pod: every pod of the cluster of Kubernetes reaches it"
            yield pod.line("metadata", "labels"), what, "write one whose podSelector has its labels"
    for policy in closing:
        for rule in Part(policy, ("spec",)).each("ingress"):
            for line, whom in _open(rule):
                yield line, f"this rule lets in {whom}", "name the pods that need it by a podSelector"


def _closes(policy: Document) -> bool:
    """Whether it says anything of incoming traffic, as one without types does."""
    types = policy.get("spec", "policyTypes")
    return types is None or "Ingress" in types


def _selects(policy: Document, labels: Mapping[str, Any]) -> bool:
    wanted = policy.get("spec", "podSelector", "matchLabels") or {}
    terms = policy.get("spec", "podSelector", "matchExpressions") or ()
    return wanted.items() <= labels.items() and all(_holds(term, labels) for term in terms)


def _holds(term: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    """Whether labels meet a term of `matchExpressions`. As in Kubernetes, NotIn holds for pods without the label."""
    key, values = term.get("key"), term.get("values") or ()
    match term.get("operator"):
        case "In":
            return labels.get(str(key)) in values
        case "NotIn":
            return labels.get(str(key)) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False


def _open(rule: Part) -> Iterator[tuple[int, str]]:
    """Whom a rule lets in without naming them."""
    if not rule.get("from"):
        yield rule.line(), "everybody"
    for peer in rule.each("from"):
        named = any((peer.get(name) or {}).get(by) for name in SELECTORS for by in ("matchLabels", "matchExpressions"))
        if (cidr := peer.get("ipBlock", "cidr")) is not None:
            if int(str(cidr).rpartition("/")[2]) < FEWEST_BITS:
                yield peer.line("ipBlock"), f"all addresses of {cidr}"
        elif not named:
            spaces = "every namespace" if "namespaceSelector" in peer.value else "this namespace"
            yield peer.line(), f"every pod of {spaces}"
