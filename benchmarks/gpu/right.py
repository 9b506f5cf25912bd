"""Whether a GPU's kernels are right: their results against plain arithmetic in float64, and against each other."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import LABELS, MODEL_NAME, Bench, forget, network, texts
from rtrain.core.ragged import Head
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch

    from rtrain.core.ragged import TokenBatch
    from rtrain.parallel.base import Strategy

Answers = tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
"""Logits, and the gradient by parameter."""
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}
"""Largest difference of attention's outputs and gradients, relative to the largest of them, by precision."""
SIGMAS = 5.0
"""Maximum deviation of the share of dropped values from its rate, in standard deviations."""
TOLERANCE, MAX_ERROR = 1e-8, 1e-2
"""How far the same training in other passes may differ in float64, and how far a planted bug must differ."""


def run(bench: Bench) -> None:
    for check in (attention, packed, dropout, scaling, recomputed, verify, pass_size):
        with bench.report.attempt(check.__name__):
            check(bench)
        forget(bench)


def formats(bench: Bench) -> list[str]:
    """The precisions that the device computes itself. A CPU emulates the others, slowly and as exactly."""
    from rtrain.models import precision

    formats = precision.device_formats(bench.device).formats
    return ["fp32", *sorted(formats)] if bench.gpu else ["fp32", "bf16"]


# --------------------------------------------------------------------------------------------------------- attention


def attention(bench: Bench) -> None:
    """Check attention over windows of many lengths in one pack: training's kernel against plain products in float64."""
    import torch

    from rtrain.models import attention as attending
    from rtrain.models.pack_layout import make_layout

    heads, dim = 4, 64
    lengths = np.random.default_rng(1).integers(1, bench.size.long + 1, 16 if bench.gpu else 5).astype(np.int32)
    layout = make_layout(_blank(lengths), heads, bench.device)
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, int(lengths.sum()), dim, generator=draw, dtype=torch.float64) for _ in range(4)]
    for name in formats(bench):
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        query, key, value, weight = (part.to(kind).to(bench.device) for part in tensors)
        inputs = [part.clone().requires_grad_() for part in (query, key, value)]
        module = torch.nn.Module().train()
        answer, _ = attending.packed_attention(
            module, inputs[0], inputs[1], inputs[2], None, dropout=0.0, layout=layout
        )
        answer.backward(weight.transpose(1, 2).contiguous())
        exact = [part.double().requires_grad_() for part in (query, key, value)]
        plain = _plain(exact[0], exact[1], exact[2], [int(size) for size in layout.sizes])
        plain.backward(weight.double().transpose(1, 2))
        errors = [_relative_error(answer, plain)]
        for mine, theirs in zip(inputs, exact, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            errors.append(_relative_error(mine.grad, theirs.grad))
        capability = torch.cuda.get_device_capability() if bench.gpu else (0, 0)
        kernel = attending.select_kernel(
            bench.device.type, capability, str(kind).removeprefix("torch."), dim, dropout=0.0, training=True
        )
        errors_by_name = dict(zip(("answers", "query", "key", "value"), errors, strict=True))
        bench.report.line(f"attention.{name}", max(errors), maximum=ROUNDING[name], kernel=kernel, of=errors_by_name)


def _plain(query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", sizes: list[int]) -> "torch.Tensor":
    """Attention by plain products, window by window; [1, tokens, heads, dim] -> the same."""
    import torch

    outputs, begin = [], 0
    for size in sizes:
        q, k, v = (part[0, :, begin : begin + size] for part in (query, key, value))
        outputs.append(torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ v)
        begin += size
    return torch.cat(outputs, dim=1).transpose(0, 1)[None]


def _blank(lengths: Any) -> "TokenBatch":
    from rtrain.core.ragged import single_window_batch

    count = int(lengths.sum())
    ids = np.arange(count, dtype=np.int32)
    rows = np.arange(len(lengths))
    return single_window_batch(ids, lengths, lengths, rows % 2, rows.astype(np.uint64))


def _relative_error(mine: "torch.Tensor", theirs: "torch.Tensor") -> float:
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).abs().max() / theirs.abs().max())


# ----------------------------------------------------------------------------------------------------- whole networks


def _loss() -> Any:
    from rtrain.config import DistillConfig
    from rtrain.tasks import base
    from rtrain.trainer import losses

    return losses.make_loss(base.get_task("classification"), DistillConfig(), Head(LABELS))


def answers(network: Any, tokens: "TokenBatch", precision: str) -> Answers:
    network.zero_grad(set_to_none=True)
    logits = step.forward(network, tokens, network.config.pad_token_id, precision)
    _loss()(logits, tokens).sum().backward()
    gradients = {
        name: parameter.grad.detach().double()
        for name, parameter in network.named_parameters()
        if parameter.grad is not None
    }
    return logits.detach().double(), gradients


def _differences(mine: Answers, theirs: Answers) -> tuple[float, float]:
    """The differences of logits, relative to the largest logit, and of the whole gradient, relative to its norm."""
    norm = sum(float(gradient.norm()) ** 2 for gradient in theirs[1].values()) ** 0.5
    difference = sum(float((mine[1][name] - gradient).norm()) ** 2 for name, gradient in theirs[1].items()) ** 0.5
    return _relative_error(mine[0], theirs[0]), difference / norm


def packed(bench: Bench) -> None:
    """Check the same texts without padding and with it. In half precision both are rounded, and neither may be rounded
    much more than the other."""
    report, tokens = bench.report, texts(bench, "squadshifts").take(np.arange(24))
    pack, pad = (network(bench, MODEL_NAME, pack=is_packed).eval() for is_packed in (True, False))
    exact = [answers(copy.deepcopy(model).double(), tokens, "fp64") for model in (pack, pad)]
    for name, value in zip(("logits", "gradient"), _differences(*exact), strict=True):
        report.line(f"packed.fp64.{name}", value, maximum=1e-10)
    for name, value in zip(
        ("logits", "gradient"), _differences(*(answers(model, tokens, "fp32") for model in (pack, pad))), strict=True
    ):
        report.line(f"packed.fp32.{name}", value, maximum=1e-4)
    for half in formats(bench)[1:]:
        errors = [_differences(answers(model, tokens, half), exact[1]) for model in (pack, pad)]
        for place, name in enumerate(("logits", "gradient")):
            mine, theirs = errors[0][place], errors[1][place]
            ratio = mine / max(theirs, 1e-12)
            report.line(f"packed.{half}.{name}", ratio, "x padded's error", maximum=2.0, packed=mine, padded=theirs)


def dropout(bench: Bench) -> None:
    """Check the share of zeros of dropout, and that the same seed gives the same zeros: in a layer, and in
    attention."""
    import torch

    from rtrain.models import attention as attending, dropout as masks
    from rtrain.models.pack_layout import make_layout

    rate, count = 0.1, 1 << 20
    layer = torch.nn.Sequential(torch.nn.Dropout(rate)).train()
    masks.use_fast_dropout(layer)
    unit_rows = torch.ones(count, device=bench.device)

    def draw_dropout(seed: int) -> "torch.Tensor":
        torch.manual_seed(seed)
        output: torch.Tensor = layer(unit_rows)
        return output

    _line(bench, "dropout.layer", draw_dropout(0), rate)
    same, other = torch.equal(draw_dropout(0), draw_dropout(0)), torch.equal(draw_dropout(0), draw_dropout(1))
    bench.report.line("dropout.by_seed", same and not other)

    # All weights of a window are equal, and the values are the unit matrix. So the outputs are the weights that were
    # kept.
    heads, width, windows = 2, 64, 16
    layout = make_layout(_blank(np.full(windows, width, dtype=np.int32)), heads, bench.device)
    unit = torch.eye(width, device=bench.device).repeat(windows, 1).expand(1, heads, windows * width, width)
    nothing = torch.zeros_like(unit).requires_grad_()
    module = torch.nn.Module().train()
    torch.manual_seed(0)
    output, _ = attending.packed_attention(module, nothing, nothing, unit, None, dropout=rate, layout=layout)
    _line(bench, "dropout.attention", output.detach() * width, rate)


def _line(bench: Bench, key: str, output: "torch.Tensor", rate: float) -> None:
    count = output.numel()
    share, mean = float((output == 0).double().mean()), float(output.double().mean())
    sigma = (rate * (1 - rate) / count) ** 0.5
    deviation = max(abs(share - rate), abs(mean - 1) * (1 - rate)) / sigma
    bench.report.line(
        key, deviation, "sigma from the rate", maximum=SIGMAS, rate=rate, zeros=share, mean=mean, numbers=count
    )


def scaling(bench: Bench) -> None:
    """Check fp16 from a loss scale at which the gradient is infinite: no update is made until the gradient is
    finite."""
    import torch

    from rtrain.checkpoint import format as scales
    from rtrain.config import OptimConfig
    from rtrain.parallel.ddp import DDPStrategy
    from rtrain.trainer import optimizers

    tokens = texts(bench, "banking77").take(np.arange(16))
    model = network(bench, MODEL_NAME).eval()
    exact = answers(model, tokens, "fp32")[1]
    norm = sum(float(gradient.norm()) ** 2 for gradient in exact.values()) ** 0.5 / len(tokens)
    exchange, optimizer = DDPStrategy(model), optimizers.build_optimizer(model, OptimConfig())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    scale, skipped, unchanged = scales.LossScale(2.0**40), 0, True
    while True:
        done = step.StepRunner(
            exchange, optimizer, _loss(), pad_id=model.config.pad_token_id, precision="fp16", max_grad_norm=1.0
        ).run_step([tokens], scale=scale.value)
        if not done.is_skipped or skipped == 40:
            break
        skipped += 1
        unchanged &= all(torch.equal(value, before[name]) for name, value in model.named_parameters())
        scale = scales.LossScale(scale.value / 2)
    has_changed = any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    report = bench.report
    report.line("scaling.overflow", skipped > 0 and unchanged and has_changed, skipped=skipped, scale=scale.value)
    report.line("scaling.gradient", abs(done.gradient_norm / norm - 1), "of fp32's norm", maximum=2e-2)


def recomputed(bench: Bench) -> None:
    """Check that layers computed again in the backward pass, with dropout, give the same gradient bit for bit."""
    import torch

    tokens = texts(bench, "squadshifts").take(np.arange(16))
    gradients = []
    for recompute in (False, True):
        model = network(bench, MODEL_NAME, attention_dropout=None, recompute=recompute).train()
        torch.manual_seed(5)
        gradients.append(answers(model, tokens, bench.precision)[1])
    other = [name for name, value in gradients[0].items() if not torch.equal(value, gradients[1][name])]
    worst = max(
        float((value - gradients[1][name]).norm() / value.norm().clamp(min=1e-30))
        for name, value in gradients[0].items()
    )
    about: dict[str, Any] = {"of": len(gradients[0]), "first": other[:3], "largest_difference": worst}
    bench.report.line("recomputed.gradient", len(other), "tensors that differ", maximum=0, **about)


# ------------------------------------------------------------------------------------------------- the same training


def verify(bench: Bench) -> None:
    """Check that four updates in float64 are equal by passes of all rows, of eight and of three, and that a planted bug
    shows."""
    from rtrain.data.order import assign_micro_batches
    from rtrain.verification import planted_bugs

    tokens, rows = texts(bench, "banking77"), 32
    start = network(bench, MODEL_NAME).double().eval()

    def trained(max_rows: int | None, runner_class: type[step.StepRunner] = step.StepRunner) -> "_Run":
        run = _Run(start, runner_class)
        for number in range(4):
            part = tokens.take(np.arange(number * rows, (number + 1) * rows) % len(tokens))
            passes = assign_micro_batches(part.window_lengths, 1, 0, max_rows)
            run.runner.run_step([part.take(places) for places in passes])
        return run

    reference = trained(None)
    for max_rows in (8, 3):
        weights, gradient, worst = trained(max_rows).differences(reference)
        key = f"verify.passes_of_{max_rows}"
        bench.report.line(f"{key}.weights", weights, "of the distance moved", maximum=TOLERANCE, updates=4)
        bench.report.line(f"{key}.gradient", gradient, "of the tensor's norm", maximum=TOLERANCE, worst=worst)
    weights, gradient, _ = trained(3, planted_bugs.BUGS["k ignored"]).differences(reference)
    bench.report.line("verify.planted", max(weights, gradient), floor=MAX_ERROR, bug="k ignored", tolerance=TOLERANCE)


class _Run(step.Observer):
    """A training in float64 that keeps its gradients."""

    def __init__(self, start: Any, runner_class: type[step.StepRunner]):
        from rtrain.config import OptimConfig
        from rtrain.parallel.ddp import DDPStrategy
        from rtrain.trainer import optimizers

        self.start, self.trained = start, copy.deepcopy(start)
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.runner = runner_class(
            DDPStrategy(self.trained),
            optimizers.build_optimizer(self.trained, OptimConfig(lr=1e-3)),
            _loss(),
            pad_id=self.trained.config.pad_token_id,
            precision="fp64",
            max_grad_norm=1.0,
            observer=self,
        )

    def on_gradient(self, exchange: "Strategy") -> None:
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in exchange.module.named_parameters()
            if parameter.grad is not None
        }
        self.gradients.append(gradients)

    def differences(self, other: "_Run") -> tuple[float, float, str]:
        """See `rtrain.verification.layout_runs.CaseMeasurement`."""
        from rtrain.verification.layout_runs import GRADIENT_FLOOR

        difference = movement = gradient = 0.0
        worst = ""
        parameters, before = dict(other.trained.named_parameters()), dict(self.start.named_parameters())
        for name, value in self.trained.named_parameters():
            difference += float((value - parameters[name]).detach().norm()) ** 2
            movement += float((parameters[name] - before[name]).detach().norm()) ** 2
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            norm = sum(float(gradient.norm()) ** 2 for gradient in theirs.values()) ** 0.5
            for name, value in theirs.items():
                ratio = float((mine[name] - value).norm()) / max(float(value.norm()), GRADIENT_FLOOR * norm)
                if not ratio <= gradient:
                    gradient, worst = ratio, name
        return (difference / movement) ** 0.5, gradient, worst


def pass_size(bench: Bench) -> None:
    """Check the pass size that two measured passes suggest: whether a pass of that size runs beside the optimizer's
    moments."""
    if not bench.gpu:
        bench.report.line("pass_size", None, note="a processor's passes have a size of their own")
        return
    import torch

    from rtrain.config import OptimConfig
    from rtrain.trainer import batch_size as passes, optimizers

    long, loss = texts(bench, "long"), _loss()

    def make_tokens(tokens: int) -> "TokenBatch":
        return long.take(np.resize(np.arange(len(long)), -(-tokens // bench.size.long)))

    for name in bench.size.models:
        with bench.report.attempt(f"pass_size.{name}"):
            model = network(bench, name)
            fits = passes.probe(model, loss, make_tokens, model.config.pad_token_id, bench.precision)
            optimizer = optimizers.build_optimizer(model, OptimConfig())
            passes.forward_backward(model, loss, make_tokens(2048), model.config.pad_token_id, bench.precision)
            optimizer.step()
            torch.cuda.reset_peak_memory_stats()
            passes.forward_backward(model, loss, make_tokens(fits), model.config.pad_token_id, bench.precision)
            share = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
            bench.report.line(
                f"pass_size.{name}", share, "of the memory", maximum=0.95, tokens=fits, precision=bench.precision
            )
            del model, optimizer
        forget(bench)
