"""Random models and settings, and what one process makes of them.

A draw says beforehand why it may be refused: `reasons` holds the words of the refusals that it
asks for. Whatever is not refused must equal `one_process`, which is plain PyTorch: the loss of a
whole batch where a batch may be looked at as a whole, otherwise microbatch by microbatch, at the
weight versions of the published update rules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pipeschool as ps
import torch
from oracle import FORWARD
from pipeschool.actions import Schedule
from pipeschool.versions import with_weights
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH, PAD = 6, -100
SYNCHRONOUS = (
    "naive gpipe 1f1b eager_1f1b interleaved looped_bfs zb_h1 zb_h2 zb_v dualpipe_v chimera"
).split()
POLICIES = ["stash", "vertical_sync", "latest"]


# --- stages: they take (x) or (x, mask), and give as many ----------------------------------------


class Block(nn.Module):
    """A layer between two shapes that are the same; a mask goes by, and is used."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.inner(x)
        return y if mask is None else (y * (1 + mask), mask)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Residual(Block):
    def inner(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Normed(Block):
    """With a norm of the kind that is given instead of the layer."""

    def __init__(self, layer: nn.Module, norm: nn.Module):
        super().__init__(layer)
        self.norm = norm

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)))


class Recurrent(Block):
    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.steps = nn.LSTM(2, 2, batch_first=True)

    def inner(self, x: Tensor) -> Tensor:
        return self.layer(self.steps(x.view(len(x), 3, 2))[0].reshape(len(x), WIDTH))


class Twice(Block):
    """One layer under two names."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.again = layer

    def inner(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.layer(x)))


class Counts(Block):
    """What it gives depends on how often it was called; only a buffer knows."""

    def __init__(self, layer: nn.Module, persistent: bool):
        super().__init__(layer)
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def inner(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return torch.tanh(self.layer(x)) * (1 + self.calls / 10)


class Views(Block):
    """Two weights that are used as one."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.more = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def inner(self, x: Tensor) -> Tensor:
        both = torch.cat([self.layer.weight, self.more])
        return torch.tanh(x @ both[::2].T)


class Marks(Block):
    """Makes a mask, of integers, that the later stages use."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.inner(x), (x > 0).long()


class Flips(Block):
    """Changes the mask in place, and hands it on."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if mask is not None:
            mask.neg_().add_(1)
        return super().forward(x, mask)


class Drops(Block):
    """The end of the line: the mask is used, and no longer handed on."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = super().forward(x, mask)
        return y[0] if isinstance(y, tuple) else y


class Hidden(Block):
    """A weight that nobody knows of."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.own = [nn.Parameter(torch.ones(WIDTH))]


class Looks(nn.Module):
    """The first stage, where the inputs are numbers of words."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


# --- losses --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.scale * nn.functional.mse_loss(y, target)


def of_squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def no_padding(target: Tensor) -> Tensor:
    return (target != PAD).sum()


# --- optimizers ----------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-2)


def groups(parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    parts = [[p for p in given if (p.dim() > 1) == wide] for wide in (True, False)]
    decays = [{"params": part, "weight_decay": 0.1 * (k == 0)} for k, part in enumerate(parts)]
    return torch.optim.AdamW([g for g in decays if g["params"]], lr=0.01, eps=1e-2)


def forgets(parameters: Any) -> None:
    sgd(parameters)


def steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)


# --- draws ---------------------------------------------------------------------------------------


@dataclass
class Draw:
    """One model with data and settings. reasons: words of the refusals that may come."""

    number: int
    schedule: Schedule
    stages: list[nn.Module]
    batches: list[tuple[Tensor, Tensor]]
    options: dict[str, Any]
    legs: int = 0  # batches in a leg of `train`; 0 for `run`
    reasons: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sizes = [len(x) for x, _ in self.batches]
        chosen = {n: getattr(v, "__name__", v) for n, v in self.options.items()}
        s = self.schedule
        return (
            f"draw {self.number}: {s.name} p={s.p} m={s.m} weights={s.weights} owners={s.owners} "
            f"batches={sizes} {self.kinds} {chosen} legs={self.legs} reasons={self.reasons}"
        )

    def run(self) -> tuple[list[float], list[dict[str, Tensor]], list[dict[str, Tensor]] | None]:
        """(losses of microbatches, state dicts, gradients of the last update) on real workers."""
        if not self.legs:
            result = ps.run(self.schedule, self.stages, self.batches, **self.options)
            return result.losses, result.state_dicts, result.gradients
        chunks = len(self.stages) // self.schedule.p
        trained = ps.train(
            self.schedule.name,
            self.stages,
            self.batches,
            m=self.schedule.m,
            v=chunks if chunks > 1 else None,
            every=self.legs,
            log=None,
            **self.options,
        )
        return trained.losses, trained.state_dicts, None


def draw(number: int) -> Draw:
    """The draw of this number; always the same."""
    rng = Random(number)
    torch.manual_seed(number)
    schedule = _schedule(rng)
    count = rng.choice([1, 1, 2, 3])
    synchronous = schedule.synchronous
    if not synchronous:
        schedule = _rebuilt(schedule, count)
    made = Draw(number, schedule, [], [], {})
    dtype = rng.choice([torch.float64, torch.float64, torch.float32])
    _model(made, rng)
    made.stages = [stage.to(dtype) for stage in made.stages]
    _ties(made, rng)
    _data(made, rng, count, dtype)
    _settings(made, rng)
    return made


def _schedule(rng: Random) -> Schedule:
    while True:
        p, m = rng.choice([1, 2, 2, 3, 4]), rng.randint(1, 6)
        kind = rng.random()
        try:
            if kind < 0.6:
                name = rng.choice(SYNCHRONOUS)
                v = 2 if name in ("interleaved", "looped_bfs") else None
                return ps.build(name, p, m, v=v)
            if kind < 0.7:
                return ps.replicate(ps.build(rng.choice(SYNCHRONOUS[:6]), min(p, 2), m), 2)
            if kind < 0.75:
                return ps.round_robin([rng.choice([1, 2]) for _ in range(min(p, 2))], m,
                                      weights="flush")  # fmt: skip
            if kind < 0.85:
                return ps.pipedream_2bw(p, m)
            return with_weights(ps.pipedream(p, m), rng.choice(POLICIES))
        except ValueError:  # these numbers do not go together
            continue


def _rebuilt(schedule: Schedule, batches: int) -> Schedule:
    """An asynchronous schedule for a longer stream."""
    builder = ps.pipedream_2bw if schedule.weights == "double_buffer" else ps.pipedream
    return with_weights(builder(schedule.p, schedule.m, batches=batches), schedule.weights)


def _model(made: Draw, rng: Random) -> None:
    schedule, count = made.schedule, made.schedule.stages
    alone = all(len(workers) == 1 for workers in schedule.owners)
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "Block": Block,
        "Residual": Residual,
        "LayerNorm": lambda layer: Normed(layer, nn.LayerNorm(WIDTH)),
        "no dropout": lambda layer: Normed(layer, nn.Dropout(0.0)),
        "LSTM": Recurrent,
        "Twice": Twice,
        "Views": Views,
        "weight_norm": lambda layer: Block(weight_norm(layer)),
        "Hidden": Hidden,
        "Flips": Flips,
        "frozen": lambda layer: Block(layer).requires_grad_(False),
    }
    if alone:  # of workers that take turns, each has buffers of its own
        makers["BatchNorm"] = lambda layer: Normed(layer, nn.BatchNorm1d(WIDTH))
        makers["Counts"] = lambda layer: Counts(layer, True)
        makers["Counts, unsaved"] = lambda layer: Counts(layer, False)
    usual = [name for name in makers if name not in ("Hidden", "frozen")]
    for index in range(count):
        rare = rng.random() < 0.03
        name = rng.choice(["Hidden", "frozen"] if rare else usual)
        layer = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.8)
        if index == 0 and count > 1 and rng.random() < 0.2:
            name, stage = "words", Looks(rng.random() < 0.3)
        elif index == 0 and count > 1 and rng.random() < 0.3:
            name, stage = "Marks", Marks(layer)
        elif index == count - 1:
            name, stage = "Drops", Drops(layer)
        else:
            stage = makers[name](layer)
        made.kinds.append(name)
        made.stages.append(stage)
    if "Hidden" in made.kinds:
        made.reasons.append("holds a tensor to be trained that no optimizer gets")
    if "Flips" in made.kinds and "Marks" in made.kinds:
        made.reasons += ["changes its input in place"]


def _ties(made: Draw, rng: Random) -> None:
    plain = [s for s, kind in enumerate(made.kinds) if kind in ("Block", "Residual", "Drops")]
    if len(plain) < 2 or rng.random() > 0.15:
        return
    one, other = (made.stages[s].layer for s in rng.sample(plain, 2))
    if rng.random() < 0.3:
        other.weight.data = one.weight.data
        made.reasons.append("are two tensors in the same memory")
    else:
        other.weight = one.weight
        made.kinds.append("tied")
        made.reasons.append("share the parameter")


def _data(made: Draw, rng: Random, count: int, dtype: torch.dtype) -> None:
    m, least = made.schedule.m, 2 if "BatchNorm" in made.kinds else 1
    whole = torch.randn(100, 2 * WIDTH, dtype=dtype)
    if not made.schedule.synchronous:
        count = made.schedule.batches
    loss = rng.choice("mse mse own l1 cross padded padded weighted sum parameters".split())
    uneven = rng.random() < 0.5
    for _ in range(count):
        n = m * rng.randint(least, least + 1) + (rng.randint(0, m - 1) if uneven else 0)
        start = rng.randint(0, 100 - n)
        x, y = whole[start : start + n, ::2], whole[start : start + n, 1::2]
        if made.kinds[0] == "words":
            x = torch.randint(9, (n,))
        if loss in ("cross", "padded", "weighted"):
            y = torch.randint(WIDTH, (n,))
        if loss == "padded":
            y[torch.rand(n) < 0.4] = PAD
        made.batches.append((x, y))
    if uneven:
        made.reasons.append("engine='torch' needs all microbatches alike")
    options = made.options
    weighs = rng.random() < 0.6
    if loss == "own":
        options["loss"] = of_squares
    elif loss == "l1":
        options["loss"] = nn.L1Loss()
    elif loss == "cross":
        options["loss"] = nn.CrossEntropyLoss(label_smoothing=0.1)
    elif loss == "padded":
        options["loss"] = rng.choice([nn.CrossEntropyLoss(), nn.functional.cross_entropy])
        made.reasons.append("ignores targets of -100")
        if weighs:
            options["weigh"] = no_padding
            made.reasons.append("weigh gives 0 for all targets of an update")
    elif loss == "weighted":
        of_classes = torch.rand(WIDTH).to(dtype) + 0.1
        options["loss"] = nn.CrossEntropyLoss(weight=of_classes)
        made.reasons.append("has class weights")
        if weighs:
            options["weigh"] = lambda y: of_classes[y].sum()
    elif loss == "sum":
        if rng.random() < 0.5:
            options["loss"] = nn.MSELoss(reduction="sum")
        else:
            options["loss"] = functools.partial(nn.functional.mse_loss, reduction="sum")
        made.reasons.append("has reduction='sum'")
    elif loss == "parameters" and rng.random() < 0.5:
        options["loss"] = Scaled().to(dtype)
        made.reasons.append("has parameters of its own")


def _settings(made: Draw, rng: Random) -> None:
    schedule, options = made.schedule, made.options
    dense = rng.choice([None, sgd, momentum, adam, groups, forgets if rng.random() < 0.1 else sgd])
    sparse = any(isinstance(s, Looks) and s.table.sparse for s in made.stages)
    optimizer = sgd if sparse and dense else dense
    if optimizer:
        options["optimizer"] = optimizer
        if optimizer is forgets:
            made.reasons.append("optimizer must be a function that returns an optimizer")
        if rng.random() < 0.3:
            options["scheduler"] = steps
        if rng.random() < 0.3:
            options["clip_norm"] = rng.choice([0.05, 0.5, 100.0])
            if rng.random() < 0.3:
                options["clip_over"] = rng.choice(["model", "stage"])
                made.reasons.append("clip_over='model' needs an update in which")
    recompute = 1.0 if schedule.weights == "latest" else rng.random()  # what is torn is not drawn
    if recompute < 0.3:
        options["recompute"] = True
    elif recompute < 0.4:
        options["recompute"] = [rng.random() < 0.5 for _ in range(schedule.stages)]
    if rng.random() < 0.15:
        options["check_loss"] = True
    if rng.random() < 0.2:
        options["engine"] = "torch"
        made.reasons += ["engine='torch'", "Flips", "Marks"]
    elif schedule.synchronous and len(made.batches) > 1 and rng.random() < 0.3:
        taking_turns = any(len(workers) > 1 for workers in schedule.owners)
        if not taking_turns and schedule.name not in ("chimera", "round_robin"):
            made.legs = rng.choice([1, 2])
    if not any(p.requires_grad for stage in made.stages for p in stage.parameters()):
        made.reasons.append("does not depend on anything that can be trained")


# --- one process ---------------------------------------------------------------------------------


def one_process(
    made: Draw,
) -> tuple[list[float] | None, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """(losses of microbatches, state dicts, gradients of the last update), in plain PyTorch."""
    if made.schedule.synchronous and not {"BatchNorm", "Counts", "Counts, unsaved"} & {*made.kinds}:
        return _whole_batches(made)
    return _by_microbatches(made)


def _whole_batches(made: Draw) -> Any:
    stages, options = copy.deepcopy(made.stages), made.options
    loss = options.get("loss") or nn.functional.mse_loss
    trained = [p for p in nn.ModuleList(stages).parameters() if p.requires_grad]
    optimizer, scheduler = _optimizer(options, trained)
    for x, y in made.batches:
        nn.ModuleList(stages).zero_grad()
        loss(_through(stages, x.clone()), y).backward()
        found = _gradients(stages)
        if optimizer:
            _shorten(options, [stages] if options.get("clip_over") != "stage" else stages)
            found = _gradients(stages)
            optimizer.step()
        if scheduler:
            scheduler.step()
    return None, [stage.state_dict() for stage in stages], found


def _by_microbatches(made: Draw) -> Any:
    schedule, options = made.schedule, made.options
    loss = options.get("loss") or nn.functional.mse_loss
    weigh = options.get("weigh") or len
    policy = "flush" if schedule.synchronous else schedule.weights
    rule, group, p = FORWARD[policy], schedule.updates_every, schedule.stages
    stream = [
        piece
        for x, y in made.batches
        for piece in zip(
            torch.tensor_split(x, schedule.m), torch.tensor_split(y, schedule.m), strict=True
        )
    ]
    weights = [float(weigh(y)) for _, y in stream]
    newest = copy.deepcopy(made.stages)
    history = [copy.deepcopy(newest)]
    parts = [nn.ModuleList(newest)] if policy == "flush" else newest
    stepping = [
        _optimizer(options, [w for w in part.parameters() if w.requires_grad]) for part in parts
    ]
    losses = []
    for k, (x, y) in enumerate(stream):
        first = k - k % group
        share = weights[k] / sum(weights[first : first + group])
        used = copy.deepcopy([history[rule(s, p, k, group)][s] for s in range(p)])
        for stage, live in zip(used, newest, strict=True):  # there is one set of buffers
            _take_buffers(stage, live)
        ends: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        values: tuple[Tensor, ...] = (x.clone(),)
        for stage in used:
            leaves = tuple(
                v.detach().requires_grad_() if v.is_floating_point() else v for v in values
            )
            given = stage(*leaves)
            values = given if isinstance(given, tuple) else (given,)
            ends.append((leaves, values))
        if share:
            value = loss(values[0], y)
        else:
            value = values[0].flatten()[:0].sum()
        losses.append(value.item())
        if policy == "latest":  # the backward finds newer weights than the forward had
            for stage, live in zip(used, newest, strict=True):
                for mine, theirs in zip(stage.parameters(), live.parameters(), strict=True):
                    mine.data.copy_(theirs.data)
        (share * value).backward()
        for s in reversed(range(p - 1)):
            slopes = [leaf.grad for leaf in ends[s + 1][0]]
            pairs = [
                (out, slope)
                for out, slope in zip(ends[s][1], slopes, strict=True)
                if slope is not None and out.requires_grad
            ]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        for stage, live in zip(used, newest, strict=True):
            _take_buffers(live, stage)
        for mine, theirs in zip(
            nn.ModuleList(newest).parameters(), nn.ModuleList(used).parameters(), strict=True
        ):
            if theirs.grad is not None:
                mine.grad = theirs.grad if mine.grad is None else mine.grad + theirs.grad
        if (k + 1) % group:
            continue
        found = _gradients(newest)
        if options.get("optimizer"):
            together = policy == "flush" and options.get("clip_over") != "stage"
            _shorten(options, [newest] if together else newest)
            found = _gradients(newest)
        for optimizer, scheduler in stepping:
            if optimizer:
                optimizer.step()
            if scheduler:
                scheduler.step()
        nn.ModuleList(newest).zero_grad()
        history.append(copy.deepcopy(newest))
    return losses, [stage.state_dict() for stage in newest], found


def _optimizer(options: dict[str, Any], trained: list[nn.Parameter]) -> tuple[Any, Any]:
    optimizer = options["optimizer"](trained) if options.get("optimizer") and trained else None
    return optimizer, steps(optimizer) if optimizer and options.get("scheduler") else None


def _through(stages: list[nn.Module], x: Any) -> Tensor:
    for stage in stages:
        x = stage(*x) if isinstance(x, tuple) else stage(x)
    return x


def _take_buffers(into: nn.Module, source: nn.Module) -> None:
    for mine, theirs in zip(into.modules(), source.modules(), strict=True):
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = None if buffer is None else buffer.clone()


def _gradients(stages: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [
        {n: p.grad.to_dense().clone() for n, p in s.named_parameters() if p.grad is not None}
        for s in stages
    ]


def _shorten(options: dict[str, Any], parts: list[Any]) -> None:
    """As ``torch.nn.utils.clip_grad_norm_``, which knows no sparse gradients."""
    if options.get("clip_norm") is None:
        return
    for part in parts:
        module = nn.ModuleList(part) if isinstance(part, list) else part
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if grads:
            norm = torch.stack([g.to_dense().norm() for g in grads]).norm()
            for gradient in grads:
                gradient.mul_(min(1.0, options["clip_norm"] / (norm.item() + 1e-6)))
