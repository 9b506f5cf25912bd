"""Whether a GPU's kernels are right: their results against plain arithmetic in float64, and against each other."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.bench import CARRIED, LABELS, Bench, forget, network, texts
from rtrain.core.ragged import Head
from rtrain.trainer import step

if TYPE_CHECKING:
    import torch

    from rtrain.core.ragged import Tokens
    from rtrain.parallel.base import Exchange

Answers = tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
"""Logits, and the gradient by parameter."""
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}
"""Largest difference of attention's outputs and gradients, relative to the largest of them, by precision."""
SIGMAS = 5.0
"""Standard deviations by which the share of dropped values may differ from its rate; chance explains no more."""
TOLERANCE, SEEN = 1e-8, 1e-2
"""How far the same training in other passes may differ in float64, and how far a planted bug must differ."""


def run(bench: Bench) -> None:
    for check in (attention, packed, dropout, scaling, recomputed, verify, pass_size):
        with bench.report.attempt(check.__name__):
            check(bench)
        forget(bench)


def formats(bench: Bench) -> list[str]:
    """The precisions that the device computes itself. A CPU emulates the others, slowly and as exactly."""
    from rtrain.models import precision

    found = precision.of(bench.device).formats
    return ["fp32", *sorted(found)] if bench.gpu else ["fp32", "bf16"]


# --------------------------------------------------------------------------------------------------------- attention


def attention(bench: Bench) -> None:
    """Check attention over windows of many lengths in one pack: training's kernel against plain products in float64."""
    import torch

    from rtrain.models import attention as attending
    from rtrain.models.pack_layout import layout_of

    heads, dim = 4, 64
    lengths = np.random.default_rng(1).integers(1, bench.size.long + 1, 16 if bench.gpu else 5).astype(np.int32)
    layout = layout_of(_blank(lengths), heads, bench.device)
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, int(lengths.sum()), dim, generator=draw, dtype=torch.float64) for _ in range(4)]
    for name in formats(bench):
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        query, key, value, weight = (part.to(kind).to(bench.device) for part in given)
        own = [part.clone().requires_grad_() for part in (query, key, value)]
        module = torch.nn.Module().train()
        answer, _ = attending.packed(module, own[0], own[1], own[2], None, dropout=0.0, layout=layout)
        answer.backward(weight.transpose(1, 2).contiguous())
        exact = [part.double().requires_grad_() for part in (query, key, value)]
        plain = _plain(exact[0], exact[1], exact[2], [int(size) for size in layout.sizes])
        plain.backward(weight.double().transpose(1, 2))
        errors = [_apart(answer, plain)]
        for mine, theirs in zip(own, exact, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            errors.append(_apart(mine.grad, theirs.grad))
        capability = torch.cuda.get_device_capability() if bench.gpu else (0, 0)
        kernel = attending.kernel_for(
            bench.device.type, capability, str(kind).removeprefix("torch."), dim, dropout=0.0, trains=True
        )
        named = dict(zip(("answers", "query", "key", "value"), errors, strict=True))
        bench.report.line(f"attention.{name}", max(errors), most=ROUNDING[name], kernel=kernel, of=named)


def _plain(query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", sizes: list[int]) -> "torch.Tensor":
    """Attention by plain products, window by window; [1, tokens, heads, dim] -> the same."""
    import torch

    found, begin = [], 0
    for size in sizes:
        q, k, v = (part[0, :, begin : begin + size] for part in (query, key, value))
        found.append(torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ v)
        begin += size
    return torch.cat(found, dim=1).transpose(0, 1)[None]


def _blank(lengths: Any) -> "Tokens":
    from rtrain.core.ragged import single

    count = int(lengths.sum())
    ids = np.arange(count, dtype=np.int32)
    rows = np.arange(len(lengths))
    return single(ids, lengths, lengths, rows % 2, rows.astype(np.uint64))


def _apart(mine: "torch.Tensor", theirs: "torch.Tensor") -> float:
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).abs().max() / theirs.abs().max())


# ----------------------------------------------------------------------------------------------------- whole networks


def _loss() -> Any:
    from rtrain.config import Distill
    from rtrain.tasks import base
    from rtrain.trainer import losses

    return losses.for_run(base.get("classification"), Distill(), Head(LABELS))


def answers(made: Any, tokens: "Tokens", precision: str) -> Answers:
    made.zero_grad(set_to_none=True)
    logits = step.forward(made, tokens, made.config.pad_token_id, precision)
    _loss()(logits, tokens).sum().backward()
    found = {name: one.grad.detach().double() for name, one in made.named_parameters() if one.grad is not None}
    return logits.detach().double(), found


def _differences(mine: Answers, theirs: Answers) -> tuple[float, float]:
    """The differences of logits, relative to the largest logit, and of the whole gradient, relative to its norm."""
    whole = sum(float(one.norm()) ** 2 for one in theirs[1].values()) ** 0.5
    apart = sum(float((mine[1][name] - one).norm()) ** 2 for name, one in theirs[1].items()) ** 0.5
    return _apart(mine[0], theirs[0]), apart / whole


def packed(bench: Bench) -> None:
    """Check the same texts without padding and with it. In half precision both are rounded, and neither may be rounded
    much more than the other."""
    report, made = bench.report, texts(bench, "squadshifts").pick(np.arange(24))
    pack, pad = (network(bench, CARRIED, pack=way).eval() for way in (True, False))
    exact = [answers(copy.deepcopy(one).double(), made, "fp64") for one in (pack, pad)]
    for name, value in zip(("logits", "gradient"), _differences(*exact), strict=True):
        report.line(f"packed.fp64.{name}", value, most=1e-10)
    for name, value in zip(
        ("logits", "gradient"), _differences(*(answers(one, made, "fp32") for one in (pack, pad))), strict=True
    ):
        report.line(f"packed.fp32.{name}", value, most=1e-4)
    for half in formats(bench)[1:]:
        errors = [_differences(answers(one, made, half), exact[1]) for one in (pack, pad)]
        for place, name in enumerate(("logits", "gradient")):
            mine, theirs = errors[0][place], errors[1][place]
            ratio = mine / max(theirs, 1e-12)
            report.line(f"packed.{half}.{name}", ratio, "x padded's error", most=2.0, packed=mine, padded=theirs)


def dropout(bench: Bench) -> None:
    """Check the share of zeros of dropout, and that the same seed gives the same zeros: in a layer, and in
    attention."""
    import torch

    from rtrain.models import attention as attending, dropout as masks
    from rtrain.models.pack_layout import layout_of

    rate, count = 0.1, 1 << 20
    layer = torch.nn.Sequential(torch.nn.Dropout(rate)).train()
    masks.replace(layer)
    ones = torch.ones(count, device=bench.device)

    def drawn(seed: int) -> "torch.Tensor":
        torch.manual_seed(seed)
        found: torch.Tensor = layer(ones)
        return found

    _line(bench, "dropout.layer", drawn(0), rate)
    same, other = torch.equal(drawn(0), drawn(0)), torch.equal(drawn(0), drawn(1))
    bench.report.line("dropout.by_seed", same and not other)

    # All weights of a window are equal, and the values are the unit matrix. So the outputs are the weights that were
    # kept.
    heads, width, windows = 2, 64, 16
    layout = layout_of(_blank(np.full(windows, width, dtype=np.int32)), heads, bench.device)
    unit = torch.eye(width, device=bench.device).repeat(windows, 1).expand(1, heads, windows * width, width)
    nothing = torch.zeros_like(unit).requires_grad_()
    module = torch.nn.Module().train()
    torch.manual_seed(0)
    kept, _ = attending.packed(module, nothing, nothing, unit, None, dropout=rate, layout=layout)
    _line(bench, "dropout.attention", kept.detach() * width, rate)


def _line(bench: Bench, key: str, kept: "torch.Tensor", rate: float) -> None:
    count = kept.numel()
    share, mean = float((kept == 0).double().mean()), float(kept.double().mean())
    sigma = (rate * (1 - rate) / count) ** 0.5
    far = max(abs(share - rate), abs(mean - 1) * (1 - rate)) / sigma
    bench.report.line(key, far, "sigma from the rate", most=SIGMAS, rate=rate, zeros=share, mean=mean, numbers=count)


def scaling(bench: Bench) -> None:
    """Check fp16 from a loss scale at which the gradient is infinite: no update is made until the gradient is
    finite."""
    import torch

    from rtrain.checkpoint import loss_scale as scales
    from rtrain.config import Optim
    from rtrain.parallel.ddp import Replicated
    from rtrain.trainer import optimizers

    tokens = texts(bench, "banking77").pick(np.arange(16))
    made = network(bench, CARRIED).eval()
    exact = answers(made, tokens, "fp32")[1]
    norm = sum(float(one.norm()) ** 2 for one in exact.values()) ** 0.5 / len(tokens)
    exchange, optimizer = Replicated(made), optimizers.build(made, Optim())
    before = {name: value.detach().clone() for name, value in made.named_parameters()}
    scale, skipped, unchanged = scales.Scale(2.0**40), 0, True
    while True:
        done = step.run_update(
            exchange,
            optimizer,
            _loss(),
            [tokens],
            pad_id=made.config.pad_token_id,
            precision="fp16",
            scale=scale.value,
            clip_norm=1.0,
        )
        if not done.skipped or skipped == 40:
            break
        skipped += 1
        unchanged &= all(torch.equal(value, before[name]) for name, value in made.named_parameters())
        scale = scales.Scale(scale.value / 2)
    moved = any(not torch.equal(value, before[name]) for name, value in made.named_parameters())
    report = bench.report
    report.line("scaling.overflow", skipped > 0 and unchanged and moved, skipped=skipped, scale=scale.value)
    report.line("scaling.gradient", abs(done.gradient_norm / norm - 1), "of fp32's norm", most=2e-2)


def recomputed(bench: Bench) -> None:
    """Check that layers computed again in the backward pass, with dropout, give the same gradient bit for bit."""
    import torch

    tokens = texts(bench, "squadshifts").pick(np.arange(16))
    found = []
    for again in (False, True):
        made = network(bench, CARRIED, attention_dropout=None, recompute=again).train()
        torch.manual_seed(5)
        found.append(answers(made, tokens, bench.precision)[1])
    other = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    worst = max(
        float((value - found[1][name]).norm() / value.norm().clamp(min=1e-30)) for name, value in found[0].items()
    )
    about: dict[str, Any] = {"of": len(found[0]), "first": other[:3], "largest_difference": worst}
    bench.report.line("recomputed.gradient", len(other), "tensors that differ", most=0, **about)


# ------------------------------------------------------------------------------------------------- the same training


def verify(bench: Bench) -> None:
    """Check that four updates in float64 are equal by passes of all rows, of eight and of three, and that a planted bug
    shows."""
    from rtrain.data.order import deal
    from rtrain.verification import planted_bugs

    tokens, rows = texts(bench, "banking77"), 32
    start = network(bench, CARRIED).double().eval()

    def trained(most: int | None, run_update: step.RunUpdate = step.run_update) -> "_Run":
        found = _Run(start)
        for number in range(4):
            part = tokens.pick(np.arange(number * rows, (number + 1) * rows) % len(tokens))
            passes = deal(part.lengths, 1, 0, most)
            found.update(run_update, [part.pick(chosen) for chosen in passes])
        return found

    reference = trained(None)
    for most in (8, 3):
        weights, gradient, worst = trained(most).differences(reference)
        key = f"verify.passes_of_{most}"
        bench.report.line(f"{key}.weights", weights, "of the distance moved", most=TOLERANCE, updates=4)
        bench.report.line(f"{key}.gradient", gradient, "of the tensor's norm", most=TOLERANCE, worst=worst)
    weights, gradient, _ = trained(3, planted_bugs.BUGS["k ignored"]).differences(reference)
    bench.report.line("verify.planted", max(weights, gradient), floor=SEEN, bug="k ignored", tolerance=TOLERANCE)


class _Run(step.Observer):
    """A training in float64 that keeps its gradients."""

    def __init__(self, start: Any):
        from rtrain.config import Optim
        from rtrain.parallel.ddp import Replicated
        from rtrain.trainer import optimizers

        self.start, self.made = start, copy.deepcopy(start)
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.exchange = Replicated(self.made)
        self.optimizer = optimizers.build(self.made, Optim(lr=1e-3))

    def update(self, run_update: step.RunUpdate, passes: "list[Tokens]") -> None:
        run_update(
            self.exchange,
            self.optimizer,
            _loss(),
            passes,
            pad_id=self.made.config.pad_token_id,
            precision="fp64",
            clip_norm=1.0,
            observer=self,
        )

    def gradient(self, exchange: "Exchange") -> None:
        found = {name: one.grad.clone() for name, one in exchange.module.named_parameters() if one.grad is not None}
        self.gradients.append(found)

    def differences(self, other: "_Run") -> tuple[float, float, str]:
        """See `rtrain.verification.layout_runs.Measured`."""
        from rtrain.verification.layout_runs import FLOOR

        apart = moved = gradient = 0.0
        worst = ""
        known, before = dict(other.made.named_parameters()), dict(self.start.named_parameters())
        for name, value in self.made.named_parameters():
            apart += float((value - known[name]).detach().norm()) ** 2
            moved += float((known[name] - before[name]).detach().norm()) ** 2
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            whole = sum(float(one.norm()) ** 2 for one in theirs.values()) ** 0.5
            for name, value in theirs.items():
                ratio = float((mine[name] - value).norm()) / max(float(value.norm()), FLOOR * whole)
                if not ratio <= gradient:
                    gradient, worst = ratio, name
        return (apart / moved) ** 0.5, gradient, worst


def pass_size(bench: Bench) -> None:
    """Check the pass size that two measured passes suggest: whether a pass of that size runs beside the optimizer's
    moments."""
    if not bench.gpu:
        bench.report.line("pass_size", None, note="a processor's passes have a size of their own")
        return
    import torch

    from rtrain.config import Optim
    from rtrain.trainer import batch_size as passes, optimizers

    long, loss = texts(bench, "long"), _loss()

    def made(tokens: int) -> "Tokens":
        return long.pick(np.resize(np.arange(len(long)), -(-tokens // bench.size.long)))

    for name in bench.size.models:
        with bench.report.attempt(f"pass_size.{name}"):
            whole = network(bench, name)
            fits = passes.measured(whole, loss, made, whole.config.pad_token_id, bench.precision)
            optimizer = optimizers.build(whole, Optim())
            passes.one_pass(whole, loss, made(2048), whole.config.pad_token_id, bench.precision)
            optimizer.step()
            torch.cuda.reset_peak_memory_stats()
            passes.one_pass(whole, loss, made(fits), whole.config.pad_token_id, bench.precision)
            share = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory
            bench.report.line(
                f"pass_size.{name}", share, "of the memory", most=0.95, tokens=fits, precision=bench.precision
            )
            del whole, optimizer
        forget(bench)
