"""What asynchronous training must give: one process that replays the published update rules.

Written from the recurrences alone; of the library it uses nothing. Stages are `nn.Sequential`s of
`Linear` and `Tanh`. With w(t) the weights after t updates, and stages 1 to p:

    flush          w(t+1) = w(t) - step(grad f(w(t)))
    stash          w(t+1) = w(t) - step(grad f(w_1^(t-p+1), w_2^(t-p+2), ..., w_p^(t)))
    vertical_sync  w(t+1) = w(t) - step(grad f(w(t-p+1)))
    double_buffer  w(t+1) = w(t) - step(grad f(w(t-1)))
    latest         the forward as for stash, the backward at w(t): the gradient of no function

A version before the start is the start. `step` is any torch optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
History = list[list[Weights]]  # [number of updates][stage]
Microbatch = tuple[Tensor, Tensor, float]  # inputs, targets, share of its update's samples
Loss = Callable[[Tensor, Tensor], Tensor]

# Which version stage s (of p, from 0) uses for microbatch k, when every update takes m of them.
# With m = 1 microbatch k belongs to update t = k, and the lines are the recurrences above.
Rule = Callable[[int, int, int, int], int]
FORWARD: dict[str, Rule] = {
    "flush": lambda s, p, k, m: k // m,
    "stash": lambda s, p, k, m: max(k - (p - 1 - s), 0) // m,
    "vertical_sync": lambda s, p, k, m: max(k - (p - 1), 0) // m,
    "double_buffer": lambda s, p, k, m: max(k // m - 1, 0),
}
FORWARD["latest"] = FORWARD["stash"]


def cut(batches: Sequence[tuple[Tensor, Tensor]], pieces: int, m: int) -> list[Microbatch]:
    """Every batch in `pieces` microbatches, the larger ones first, with their shares of the
    updates that take m of them each."""
    stream = [
        (x[begin : begin + size], y[begin : begin + size])
        for x, y in batches
        for sizes in [[(len(x) + pieces - 1 - i) // pieces for i in range(pieces)]]
        for begin, size in ((sum(sizes[:i]), sizes[i]) for i in range(pieces))
    ]
    return [
        (x, y, len(x) / sum(len(x) for x, _ in stream[k - k % m : k - k % m + m]))
        for k, (x, y) in enumerate(stream)
    ]


def replay(
    rule: str | Rule,
    stages: Sequence[nn.Sequential],
    stream: Sequence[Microbatch],
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    m: int = 1,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip: float | None = None,
    loss: Loss = nn.functional.mse_loss,
) -> History:
    """The weights after every update, the start included; an update takes m microbatches.

    make: the optimizer of one stage; schedule: its learning rate's; clip: largest norm, of the
    gradients of all stages for ``flush``, otherwise of each stage's.
    """
    p = len(stages)
    forward = FORWARD[rule] if isinstance(rule, str) else rule
    newest = [copy.deepcopy(stage) for stage in stages]
    model = [copy.deepcopy(stage) for stage in stages]  # to compute with, at whatever version
    trained = [[w for w in stage.parameters() if w.requires_grad] for stage in newest]
    optimizers = [make(weights) if weights else None for weights in trained]
    schedulers = [schedule(o) if schedule and o else None for o in optimizers]
    history = [snapshot(newest)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would cut a sum into other parts
    try:
        for k, (x, y, share) in enumerate(stream):
            old = [history[forward(s, p, k, m)][s] for s in range(p)]
            if rule == "latest":
                found = torn_gradients(model, old, history[-1], x, y, share, loss)
            else:
                found = gradients(model, old, x, y, share, loss)
            for stage, parts in zip(newest, found, strict=True):
                for name, weight in stage.named_parameters():
                    if name in parts:  # the sum over the microbatches, in their order
                        old_sum = weight.grad
                        weight.grad = parts[name] if old_sum is None else old_sum + parts[name]
            if (k + 1) % m:
                continue
            parts = [[w.grad for w in weights if w.grad is not None] for weights in trained]
            if clip is not None:
                for together in [sum(parts, [])] if rule == "flush" else parts:
                    shorten(together, clip)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                if optimizer is None:
                    continue
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if scheduler:
                    scheduler.step()
            history.append(snapshot(newest))
    finally:
        torch.set_num_threads(threads)
    return history


def snapshot(stages: Sequence[nn.Sequential]) -> list[Weights]:
    """Copies of all parameters."""
    return [{n: w.detach().clone() for n, w in stage.named_parameters()} for stage in stages]


def gradients(
    model: Sequence[nn.Sequential],
    versions: Sequence[Weights],
    x: Tensor,
    y: Tensor,
    share: float,
    loss: Loss,
) -> list[Weights]:
    """The gradient of share * loss, every stage at its version: plain autograd on one model."""
    for stage, version in zip(model, versions, strict=True):
        stage.load_state_dict(version)
        stage.zero_grad(set_to_none=True)
    (share * loss(nn.Sequential(*model)(x), y)).backward()
    return [
        # Copies: autograd may leave two of them in one place, and clipping scales each.
        {n: w.grad.clone() for n, w in stage.named_parameters() if w.grad is not None}
        for stage in model
    ]


def torn_gradients(
    stages: Sequence[nn.Sequential],
    old: Sequence[Weights],
    new: Sequence[Weights],
    x: Tensor,
    y: Tensor,
    share: float,
    loss: Loss,
) -> list[Weights]:
    """What is computed when the weights change between forward and backward, by hand.

    The forward ran on `old`, and kept the input of every Linear and the output of every Tanh. The
    backward uses those, but finds `new` where it goes back through a Linear.
    """
    kept: list[Tensor] = []
    for stage, weights in zip(stages, old, strict=True):
        for index, layer in enumerate(stage):
            if isinstance(layer, nn.Linear):
                kept.append(x)
                x = nn.functional.linear(x, weights[f"{index}.weight"], weights[f"{index}.bias"])
            else:
                assert isinstance(layer, nn.Tanh)
                x = x.tanh()
                kept.append(x)
    outputs = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(share * loss(outputs, y), outputs)
    found: list[Weights] = []
    for stage, weights in zip(reversed(stages), reversed(new), strict=True):
        found.insert(0, {})
        for index, layer in reversed(list(enumerate(stage))):
            saved = kept.pop()
            if isinstance(layer, nn.Linear):
                found[0][f"{index}.weight"] = g.T @ saved  # old activations
                found[0][f"{index}.bias"] = g.sum(0)
                g = g @ weights[f"{index}.weight"]  # new weights
            else:
                # g (1 - saved^2); written so, it rounds once more often than torch does
                g = torch.ops.aten.tanh_backward(g, saved)
        for name, weight in stage.named_parameters():
            if not weight.requires_grad:
                del found[0][name]
    return found


def shorten(gradients: Sequence[Tensor], longest: float) -> None:
    """Scale `gradients`, taken as one vector, down to the norm `longest`; torch adds the 1e-6."""
    if gradients:
        norm = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).norm()
        factor = (longest / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient *= factor


def difference(
    history: History, expected: History, rtol: float = 0.0
) -> tuple[int, int, str] | None:
    """(updates done, stage, parameter) where `history` first departs from `expected`, or None.

    Bit for bit, unless a relative tolerance is given.
    """
    if len(history) != len(expected):
        return min(len(history), len(expected)), 0, f"{len(history)} against {len(expected)}"
    for t, (found, wanted) in enumerate(zip(history, expected, strict=True)):
        for s, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            if ours.keys() != theirs.keys():
                return t, s, "names"
            for name, value in theirs.items():
                if not (
                    torch.allclose(ours[name], value, rtol=rtol, atol=1e-15)
                    if rtol
                    else torch.equal(ours[name], value)
                ):
                    return t, s, name
    return None
