"""A finished artefact with fewer pieces in its vocabulary, and the proof that its other answers stay as they are.

For a model that is not trained again: `compress.vocabulary=trim` on a run's `rtrain quantize`. Before a training or a
distillation the model itself is trimmed (`rtrain.runs.smaller`), which also teaches it the words that fall apart.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtrain import artifact, engines, predict
from rtrain.batch import Encoded, Floats, Head, Ints, Ragged
from rtrain.compress import int4
from rtrain.config import Recipe
from rtrain.data import records
from rtrain.data.stores.shards import KEPT_CHARACTERS
from rtrain.data.stores.store import Store
from rtrain.errors import ConfigError, Problem, UserError
from rtrain.metrics.by_output import metric_for
from rtrain.network import trimming
from rtrain.predict import Predictor
from rtrain.runs import smaller
from rtrain.tasks import base
from rtrain.tasks.base import Input

if TYPE_CHECKING:
    import openvino


@dataclass(frozen=True)
class Proof:
    """Two artefacts asked the same texts, one at a time."""

    outputs: list[Floats]
    """What the trimmed one answers."""
    changed: tuple[int, ...]
    """Positions of the texts that it reads as other pieces."""
    flips: int
    """How many of these have another answer: other labels, or another number by however little."""
    largest: float
    """The largest difference of an output of these."""

    @property
    def facts(self) -> dict[str, Any]:
        """For an artefact's lineage. Every one of the `identical` answers is equal bit for bit."""
        identical = len(self.outputs) - len(self.changed)
        return {"rows": len(self.outputs), "identical": identical, "changed": len(self.changed), "flips": self.flips}


def trim(
    folder: Path,
    ids: Sequence[int],
    out: Path,
    texts: Sequence[Input] = (),
    measure: Callable[[Proof], Mapping[str, Any]] = lambda proof: {},
    chosen_by: Mapping[str, Any] | None = None,
) -> Proof:
    """Write the artefact with the pieces `ids` alone (see `trimming.kept`) as `out`, float or int8, and prove it on
    `texts`, from whose proof `measure` makes its scores. Its lineage says how they were `chosen_by`.

    Raises `ArtifactError` where a text of kept pieces has another answer than before, and `UserError` where the
    artefact cannot be trimmed.
    """
    made = artifact.read(folder)
    task, graph = base.get(made.task), engines.get(made.engine).files[0]
    try:
        if engines.get(made.engine).gradients:
            trimming.trim(folder, ids, out)
            (out / trimming.NAME).unlink()
        else:
            out.mkdir(parents=True)
            trimming.write_tokenizer(folder, ids, out)
            cut_graph(folder / graph, ids, trimming.lines(folder), out / graph)
        lineage = {**made.lineage, "parent": made.lineage.get("parent", made.version)}
        made = replace(made, lineage=lineage, golden=())
        shown = prove(Predictor(folder, made), Predictor(out, made), texts, trimming.old_ids(ids))
        counted = {"pieces": len(ids), "of": trimming.size(folder), **shown.facts, **(chosen_by or {})}
        made = replace(made, lineage={**made.lineage, "vocabulary": counted}, metrics=measure(shown))
        head = Head(made.labels, made.facts)
        artifact.write(out, made, predict.golden_logits, predict.golden_inputs(task, head))
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return shown


def trim_by(folder: Path, store: Store, recipe: Recipe, out: Path, further: records.Source | None = None) -> Proof:
    """`trim` by the settings `compress` of a recipe to the pieces of the training rows of `store`, which the artefact's
    tokenizer has read, and of the rows of `further`, proved and scored on the test rows of `store`.

    Raises `ConfigError` where these rows cannot be read again.
    """
    made = artifact.read(folder)
    task, rows, head = base.get(made.task), np.arange(store.rows("test")), Head(made.labels, made.facts)
    texts, settings = asked_anew(store, task), recipe.compress
    chosen_by: dict[str, Any] = {"at_least": settings.vocabulary_pieces}
    if settings.vocabulary_most is not None:
        chosen_by["most"] = settings.vocabulary_most
    counts = smaller.counted(store)
    if further is not None:
        chosen_by["unlabelled"] = {"path": settings.unlabelled, "digest": further.digest()}
        counts += smaller.counted_by(further, recipe, folder)
    ids = smaller.chosen(recipe, folder, counts)

    def scores(proof: Proof) -> dict[str, Any]:
        outcomes = task.outcomes(proof.outputs, store.read("test", rows), head)
        return {"test": metric_for(task.output).scores(outcomes, store.targets("test"), head)}

    return trim(folder, ids, out, texts, scores, chosen_by)


def asked_anew(store: Store, task: base.Task) -> list[Input]:
    """The test rows' texts, by which a trimmed model is scored. Raises `ConfigError` where these say too little."""
    texts = known(store, task, "test", np.arange(store.rows("test")))
    if task.by_token or task.packs or len(texts) < store.rows("test"):
        reason = "a finished model's rows are scored anew by their texts alone, where each has one answer"
        raise ConfigError(
            [Problem("compress.vocabulary", "trim", reason, "trim before rtrain train or rtrain distill")]
        )
    return list(texts.values())


def known(store: Store, task: base.Task, split: str, rows: Ints) -> dict[int, Input]:
    """The inputs that rows of a store were, by their places, of those whose texts are kept whole."""
    read = zip(rows.tolist(), store.texts(split, rows), strict=True)
    return {place: text for place, kept in read if (text := _asked(kept, task)) is not None}


def _asked(kept: tuple[str, str | None] | None, task: base.Task) -> Input | None:
    """The input that a row of a store was; None where its texts are not kept whole."""
    if kept is None or any(len(text or "") >= KEPT_CHARACTERS for text in kept):
        return None
    text, pair = kept
    return text if pair is None else dict(zip(task.fields, (text, pair), strict=True))


def prove(before: Predictor, after: Predictor, texts: Sequence[Input], ids: Ints) -> Proof:
    """Ask both artefacts each text alone; `ids` are the old ids of the new pieces.

    Raises `ArtifactError` where a text of unchanged pieces is answered otherwise, by as little as a bit.
    """
    outputs, changed, flips, largest = [], [], 0, 0.0
    for position, text in enumerate(texts):
        (one,), (other,) = before.encode([text]), after.encode([text])
        (old,), (new,) = before.run([one]), after.run([other])
        outputs.append(new)
        if is_read_alike(one, other, ids):
            if old.tobytes() != new.tobytes():
                raise artifact.ArtifactError(f"text {position} has the same pieces and another answer: {text!r}")
            continue
        changed.append(position)
        if old.shape == new.shape:
            largest = max(largest, float(np.abs(old - new).max()))
            flips += int(_decided(before, old) != _decided(after, new))
        else:
            flips += 1  # an answer for each token, of which there are others
    return Proof(outputs, tuple(changed), flips, largest)


def _decided(predictor: Predictor, output: Floats) -> Any:
    """What is answered in the end."""
    task, head = predictor.task, predictor.head
    if task.by_token:
        return output.argmax(-1).tolist()
    # What is read of the description does not depend on the label, which the text has not got.
    known = task.targets([task.stand_in("", head)], Ragged.of([], np.int32), head).values
    return task.describe(Ragged.even(output[None].astype(np.float64)), known, head).prediction[0]


def is_read_alike(before: Encoded, after: Encoded, ids: Ints) -> bool:
    """Whether a text has the same pieces in both vocabularies."""
    return before.windows == after.windows and before.ids == ids[after.ids].tolist()


def cut_graph(path: Path, ids: Sequence[int], of: int, out: Path) -> None:
    """Write the OpenVINO graph (.xml, with its .bin beside it) with the lines `ids` of everything that has `of` lines.

    That is the int8 table, its scales, and an output embedding. No number is computed anew.
    """
    import openvino

    graph = openvino.Core().read_model(path)
    chosen, cut = np.array(ids), 0
    for node in graph.get_ops():
        if node.get_type_name() != "Constant" or of not in tuple(node.shape):
            continue
        node.output(0).replace(_chosen(node, chosen, of, path).output(0))
        cut += 1
    if not cut:
        raise UserError(f"{path} has no table of {of:,} lines, so its vocabulary cannot be trimmed")
    graph.validate_nodes_and_infer_types()
    openvino.save_model(graph, out, compress_to_fp16=False)


def _chosen(node: "openvino.Node", chosen: Ints, of: int, path: Path) -> "openvino.Node":
    from openvino import opset13

    axes = [axis for axis, size in enumerate(node.shape) if size == of]
    if len(axes) != 1:
        raise UserError(f"{path}: a constant of shape {list(node.shape)} may be numbered by pieces in several ways")
    lines = np.ascontiguousarray(np.take(int4.numbers(node), chosen, axis=axes[0]))
    return opset13.constant(lines, dtype=node.get_element_type())
