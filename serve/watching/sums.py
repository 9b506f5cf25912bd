"""The metrics of several replicas as those of one endpoint."""

from collections.abc import Iterable
from typing import NamedTuple

import prometheus_client
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


class _Families(NamedTuple):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def sum_expositions(texts: Iterable[str]) -> str:
    """One exposition whose samples are the sums over `texts`: right for counters, histograms and lengths of queues."""
    families: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):  # times of creation have no sum
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            sums = totals.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, sums in totals.items():
        for (sample_name, labels), value in sums.items():
            families[name].add_sample(sample_name, dict(labels), value)
    return prometheus_client.generate_latest(_Families(list(families.values()))).decode()
