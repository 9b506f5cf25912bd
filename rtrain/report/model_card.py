"""The model card of an artifact: README.md with metadata, as the Hugging Face Hub shows it; its text is model_card.md.

Everything in it was measured or stored by rtrain. The intended use and the license are the user's: a card that is
written again keeps both. The card has no texts of rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rtrain import __version__
from rtrain.core import engines, hub
from rtrain.core.ragged import Head
from rtrain.core.run_folder import Run
from rtrain.inference.artifact import Artifact
from rtrain.metrics import scores
from rtrain.models import builder, long_texts, pooling
from rtrain.report import summary
from rtrain.tasks import base

if TYPE_CHECKING:
    import huggingface_hub

PIPELINE_TAGS = {
    **dict.fromkeys(("classes", "labels", "number", "heads"), "text-classification"),
    **{"tags": "token-classification", "spans": "question-answering"},
    **{"tokens": "fill-mask", "summary": "summarization"},
}
"""The hub's name of a task by the kind of answers (`Task.output`)."""
METRIC_TYPES = ("accuracy", "precision", "recall", "f1", "auc", "mae", "rmse", "pearson", "spearman")
"""Types of metrics that the hub knows, by the end of a score's name."""
USE_PLACEHOLDER = "Not stated. Write here who may use the model, and for what; rtrain keeps this section."


@dataclass(frozen=True)
class CardSource:
    """Facts of a card: an artifact, the run that it lies in, if any, and the card that it replaces."""

    artifact: Artifact
    run: Run | None
    repo: str
    license: str | None
    previous_card: str = ""

    @property
    def figures(self) -> list[tuple[str, str, float]]:
        """(split, name, value) of each score in artifact.json."""
        items = ((split, values.items()) for split, values in self.artifact.metrics.items())
        return [(split, name, value) for split, pairs in items for name, value in pairs if isinstance(value, float)]

    @property
    def is_float(self) -> bool:
        return engines.get_engine(self.artifact.engine).has_gradients

    @property
    def split_scores(self) -> dict[str, Any]:
        """Scores with intervals and slices of the test rows, else the validation rows; a run has them for its float
        artifact."""
        if self.run is None or not self.is_float:
            return {}
        return scores.read_scores(self.run.scores("test")) or scores.read_scores(self.run.scores("valid")) or {}

    @property
    def pipeline_refusal(self) -> str | None:
        """Why `transformers.pipeline` does not load the model, or None."""
        task = base.get_task(self.artifact.task)
        if not self.is_float:
            return f"its graph is int8, for {self.artifact.engine}"
        if not task.has_standard_head:
            return f"no class of Transformers turns its outputs into answers of the task {task.name}"
        if pooling.FACT in self.artifact.facts:
            return "its head reads the mean of the tokens, which no class of Transformers does"
        return "its attention has a window of its own" if long_texts.FACT in self.artifact.facts else None


def find_run(folder: Path) -> Run | None:
    """Return the run whose artifact lies in `folder`."""
    run = Run(folder.parent)
    return run if run.exists and folder in (run.artifact, run.int8_artifact) else None


def format_card(source: CardSource) -> str:
    """Return README.md. License and intended use of `previous_card` stay, unless `license` is set."""
    import jinja2

    facts, run, split_scores, gate = source.artifact, source.run, source.split_scores, source.artifact.gate or {}
    metadata = _build_metadata(source)
    intended_use = re.search(r"^## Intended use\n(.*?)(?=^## |\Z)", source.previous_card, re.MULTILINE | re.DOTALL)
    environment = jinja2.Environment(keep_trailing_newline=True, trim_blocks=False)  # Markdown, which is not escaped
    environment.filters |= {"cell": _escape_cell, "interval": _format_interval, "cost": summary.format_cost}
    template = environment.from_string(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
    return template.render(
        metadata=f"{metadata.to_yaml()}\n",
        facts=facts,
        is_float=source.is_float,
        rtrain_version=__version__,
        intended_use=(intended_use[1].strip() if intended_use else "") or USE_PLACEHOLDER,
        figures=source.figures,
        scores=split_scores,
        intervals=(split_scores.get("intervals") or {}).get("scores", {}),
        verdict=gate if gate.get("version") == facts.version else None,
        row_counts=(run.last_event("tokenized", "tokens_reused") or {}).get("rows", {}) if run else {},
        summary=summary.summarize(run) if run else None,
        windows=facts.facts.get("max_windows", 1),
        repo=source.repo,
        refusal=source.pipeline_refusal,
        pipeline_tag=metadata.pipeline_tag,
        license=metadata.license,
    )


def _build_metadata(source: CardSource) -> "huggingface_hub.ModelCardData":
    from huggingface_hub import EvalResult, ModelCardData

    facts, task = source.artifact, base.get_task(source.artifact.task)
    results = [
        EvalResult(
            task_type=PIPELINE_TAGS[task.output],
            dataset_type=f"private-{facts.lineage.get('data_digest', 'unknown')}",
            dataset_name="the user's rows",
            dataset_split=split,
            metric_type=next((kind for kind in METRIC_TYPES if name.endswith(kind)), name),
            metric_name=name,
            metric_value=round(value, 6),
        )
        for split, name, value in source.figures
    ]
    model = str(facts.lineage.get("model", ""))
    base_model = hub.parse_hub_name(builder.PACKAGED_HUB_NAME if model == hub.PACKAGED_MODEL else model)
    examples = task.example_inputs(Head(facts.labels, facts.facts))
    return ModelCardData(
        license=source.license or _read_license(source.previous_card),
        library_name="rtrain" if source.pipeline_refusal else "transformers",
        pipeline_tag=PIPELINE_TAGS[task.output],
        tags=["rtrain", facts.task, facts.engine],
        base_model=base_model.repo if base_model else None,  # the path of a folder is the user's own
        model_name=facts.name,
        eval_results=results or None,
        widget=[dict(example) if isinstance(example, Mapping) else {"text": example} for example in examples],
    )


def _read_license(card: str) -> str | None:
    """Return the license in a card's metadata; None if it has none, or none that is YAML."""
    try:
        document = yaml.safe_load(card.split("---\n")[1])
    except (IndexError, yaml.YAMLError):
        return None
    return document.get("license") if isinstance(document, dict) else None


def _escape_cell(value: Any) -> str:
    """Escape a value of the user's rows for a table."""
    return " ".join(re.sub(r"([|\\`<>*_\[\]])", r"\\\1", str(value)).split())


def _format_interval(ends: Any) -> str:
    """Format a bootstrap interval; that of equal rows is empty."""
    return "" if not ends or ends[0] == ends[1] else f"{ends[0]:.4f} to {ends[1]:.4f}"
