"""The metrics of several models, those of several replicas, and HAProxy's, as the metrics of one endpoint."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families


class Joined(NamedTuple):
    """Several registries as one, whose samples say by the label `model` whose they are."""

    registries: Mapping[str, CollectorRegistry]
    """By the model's name; the name of what is no model's is empty."""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self.registries.items():
            label = {"model": model} if model else {}
            for family in registry.collect():
                plain = Metric(family.name, family.documentation, family.type, family.unit)
                samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
                families.setdefault(family.name, plain).samples += samples
        return iter(families.values())


def exposition(registries: Mapping[str, CollectorRegistry]) -> str:
    """Prometheus' text form."""
    return prometheus_client.generate_latest(Joined(registries)).decode()


class _Families(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def join_expositions(texts: Mapping[str, str]) -> str:
    """One exposition of several replicas', each by its name, which the label `replica` of its samples has. A sum over
    replicas would fall when one ends, which Prometheus takes for a reset of the whole counter."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = (sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples)
            joined.samples += samples
    return prometheus_client.generate_latest(_Families(list(families.values()))).decode()


def with_haproxy(text: str, told: str) -> str:
    """An exposition, and the errors that HAProxy has answered itself; `told`: by itself, in the header
    `haproxy.ERRORS`, or by a client where no HAProxy has replaced it. Where it has told nothing that it could the
    exposition is as it was."""
    found = re.findall(r"\b(\d{3})=(\d{1,15})\b", told)
    if not found:
        return text
    family = CounterMetricFamily(
        "rtrain_haproxy_errors", "Errors that HAProxy answered itself, since it began.", labels=["status"]
    )
    for status, count in found:
        family.add_metric([status], int(count))
    return text + prometheus_client.generate_latest(_Families([family])).decode()
