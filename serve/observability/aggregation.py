"""The metrics of several models, those of several replicas, and HAProxy's, as the metrics of one endpoint."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families


class MergedRegistry(NamedTuple):
    """Several registries as one, whose samples say by the label `model` whose they are."""

    registries: Mapping[str, CollectorRegistry]
    """Registries by model name; empty for metrics of no model."""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self.registries.items():
            label = {"model": model} if model else {}
            for family in registry.collect():
                plain = Metric(family.name, family.documentation, family.type, family.unit)
                samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
                families.setdefault(family.name, plain).samples += samples
        return iter(families.values())


def render_metrics(registries: Mapping[str, CollectorRegistry]) -> str:
    """Prometheus' text form."""
    return prometheus_client.generate_latest(MergedRegistry(registries)).decode()


class _MetricFamilies(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def merge_expositions(expositions: Mapping[str, str]) -> str:
    """One exposition of several replicas', each by its name, which the label `replica` of its samples has. A sum over
    replicas would fall when one ends, which Prometheus takes for a reset of the whole counter."""
    families: dict[str, Metric] = {}
    for replica, text in expositions.items():
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            samples = (sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples)
            merged.samples += samples
    return prometheus_client.generate_latest(_MetricFamilies(list(families.values()))).decode()


def add_proxy_errors(text: str, header: str) -> str:
    """Metrics text plus HAProxy's own errors. `header`: value of `haproxy.PROXY_ERRORS_HEADER`; a client may have sent
    it if there is no HAProxy. Without valid counts the text is unchanged."""
    matches = re.findall(r"\b(\d{3})=(\d{1,15})\b", header)
    if not matches:
        return text
    family = CounterMetricFamily(
        "rtrain_haproxy_errors", "Errors that HAProxy answered itself, since it began.", labels=["status"]
    )
    for status, count in matches:
        family.add_metric([status], int(count))
    return text + prometheus_client.generate_latest(_MetricFamilies([family])).decode()
