"""A network that is trained while it rounds: its levels and their gradients, where quantizers begin, and an int8 graph
that answers as the network does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from rtrain import artifact, config
from rtrain.batch import Tokens, padded
from rtrain.compress import openvino_graph, quantize, ranges
from rtrain.compress.ranges import Range
from rtrain.config import Distill, with_overrides
from rtrain.config.recipe import Quantize
from rtrain.data.order import deal
from rtrain.errors import ConfigError, UserError
from rtrain.exchange import whole
from rtrain.network import beside, device, model, pooling, rounding
from rtrain.network.rounding import Quantizer, Quantizers
from rtrain.predict import Predictor, Torch
from rtrain.run import Run
from rtrain.runs import worker
from rtrain.runs.preparing import Prepared
from rtrain.strategies import choose
from rtrain.tasks import base
from rtrain.training import losses, optim, step
from tests import gating, quantizing
from tests.outliers import plant
from tests.quantizing import Made
from tests.tiny import make_encoder
from tests.workers import joined, run

ROWS = 48
"""Training rows by which quantizers begin."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantizing.make(tmp_path_factory.mktemp("aware"), rows=80)


# ------------------------------------------------------------------------------------------------------------- rounding


def rounded(values: torch.Tensor, step: torch.Tensor, zero: int) -> torch.Tensor:
    found: torch.Tensor = rounding.rounded().apply(values, step, zero)
    return found


def test_values_go_to_the_nearest_of_256_levels() -> None:
    values = torch.tensor([-9.0, -1.0, -0.26, -0.24, 0.0, 0.5, 1.24, 200.0])
    # Zero is the third level of a half each: from -1 to 126.5.
    found = rounded(values, torch.tensor(0.5), 2)
    assert found.tolist() == [-1.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 126.5]
    assert Quantizer("input", ("a",), 0.5, 2).bounds == (-1.0, 126.5)


def test_the_gradient_goes_straight_through_and_ends_at_the_bounds() -> None:
    values = torch.tensor([-9.0, -0.3, 0.3, 126.4, 200.0], requires_grad=True)
    (rounded(values, torch.tensor(0.5), 2) * torch.arange(1.0, 6.0)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 0.0]


def test_a_width_s_gradient_is_that_of_the_rounding_itself() -> None:
    """Against autograd, with rounding as a constant that is added (Esser et al. 2020, equation 3)."""
    drawn = torch.linspace(-2, 30, 101, dtype=torch.float64)
    weights = torch.cos(torch.arange(101, dtype=torch.float64))
    step = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    place = drawn / step + 7
    inside = place.clamp(0, 255)
    by_hand = (inside + (inside.round() - inside).detach() - 7) * step
    [expected] = torch.autograd.grad((by_hand * weights).sum(), [step])
    [found] = torch.autograd.grad((rounded(drawn, step, 7) * weights).sum(), [step])
    assert found.item() == pytest.approx(expected.item() * (101 * 128) ** -0.5, rel=1e-9)


def test_weights_have_255_levels_a_row_and_a_gradient_as_if_they_had_more() -> None:
    weights = torch.tensor([[127.0, 0.4, -3.6], [0.0, 0.0, 0.0], [-0.127, 0.0004, 0.0635]], requires_grad=True)
    found = rounding.by_rows(weights)
    expected = [[127.0, 0.0, -4.0], [0.0, 0.0, 0.0], [-0.127, 0.0, 0.064]]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-7)
    found.sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, torch.ones(3, 3))


def test_quantizers_are_written_as_they_are(tmp_path: Path) -> None:
    smooth = np.array([0.1, 2.5], dtype=np.float32)
    first = Quantizer("input", ("a.query", "a.key"), 1 / 3, 128, smooth)
    quantizers = Quantizers((first, Quantizer("output", ("a.query",), 1e-12, 0)), ("table",))
    quantizers.write(tmp_path / "quantizers.safetensors")
    found = Quantizers.read(tmp_path / "quantizers.safetensors")
    assert found.activations[0].smooth is not None
    assert found.activations[0].smooth.tolist() == smooth.tolist()
    assert replace(found.activations[0], smooth=None) == replace(first, smooth=None)
    assert (found.activations[1], found.tables) == (quantizers.activations[1], quantizers.tables)


# --------------------------------------------------------------------------------------------------------------- ranges


def test_one_range_covers_all_channels_and_zero() -> None:
    first, second = (Range.of(torch.tensor(rows)) for rows in ([[[1.0, -2.0], [0.5, 3.0]]], [[[-1.0, 4.0]]]))
    both = first.joined(second)
    assert (both.least.tolist(), both.greatest.tolist()) == ([-1.0, -2.0], [1.0, 4.0])
    found = ranges.quantizer("output", ["a"], both)
    assert found.bounds == pytest.approx((-2.0, 4.0), abs=found.step)
    assert found.step == pytest.approx(6 / 255)
    of_positive = ranges.quantizer("output", ["a"], Range.of(torch.tensor([[2.0, 5.0]])))
    assert of_positive.bounds == pytest.approx((0.0, 5.0))


def test_smoothing_makes_channels_and_weights_alike() -> None:
    reach, weights = np.array([16.0, 1.0, 0.0]), np.array([1.0, 4.0, 0.0])
    smooth = ranges.smoothing(reach, weights)
    assert (reach * smooth)[:2].tolist() == pytest.approx((weights / smooth)[:2].tolist())
    assert smooth[2] == 1.0


def network_of(made: Made) -> Any:
    return Torch(made.folder, artifact.read(made.folder), 1).network


def test_quantizers_stand_where_the_export_puts_them(made: Made) -> None:
    """Those of NNCF, by the operations that int8 numbers go into; and a tensor has one, whoever reads it."""
    network = network_of(made)
    found = ranges.measure(network, made.store, 0, 8)
    samples = [padded(made.store.read("train", np.array([row])), 0) for row in range(4)]
    exported = openvino_graph.export(network, samples[0])
    assert exported.rounded(found).operations == exported.calibrated(samples).operations
    shared = [one.layers for one in found.activations if len(one.layers) > 1]
    own = "bert.encoder.layer.{}.attention.self"
    assert shared == [tuple(f"{own.format(layer)}.{part}" for part in ("query", "key", "value")) for layer in (0, 1)]
    written = {one.layers[0] for one in found.activations if one.side == "output"}
    assert written == {f"{own.format(layer)}.{part}" for layer in (0, 1) for part in ("query", "key")}


def distilbert() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = transformers.DistilBertConfig(
            vocab_size=400,
            max_position_embeddings=64,
            dim=32,
            n_layers=1,
            n_heads=2,
            hidden_dim=64,
            initializer_range=0.2,
        )
        settings.num_labels = 3
        return transformers.DistilBertForSequenceClassification(settings).eval()


def pooled(made: Made) -> Any:
    network = network_of(made)
    pooling.pool_by_mean(network)
    return network


@pytest.mark.parametrize("kind", ["bert", "distilbert", "mean"])
def test_the_int8_graph_answers_as_the_network_that_rounds(made: Made, kind: str) -> None:
    network = {"bert": network_of, "distilbert": lambda made: distilbert(), "mean": pooled}[kind](made)
    quantizers = ranges.measure(network, made.store, 0, ROWS)
    sample = padded(made.store.read("train", np.array([0])), 0)
    names = ("input_ids", "attention_mask", *(["token_type_ids"] if kind != "distilbert" else []))
    exported = openvino_graph.export(network, {name: sample[name] for name in names})
    int8, exact = exported.rounded(quantizers).answering(1), exported.answering(1)
    rounding.attach(network, quantizers)
    apart, moved = [], []
    for row in range(24):
        asked = padded(made.store.read("train", np.array([row])), 0)
        with torch.inference_mode():
            found = network(**{name: torch.from_numpy(asked[name]) for name in names}).logits.numpy()
        apart.append(np.abs(int8.logits(asked) - found).max())
        moved.append(np.abs(exact.logits(asked) - found).max())
    # A number half-way between two levels goes to the one or the other, by the last bit of a sum.
    assert np.median(apart) <= 1e-5
    assert max(apart) <= max(moved)
    assert np.median(moved) >= 1e-3


# ------------------------------------------------------------------------------------------------------------- training


def student(folder: Path, quantizers: Quantizers | None = None) -> Any:
    """In double precision and without dropout, so that only sums in another order tell two trainings apart."""
    task = base.get("classification")
    network: Any = model.build(folder, task, artifact.read(folder).labels, 0).double()
    if quantizers is not None:
        rounding.attach(network, quantizers)
        network.double()
    for part in network.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return network.train()


def taught(made: Made, folder: Path) -> Tokens:
    """Training rows with the answers of the float artefact in `folder`."""
    tokens = made.store.read("train", np.arange(made.store.rows("train")))
    answers = Predictor(folder, artifact.read(folder)).run_tokens(tokens)
    return replace(tokens, teacher=answers.astype(np.float32))


def train(
    network: Any,
    tokens: Tokens,
    made: Made,
    updates: int,
    rate: float,
    rows: int = 8,
    worker_of: tuple[int, int] = (0, 1),
    shard: int = 0,
) -> None:
    """`rows`: those of a pass; `worker_of`: number of this worker and of all."""
    recipe = config.load("intent", {"optim.lr": rate, "train.shard": shard}).recipe
    rank, world = worker_of
    exchange = choose.build(network, recipe.train)
    optimizer = optim.of_run(exchange, recipe)
    loss = losses.for_run(base.get("classification"), Distill(teacher="v1", alpha=1.0), made.store.manifest.head)
    drawn = np.random.default_rng(0)
    for _ in range(updates):
        update = tokens.pick(np.sort(drawn.choice(len(tokens), 16, replace=False)))
        passes = [update.pick(chosen) for chosen in deal(update.lengths, world, rank, rows)]
        step.run_update(exchange, optimizer, loss, passes, pad_id=0, precision="fp64", clip_norm=1.0)


def test_widths_are_learned_and_the_graph_has_them(made: Made) -> None:
    quantizers = ranges.measure(network_of(made), made.store, 0, ROWS)
    network = student(made.folder, quantizers)
    train(network, taught(made, made.folder), made, updates=3, rate=1e-3)
    weights = network.state_dict()
    assert (weights[rounding.WIDTHS] != 0).all()
    found = rounding.learned(quantizers, weights)
    factors = [
        after.step / before.step for after, before in zip(found.activations, quantizers.activations, strict=True)
    ]
    assert factors == pytest.approx(torch.exp(rounding.GAIN * weights[rounding.WIDTHS]).tolist())
    # What it was trained with stays behind; the float network is whole.
    plain = network_of(made)
    assert set(beside.without(weights)) == set(plain.state_dict())
    plain.load_state_dict(beside.without(weights))
    asked = padded(made.store.read("train", np.array([3])), 0)
    int8 = openvino_graph.export(plain, asked).rounded(found).answering(1)
    with torch.inference_mode():
        rows = made.store.read("train", np.array([3]))
        expected = step.forward(network.eval(), rows, 0, "fp64").numpy()
    assert np.abs(int8.logits(asked) - expected).max() <= 0.05


def test_it_is_trained_in_half_precision_too(made: Made) -> None:
    """By the gradient of single precision, but for what half precision costs a network that does not round."""
    quantizers = ranges.measure(network_of(made), made.store, 0, ROWS)
    tokens, task = made.store.read("train", np.arange(16)), base.get("classification")

    def gradient(rounds: bool, precision: str) -> torch.Tensor:
        network: Any = model.build(made.folder, task, artifact.read(made.folder).labels, 0).eval()
        if rounds:
            rounding.attach(network, quantizers)
        step.forward(network, tokens, 0, precision).float().square().sum().backward()
        return torch.cat([one.grad.flatten() for one in network.base_model.parameters() if one.grad is not None])

    apart = []
    for rounds in (False, True):
        exact, half = gradient(rounds, "fp32"), gradient(rounds, "bf16")
        apart.append(float((half - exact).norm() / exact.norm()))
    assert apart[1] <= 3 * apart[0] <= 0.1


def test_widths_do_not_depend_on_how_an_update_is_cut_into_passes(made: Made) -> None:
    quantizers = ranges.measure(network_of(made), made.store, 0, ROWS)
    tokens, found = taught(made, made.folder), []
    for rows in (16, 5):
        network = student(made.folder, quantizers)
        train(network, tokens, made, updates=2, rate=1e-3, rows=rows)
        found.append(network.state_dict()[rounding.WIDTHS])
    assert (found[0] - found[1]).norm() <= 1e-3 * found[0].norm()


SHARDS = (0, 2, 3)
"""Values of `train.shard`."""


def _worker(rank: int, folder: Path, made: Made, quantizers: Quantizers) -> None:
    joined(rank, 2, folder)
    try:
        tokens = taught(made, made.folder)
        for shard in SHARDS:
            network = student(made.folder, quantizers)
            train(network, tokens, made, updates=2, rate=1e-3, worker_of=(rank, 2), shard=shard)
            widths = whole.full(network.state_dict()[rounding.WIDTHS])
            np.save(folder / f"{rank}-{shard}.npy", widths.numpy())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_learn_the_widths_of_one_however_they_share_weights(made: Made, tmp_path: Path) -> None:
    quantizers = ranges.measure(network_of(made), made.store, 0, ROWS)
    network = student(made.folder, quantizers)
    train(network, taught(made, made.folder), made, updates=2, rate=1e-3)
    alone = network.state_dict()[rounding.WIDTHS].numpy()
    run(_worker, (tmp_path, made, quantizers), 2)
    for shard in SHARDS:
        first, second = (np.load(tmp_path / f"{rank}-{shard}.npy") for rank in (0, 1))
        assert np.array_equal(first, second)
        assert np.linalg.norm(first - alone) <= 1e-8 * np.linalg.norm(alone)


def test_a_run_measures_once_what_it_begins_to_round_by(made: Made, tmp_path: Path) -> None:
    run, encoder = Run(tmp_path / "run"), make_encoder(tmp_path / "encoder")
    run.folder.mkdir()
    asked = {"distill.quantization_aware": True, "distill.teacher": "0123456789ab", "quantize.calibration_rows": 4}
    settings = config.load("intent", asked)
    with pytest.raises(UserError, match=r"quantizers\.safetensors is missing"):
        worker.quantizers(settings.recipe, run)
    prepared = Prepared(run, settings, made.store, encoder, device.Choice("cpu", 1))
    ranges.begin(prepared)
    written = run.quantizers.read_bytes()
    ranges.begin(prepared)
    assert run.quantizers.read_bytes() == written
    found = worker.quantizers(settings.recipe, run)
    assert found is not None
    assert len(found.activations) == 2 * 6 + 2  # the pooler and the classifier
    plain = with_overrides(settings, {"distill.quantization_aware": False})
    assert worker.quantizers(plain.recipe, run) is None
    assert list(run.folder.iterdir()) == [run.quantizers]


def test_an_artefact_that_has_learned_is_not_calibrated(made: Made, tmp_path: Path) -> None:
    """Its levels are in the graph as they are in its file."""
    begun = ranges.measure(network_of(made), made.store, 0, ROWS)
    wide = replace(begun, activations=tuple(replace(one, step=8 * one.step) for one in begun.activations))
    folder = gating.copy(made.folder, tmp_path / "learned", gating.by_files(lambda to: wide.write(to / rounding.FILE)))
    report = quantizing.quantize(made, tmp_path / "int8", folder)
    assert report["quantization_aware"]
    graph = (tmp_path / "int8" / "model.int8.bin").read_bytes()
    bounds = [np.float32(bound).tobytes() for one in wide.activations for bound in one.bounds if bound]
    assert all(bound in graph for bound in bounds)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"distill.hidden": 1.0}, "distill.hidden learns the states"),
        ({"quantize.engine": "onnxruntime"}, "onnxruntime makes no graph of it"),
        ({"task": "masked_lm"}, "masked_lm answers by the word table itself"),
    ],
)
def test_what_a_rounding_student_cannot_do_is_refused(tmp_path: Path, overrides: dict[str, Any], reason: str) -> None:
    recipe = config.load("intent", {"distill.quantization_aware": True, **overrides}).recipe
    [found] = ranges.problems(recipe, make_encoder(tmp_path / "encoder"))
    assert (found.field, reason in found.reason) == ("distill.quantization_aware", True)


def test_an_engine_without_learned_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize\.engine=onnxruntime: the model was trained to be rounded"):
        quantize.refuse(Quantize(engine="onnxruntime"), trims=False, learned=True)
    quantize.refuse(Quantize(), trims=True, learned=True)


def test_a_graph_without_what_a_model_has_learned_is_refused() -> None:
    """Its weights alone were rounded, and the report said nothing of levels."""
    said = r"quantize\.kind=weights: the model was trained to be rounded .*; write quantize\.kind=static"
    with pytest.raises(ConfigError, match=said):
        quantize.refuse(Quantize(kind="weights"), trims=False, learned=True)
    quantize.refuse(Quantize(kind="weights"), trims=False)


@pytest.mark.parametrize(
    ("before", "after", "aware", "told"),
    [
        (0.9, 0.8956, False, False),
        (0.9, 0.8954, False, True),
        (0.9, 0.8954, True, False),
        (-1.0, -1.01, False, True),  # a headline may be a negative error
        (0.0, 0.0, False, False),
    ],
)
def test_a_report_says_how_to_keep_more(before: float, after: float, aware: bool, told: bool) -> None:
    report: dict[str, Any] = {"test": {"accuracy": after}, "parent": {"accuracy": before}, "run": "runs/intent"}
    report |= {"aware": True, "kind": "static"}
    lines = quantize.aware_text(report | ({"quantization_aware": True} if aware else {}))
    assert [line.partition(": ")[2] for line in lines] == (
        ["rtrain distill runs/intent --set distill.layers=null --set distill.quantization_aware=true"] if told else []
    )


def test_a_model_that_cannot_be_trained_so_is_told_what_else_there_is() -> None:
    """Not a command that would be refused."""
    report: dict[str, Any] = {"test": {"accuracy": 0.8}, "parent": {"accuracy": 0.9}, "run": "runs/intent"}
    report |= {"aware": False, "kind": "static"}
    [line] = quantize.aware_text(report)
    assert line.endswith("may keep more: rtrain quantize runs/intent --set quantize.flips=0.005")
    others: list[dict[str, Any]] = [{"kind": "weights"}, {"fallback": {}}]
    for more in others:
        assert quantize.aware_text(report | more) == ["int8 keeps 0.8889 of the float accuracy, less than 0.995"]


# ---------------------------------------------------------------------------------------------------- what it is worth


@pytest.mark.slow
def test_training_brings_back_answers_that_an_outlier_has_cost(made: Made, tmp_path: Path) -> None:
    """And of a model that int8 does not harm it costs none."""
    for name, factor in (("harmed", 128.0), ("whole", 1.0)):
        folder = plant(made.folder, tmp_path / name, layer=1, factor=factor, channels=(0, 16))
        parent, tokens = Torch(folder, artifact.read(folder), 1).network, taught(made, folder)
        samples = [padded(made.store.read("train", np.array([row])), 0) for row in range(ROWS)]
        by_nncf = openvino_graph.export(parent, samples[0]).calibrated(samples)
        quantizers = ranges.measure(parent, made.store, 0, ROWS)
        network = student(folder, quantizers)
        train(network, tokens, made, updates=120, rate=5e-4)
        weights = network.state_dict()
        parent.load_state_dict(beside.without(weights))
        learned = openvino_graph.export(parent, samples[0]).rounded(rounding.learned(quantizers, weights))

        def flips(graph: Any, folder: Path = folder, tokens: Tokens = tokens) -> float:
            one = Predictor(folder, artifact.read(folder), engine=graph.answering(1))
            assert tokens.teacher is not None
            return float(np.mean(one.run_tokens(tokens).argmax(1) != tokens.teacher.argmax(1)))

        if name == "harmed":
            assert flips(by_nncf) >= 0.1
            assert flips(learned) <= 0.5 * flips(by_nncf)
        else:
            assert flips(learned) <= flips(by_nncf) + 0.02
