"""Rules about how much of processors and memory a container asks for and may take. Pure."""

import re

from rtrain.cluster.kubernetes import walk
from rtrain.cluster.lint.around import Around
from rtrain.cluster.lint.document import Document
from rtrain.cluster.lint.findings import Found

QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>[KMGTPE]i|[munkMGTPE]|[eE][+-]?\d+)?")
"""Amounts as Kubernetes writes them; it knows signs too, and refuses less than nothing."""
LEAST_BYTES, MOST_BYTES = 1 << 30, 1 << 50
"""Memory of a pod in which Ray starts, and more than any machine has."""


def memory(documents: list[Document], around: Around) -> Found:
    for _, container in walk.containers(documents):
        requests, limits = (container.get("resources", name) or {} for name in ("requests", "limits"))
        for name in ("cpu", "memory"):
            if name not in requests or name not in limits:
                what = f"{container.get('name')} does not say how much {name} it needs and may take"
                yield container.line("resources"), what, f"write {name} under requests and under limits"
        if requests.get("memory") != limits.get("memory"):
            what = f"{container.get('name')} may take more memory than it has asked for: it is the first to be ended"
            yield container.line("resources", "limits", "memory"), what, "write the same for both"
    for group in walk.groups(documents):
        for container in list(group.within("template", "spec").each("containers"))[:1]:
            amount = container.get("resources", "limits", "memory")
            size = _bytes(str(amount))
            if size is not None and not LEAST_BYTES <= size <= MOST_BYTES:
                few = size < LEAST_BYTES
                why = "in which Ray does not start" if few else "which no machine has"
                what = f"{container.get('name')} has {amount} of memory ({size:.6g} bytes), {why}"
                yield container.line("resources", "limits", "memory"), what, "write e.g. 16Gi"


def _bytes(amount: str) -> float | None:
    """An amount as a number; None where it is none, which `quantities` says."""
    found = QUANTITY.fullmatch(amount)
    if found is None:
        return None
    number, unit = found["number"], found["unit"] or ""
    if unit[:1] in ("e", "E") and unit[1:2] not in ("", "i"):
        return float(number + unit)
    power = "kMGTPE".find(unit[:1].replace("K", "k")) + 1 if unit else 0
    small = {"m": 1e-3, "u": 1e-6, "n": 1e-9}
    return float(number) * (small.get(unit) or (1024.0 if unit.endswith("i") else 1000.0) ** power)


def quantities(documents: list[Document], around: Around) -> Found:
    for document in documents:
        for place, value in document.walk():
            if len(place) > 1 and place[-2] in ("requests", "limits") and not QUANTITY.fullmatch(str(value)):
                yield document.line(*place), f"{value} is no amount of {place[-1]}", "write e.g. 500m, 16Gi or 2"
