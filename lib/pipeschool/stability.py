"""Faults that make training in a pipeline unstable or quietly wrong, and their cures, in numbers.

Every function makes its own small model from fixed seeds, or takes yours, and gives rows of plain
numbers; `table` prints them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeschool.arguments import number, whole_number
from pipeschool.runtime import run
from pipeschool.runtime.reference import gradients, max_error
from pipeschool.runtime.stages.microbatches import split
from pipeschool.schedules import build
from pipeschool.text import columns

Gradients = Sequence[dict[str, Tensor]]  # one dict per stage
SAMPLES = 16
mse = nn.functional.mse_loss


def table(rows: Sequence[Any]) -> str:
    """Rows (NamedTuples of one kind) as a table in plain text; numbers to four digits."""

    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [list(rows[0]._fields), *([text(value) for value in row] for row in rows)]
    return columns(cells, ">")


# --- gradients that are summed over microbatches, but not divided --------------------------------


class StepSize(NamedTuple):
    """Length of the first step, over that of the whole batch's step: 1 is right."""

    m: int
    sgd: float  # mean losses of the microbatches added up
    adam: float  # the same under Adam, which divides by the size of the gradient
    sgd_cured: float  # each weighed by its share of the samples, as `run` does


def undivided_gradients(ms: Iterable[int] = (1, 2, 4, 8)) -> list[StepSize]:
    """Forget to divide by m: SGD steps m times too far, and Adam hides it.

    For any m from 1 to 16, the number of samples.
    """
    model, batch = _regression()
    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ]
    right = [_step(model, _summed(model, batch, 1), make) for make in optimizers]
    rows = []
    for m in ms:
        sgd, adam = (
            _step(model, _summed(model, batch, m), make) / known
            for make, known in zip(optimizers, right, strict=True)
        )
        (cured,) = gradients([model], [batch], m)
        rows.append(StepSize(m, sgd, adam, _step(model, cured, optimizers[0]) / right[0]))
    return rows


def _summed(model: nn.Module, batch: tuple[Tensor, Tensor], m: int) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    for x, y in zip(split(batch[0], m), split(batch[1], m), strict=True):
        mse(own(x), y).backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def _step(
    model: nn.Module,
    gradient: dict[str, Tensor],
    make: Callable[[Any], torch.optim.Optimizer],
) -> float:
    own = copy.deepcopy(model)
    for name, parameter in own.named_parameters():
        parameter.grad = gradient[name].clone()
    before = nn.utils.parameters_to_vector(own.parameters()).detach().clone()
    make(own.parameters()).step()
    return float((nn.utils.parameters_to_vector(own.parameters()).detach() - before).norm())


def _regression() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A small model in double precision, and a batch for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        return model, (torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 2).double())


# --- normalisation over microbatches -------------------------------------------------------------


class NormError(NamedTuple):
    """gradient_error: the largest difference to the gradient of the whole batch. memory: what is
    left of an old running mean after one batch; 0.9 in an undivided batch; None without one."""

    norm: str
    m: int
    gradient_error: float
    memory: float | None


def norms(ms: Iterable[int] = (1, 2, 4, 8)) -> list[NormError]:
    """BatchNorm sees a microbatch where it should see the batch, and counts a batch m times.

    Cures: `frozen`, its statistics are kept as they are (eval mode); GroupNorm or LayerNorm, which
    look at one sample. `momentum` repairs the running mean only, with 1 - 0.9^(1/m) for 0.1.
    """
    rows = []
    for m in ms:
        makers: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: nn.BatchNorm1d(8),
            "batch, momentum": partial(nn.BatchNorm1d, 8, momentum=1 - 0.9 ** (1 / m)),
            "batch, frozen": lambda: nn.BatchNorm1d(8).eval(),
            "group": lambda: nn.GroupNorm(2, 8),
            "layer": lambda: nn.LayerNorm(8),
        }
        for name, make in makers.items():
            model, batch = _regression()
            model[1] = make().double()
            error = max_error(gradients([model], [batch], m), gradients([model], [batch], 1))
            rows.append(NormError(name, m, error, _memory(model[1], m)))
    return rows


def _memory(norm: nn.Module, m: int) -> float | None:
    """What is left of a running mean of 1 after a batch of zeros in m microbatches."""
    if not isinstance(norm, nn.BatchNorm1d):
        return None
    assert norm.running_mean is not None
    norm.running_mean.fill_(1.0)
    for x in split(torch.zeros(SAMPLES, 8).double(), m):
        norm(x)
    return float(norm.running_mean[0])


# --- dropout and recomputation -------------------------------------------------------------------


class RecomputeError(NamedTuple):
    """The largest difference to the gradient without recomputation."""

    new_numbers: float  # the second forward draws new random numbers
    restored: float  # it draws the same again
    run: float  # `run(recompute=True)`


def dropout_recompute(rate: float = 0.5) -> RecomputeError:
    """A second forward that draws other random numbers gives the gradient of another function."""
    model, (x, y) = _regression()
    model.append(nn.Dropout(rate))

    def gradient(second: int | None) -> Gradients:
        """After a forward with seed 1 another with seed `second`, and the backward through it."""
        own = copy.deepcopy(model)
        torch.manual_seed(1)
        outputs = own(x)
        (start,) = torch.autograd.grad(mse(outputs, y), outputs, retain_graph=True)
        if second is not None:
            torch.manual_seed(second)
            outputs = own(x)
        outputs.backward(start)
        return [{name: p.grad for name, p in own.named_parameters() if p.grad is not None}]

    with torch.random.fork_rng(devices=[]):
        right, new, restored = gradient(None), gradient(2), gradient(1)
    stages = [nn.Sequential(model[0], model[1], nn.Dropout(rate)), model[2:]]
    kept, again = (
        run(build("1f1b", 2, 4), stages, [(x, y)], device="cpu", recompute=recompute).gradients
        for recompute in (False, True)
    )
    return RecomputeError(max_error(new, right), max_error(restored, right), max_error(again, kept))


# --- gradients that come late --------------------------------------------------------------------


class Delayed(NamedTuple):
    """Where gradient descent got to. `bound` is the largest stable rate."""

    delay: int
    rate: float
    bound: float
    distance: float  # from the minimum after the last step; it started at 1


def stable_rate(delay: int, curvature: float = 1.0) -> float:
    """The rate from which on w(t+1) = w(t) - rate * curvature * w(t - delay) does not converge.

    2 sin(pi / (4 delay + 2)) / curvature (Levin and May, Theoretical Population Biology, 1976;
    for pipelines Yang et al., PipeMare, MLSys 2021). About pi / (2 delay + 1) / curvature: nearly
    in proportion to 1 / (1 + delay) where delays are long, and 2 / curvature without one.
    """
    whole_number("delay", delay, at_least=0)
    return 2 * math.sin(math.pi / (4 * delay + 2)) / number("curvature", curvature, positive=True)


def final_distance(rate: float, delay: int, steps: int = 200, curvature: float = 1.0) -> float:
    """How far from its minimum w ends up, on curvature w^2 / 2 with gradients `delay` steps old."""
    past = [1.0] * (delay + 1)  # the weights of the last steps, oldest first
    for _ in range(steps):
        past = [*past[1:], past[-1] - rate * curvature * past[0]]
        if abs(past[-1]) > 1e100:
            return math.inf
    return max(map(abs, past))


def late_gradients(
    rates: Iterable[float] = (0.1, 0.3, 0.9, 1.5),
    delays: Iterable[int] = (0, 1, 3, 7),
    steps: int = 200,
) -> list[Delayed]:
    """A table of rates and delays: a rate that is right without a delay diverges with one."""
    every = [(d, rate) for d in delays for rate in rates]
    return [Delayed(d, rate, stable_rate(d), final_distance(rate, d, steps)) for d, rate in every]


def delayed_rate(delay: int, steps: int) -> Callable[[int], float]:
    """What to multiply the rate by at each step, for `torch.optim.lr_scheduler.LambdaLR`.

    (1 + delay) ^ -(1 - step / steps), so from 1 / (1 + delay) up to 1 at `steps`, and then 1: the
    first technique of PipeMare (Yang et al., MLSys 2021), which counts the delay from 1.
    """
    whole_number("delay", delay, at_least=0)
    whole_number("steps", steps)
    return lambda step: (1 + delay) ** -(1 - min(step / steps, 1.0))


class Trained(NamedTuple):
    """loss: mean over the last tenth of the microbatches. worst: the largest of all."""

    case: str
    loss: float
    worst: float


def delayed_training(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    rate: float,
    loss: Callable[[Any, Any], Tensor],
    clip_norm: float = 1.0,
) -> list[Trained]:
    """Real pipelines on your data: the synchronous rate, with gradients that come late, and cures.

    Stage s of p is p - 1 - s updates late; the cures take the delay of the first stage for all. A
    rate that rises to `rate` only helps where the delay's bound is above that.
    """
    p, n = len(stages), len(batches)
    slow = delayed_rate(p - 1, n)

    def trained(case: str, schedule: str, factor: float = 1.0, **options: Any) -> Trained:
        def sgd(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=rate * factor)

        made = build(schedule, p, 1, batches=n)
        done = run(made, stages, batches, loss=loss, optimizer=sgd, device="cpu", **options)
        last = done.losses[-max(n // 10, 1) :]
        return Trained(case, sum(last) / len(last), max(done.losses))

    return [
        trained("no delay", "1f1b"),
        trained("delay", "pipedream"),
        trained("delay, rate / p", "pipedream", 1 / p),
        trained(
            "delay, rate rising from rate / p",
            "pipedream",
            scheduler=lambda sgd: torch.optim.lr_scheduler.LambdaLR(sgd, slow),
        ),
        trained("delay, clipped", "pipedream", clip_norm=clip_norm),
    ]


# --- clipping ------------------------------------------------------------------------------------


class Clipped(NamedTuple):
    """What a stage's gradient is multiplied by, where each stage clips its own, and where all are
    clipped together: `run` with clip_over ``stage`` and ``model``."""

    stage: int
    norm: float
    per_stage: float
    together: float


def clip_factors(stages: Gradients, clip_norm: float) -> list[Clipped]:
    """Each stage clips its own gradients: the stages' shares in the whole change, and so does its
    direction. The cure: one factor, from the root of the sum of the stages' squared norms.

    stages: gradients, one dict per stage, such as `Result.gradients`.
    """
    number("clip_norm", clip_norm, positive=True)
    norms = [math.hypot(*(float(g.norm()) for g in stage.values())) for stage in stages]
    whole = math.hypot(*norms)

    def factor(norm: float) -> float:
        return min(1.0, clip_norm / norm) if norm else 1.0

    return [Clipped(s, norm, factor(norm), factor(whole)) for s, norm in enumerate(norms)]


def direction(rows: Sequence[Clipped], together: bool = False) -> float:
    """The cosine of the angle between the gradient and what clipping makes of it: 1 is right."""
    factors = [row.together if together else row.per_stage for row in rows]
    norms = [row.norm for row in rows]
    clipped = [f * n for f, n in zip(factors, norms, strict=True)]
    product = sum(n * c for n, c in zip(norms, clipped, strict=True))
    return product / (math.hypot(*norms) * math.hypot(*clipped))


# --- fewer bits ----------------------------------------------------------------------------------


class InBfloat16(nn.Module):
    """A stage whose matrix products are done in bfloat16, with weights in float32. What it hands
    on is bfloat16, and so is the gradient that comes back."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """As the stage's."""
        with torch.autocast(x.device.type, torch.bfloat16):
            result: Tensor = self.stage(x)
            return result


class Precision(NamedTuple):
    """message_bytes: of all messages of one batch. loss: mean over the batch, before any update."""

    precision: str
    message_bytes: float
    loss: float


def mixed_precision(
    stages: Sequence[nn.Module],
    batch: tuple[Tensor, Tensor],
    m: int,
    loss: Callable[[Any, Any], Tensor] = mse,
) -> list[Precision]:
    """The same batch through the same stages in float32, and in bfloat16 within the stages."""
    rows = []
    for name, line in (("float32", list(stages)), ("bfloat16", list(map(InBfloat16, stages)))):
        done = run(
            build("1f1b", len(stages), m),
            line,
            [batch],
            loss=lambda outputs, targets: loss(outputs.float(), targets),
            device="cpu",
        )
        sent = sum(span.bytes for span in done.trace.messages if span.action.kind[:4] == "SEND")
        rows.append(Precision(name, sent, sum(done.losses) / len(done.losses)))
    return rows


class Underflow(NamedTuple):
    """Of all numbers in the gradients: those that float16 makes 0, or infinite."""

    scale: float
    numbers: int
    zeros: int
    infinite: int


def underflow(scales: Iterable[float] = (1.0, 2.0**8, 2.0**16, 2.0**32)) -> list[Underflow]:
    """Gradients of a deep network in float16. Below 2^-25 they vanish; a loss multiplied by
    `scale`, with the gradients divided by it before the update, keeps them, unless they overflow.
    """
    found = torch.cat([g.flatten() for g in _small_gradients().values()])
    found = found[found != 0]
    rows = []
    for scale in scales:
        half = (found * number("scale", scale, positive=True)).half()
        zeros, infinite = int((half == 0).sum()), int(half.isinf().sum())
        rows.append(Underflow(scale, len(found), zeros, infinite))
    return rows


def _small_gradients() -> dict[str, Tensor]:
    """Those of twelve layers with small weights, each of which makes them smaller."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())]
        model = nn.Sequential(*layers)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        (found,) = gradients([model], [(torch.randn(16, 16), torch.randn(16, 16))], 1)
    return found
