"""What `rtrain serve status` prints: the document that the endpoint answers with, for a person. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


def text(document: Mapping[str, Any]) -> str:
    """`document`: what `Endpoint.change` says to the question status."""
    return "\n\n".join(_model(one, document["address"]) for one in document["models"])


def _model(document: Mapping[str, Any], address: str) -> str:
    replicas = document["replicas"]
    versions = Counter(replica["version"] or "starting" for replica in replicas)
    lines = [
        f"{document['name']} at {address}",
        f"artefact   {document['artifact']}",
        f"version    {', '.join(f'{version} ({count} of {len(replicas)})' for version, count in versions.items())}",
    ]
    if trial := document["trial"]:
        lines += _trial(trial)
    up = [replica for replica in replicas if replica["version"]]
    rates = document["rates"]
    rows, tokens = (sum(replica["queue"][name] for replica in up) for name in ("rows", "tokens"))
    requests: Counter[str] = Counter()
    for replica in up:
        requests.update(replica["requests"])
    answered = ", ".join(f"{count:,} with {status}" for status, count in sorted(requests.items())) or "none"
    lines += [
        f"replicas   {len(up)} of {len(replicas)} up, {sum(replica['ready'] for replica in up)} ready",
        f"now        {rates['requests']:.1f} requests/s, {rates['texts']:.1f} texts/s, {rates['busy']:.0%} busy",
        f"queue      {rows:,} texts, {tokens:,} tokens",
        f"requests   {answered}",
        f"drift      {_drift([replica['drift'] for replica in up if replica['drift']])}",
    ]
    return "\n".join(lines)


def _trial(trial: Mapping[str, Any]) -> list[str]:
    seen, aim = trial["seen"], trial["aim"]
    what = trial["stage"] if trial["stage"] != "weighted" else f"answers {trial['weight']:.0%} of the requests"
    lines = [f"candidate  {trial['version']}: {what}" + (f" ({trial['reason']})" if trial["reason"] else "")]
    if seen["rows"]:
        ratio = f", {trial['ratio']:.2f} times as long" if trial["ratio"] else ""
        rows = f"{seen['rows']:,} of {aim['rows']:,} texts"
        lines.append(f"           {rows}, the same answer to {seen['agreed']:,}{ratio}")
    if seen["requests"]:
        lines.append(f"           {seen['requests']:,} requests answered, {seen['errors']:,} of them with 500 or above")
    return lines


def _drift(found: list[Mapping[str, Any]]) -> str:
    """The farthest of the replicas, of each histogram."""
    if not found:
        return "not watched: the artefact has no reference"
    worst: dict[str, float] = {}
    for one in found:
        for name, value in one["distance"].items():
            worst[name] = max(value, worst.get(name, 0.0))
    alarm = "unknown input" if any(one["alarm"] for one in found) else "no alarm"
    told = ", ".join(f"{name} {value:.2f}" for name, value in sorted(worst.items())) or "no text yet"
    return f"{alarm}; {told}"
