"""A backward in two halves: the gradients of the inputs now, those of the weights later.

Asking autograd twice, first for the inputs and then for the weights, would be no split: the second
call walks the way to the inputs again. Here the first half notes, at every place where the graph
branches off to weights, the gradient that came by; the second half starts from these places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
Pair = tuple[GradientEdge, Tensor | None]  # where to start, and the gradient there


class Branch(NamedTuple):
    """Where the graph branches off to weights: the gradients that came by, and these weights."""

    starts: list[GradientEdge]
    gradients: Gradients
    weights: list[Tensor]


class SplitBackward:
    """The weight half of a backward whose input half is done; `inputs` are that one's results.

    outputs, gradients: where the backward starts. inputs: what came in; None stands for what can
    have no gradient. weights: the leaves whose gradients `weight_half` adds to their ``.grad``.

    Two kinds of weights have theirs computed in the first half. Where nothing that came in can
    have a gradient, as on the first stage, the weight used first takes the part of the input. And
    a weight that is used in several places has no branch of its own.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ):
        starts = [get_gradient_edge(out) for out in outputs]
        roots = [start.node for start in starts]
        leaves = [x for x in inputs if x.requires_grad]
        trainable = [w for w in weights if w.requires_grad]
        early = [] if leaves else first_used(roots, trainable)
        while True:
            on_way = leading_to(roots, leaves + early)
            off = branches(on_way, without(trainable, early))
            if not (several := on_several(off)):
                break
            early += several  # more of the graph is on the way then, so look again
        self.weights = trainable
        self.branches: list[Branch] = []
        handles = [node.register_prehook(self._note(node, behind)) for node, behind in off.items()]
        pairs: list[Pair] = list(zip(starts, gradients, strict=True))
        down = [pair for pair in pairs if pair[0].node in on_way]
        # What the weight half starts from, but for the branches. An output from which no way leads
        # to a goal is for the weights alone.
        self.aside = [pair for pair in pairs if pair[0].node not in on_way]
        try:
            found = gradients_of(leaves + early, down)
        finally:
            for handle in handles:
                handle.remove()
        # The early ones wait with the others: until the weight half, nobody counts this microbatch.
        self.aside += zip(map(get_gradient_edge, early), found[len(leaves) :], strict=True)
        given = iter(found)
        self.inputs: Gradients = tuple(next(given) if x.requires_grad else None for x in inputs)

    def _note(self, node: Node, weights: list[Tensor]) -> Callable[[Gradients], None]:
        """A hook that notes the gradients which reach `node`."""

        def hook(gradients: Gradients) -> None:
            starts = [GradientEdge(node, i) for i, g in enumerate(gradients) if g is not None]
            self.branches.append(Branch(starts, tuple(filter(is_there, gradients)), weights))

        return hook

    def weight_half(self) -> None:
        """Add the weights' gradients to their ``.grad``; the graph is free after that."""
        for starts, gradients, weights in self.branches:
            add_gradients(weights, starts, gradients)
        aside = [(place, gradient) for place, gradient in self.aside if gradient is not None]
        if self.weights and aside:
            add_gradients(self.weights, *zip(*aside, strict=True))
        self.branches, self.aside = [], []


def add_gradients(
    weights: Sequence[Tensor], starts: Sequence[GradientEdge], gradients: Gradients
) -> None:
    """From `starts` on to `weights`, and nowhere else. Unlike `torch.autograd.grad`, this does not
    give two weights that are added the same memory for their gradients."""
    torch.autograd.backward(starts, gradients, retain_graph=True, inputs=weights)


def gradients_of(goals: Sequence[Tensor], pairs: Sequence[Pair]) -> Gradients:
    """Those of `goals`, from (start, its gradient) pairs; both may be none. The graph is kept."""
    if not goals or not pairs:
        return (None,) * len(goals)
    starts, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(starts, goals, gradients, retain_graph=True, allow_unused=True)


def is_there(gradient: Tensor | None) -> bool:
    """Not None: an undefined gradient is zero."""
    return gradient is not None


def without(tensors: Sequence[Tensor], left_out: Sequence[Tensor]) -> list[Tensor]:
    """`tensors` but for those `left_out`; compared by identity, since == compares numbers."""
    gone = set(map(id, left_out))
    return [tensor for tensor in tensors if id(tensor) not in gone]


def edges_of(node: Node) -> Iterator[GradientEdge]:
    """Where the gradients go that `node` computes."""
    return (GradientEdge(child, nr) for child, nr in node.next_functions if child is not None)


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node of the graph below `roots`, each after all nodes that it leads to."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(edge.node, False) for edge in edges_of(node)]


def leading_to(roots: Iterable[Node], goals: Iterable[Tensor]) -> set[Node]:
    """The nodes below `roots` from which a way leads to one of the leaves `goals`."""
    leading = {get_gradient_edge(goal).node for goal in goals}
    for node in walk(roots):
        if any(edge.node in leading for edge in edges_of(node)):
            leading.add(node)
    return leading


def branches(on_way: set[Node], weights: Sequence[Tensor]) -> dict[Node, list[Tensor]]:
    """The nodes `on_way` that also lead off it, to `weights`, each with those of them."""
    owner = {get_gradient_edge(w).node: w for w in weights}
    found = {}
    for node in on_way:
        off = walk(edge.node for edge in edges_of(node) if edge.node not in on_way)
        if behind := [owner[leaf] for leaf in off if leaf in owner]:
            found[node] = behind
    return found


def on_several(off: Mapping[Node, Sequence[Tensor]]) -> list[Tensor]:
    """The weights that several branches lead to."""
    users = Counter(id(weight) for behind in off.values() for weight in behind)
    weights = {id(weight): weight for behind in off.values() for weight in behind}
    return [weight for key, weight in weights.items() if users[key] > 1]


def first_used(roots: Sequence[Node], weights: Sequence[Tensor]) -> list[Tensor]:
    """The weight that the forward used before all others, in a list; none where it used none."""
    owner = {get_gradient_edge(w).node: w for w in weights}
    users = [
        (node._sequence_nr(), owner[edge.node])
        for node in walk(roots)
        for edge in edges_of(node)
        if edge.node in owner
    ]
    return [min(users, key=lambda user: user[0])[1]] if users else []
