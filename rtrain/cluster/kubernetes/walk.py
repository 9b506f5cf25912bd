"""Manifests as the rules read them: their clusters, pods and containers, with places."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rtrain.cluster.lint.clouds import get
from rtrain.cluster.lint.document import Document, Place

CLUSTERS: Mapping[str, Place] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
"""Where each kind has its cluster."""


@dataclass(frozen=True)
class Part:
    """A part of a document."""

    document: Document
    place: Place

    @property
    def value(self) -> Any:
        return self.document.get(*self.place)

    def get(self, *inner: str | int) -> Any:
        return get(self.value, *inner)

    def line(self, *inner: str | int) -> int:
        return self.document.line(*self.place, *inner)

    def within(self, *inner: str | int) -> "Part":
        return Part(self.document, (*self.place, *inner))

    def each(self, *inner: str | int) -> Iterator["Part"]:
        """The elements of a list in it."""
        found = self.get(*inner)
        for number in range(len(found)) if isinstance(found, list) else ():
            yield self.within(*inner, number)


def kind(document: Document) -> str:
    return str(document.get("kind"))


def clusters(documents: list[Document]) -> Iterator[Part]:
    for document in documents:
        if (place := CLUSTERS.get(kind(document))) and isinstance(document.get(*place), dict):
            yield Part(document, place)


def groups(documents: list[Document]) -> Iterator[Part]:
    """Head and worker groups of all clusters."""
    for cluster in clusters(documents):
        yield cluster.within("headGroupSpec")
        yield from cluster.each("workerGroupSpecs")


def is_head(group: Part) -> bool:
    return group.place[-1] == "headGroupSpec"


def pods(documents: list[Document]) -> Iterator[Part]:
    """Templates of pods."""
    for group in groups(documents):
        yield group.within("template")
    for document in documents:
        if document.get("spec", "submitterPodTemplate"):
            yield Part(document, ("spec", "submitterPodTemplate"))


def containers(documents: list[Document]) -> Iterator[tuple[Part, Part]]:
    """(pod, container)"""
    for pod in pods(documents):
        for name in ("containers", "initContainers"):
            for container in pod.each("spec", name):
                yield pod, container
