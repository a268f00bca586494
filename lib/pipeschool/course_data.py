"""Real data that needs no download, and small models for it, cut into stages.

Handwritten digits come with scikit-learn; the text is that of Python's own documentation, which
comes with Python. An experiment needs several seeds, so models of several seeds stand side by side
in one module, which takes hardly longer than one of them. Tensors that travel are samples x seeds x
anything; weights have the seed as their first dimension. Nothing leads from one model to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

Pair = tuple[Tensor, Tensor]  # inputs and targets
Weights = Sequence[dict[str, Tensor]]  # one dict per stage
SEEDS = range(5)


class Linear(nn.Module):
    """A linear layer of its own for each seed; inputs are samples x seeds x ... x features."""

    def __init__(self, inputs: int, outputs: int, seeds: Sequence[int], gain: float = 1.0):
        super().__init__()
        bound = gain / math.sqrt(inputs)
        self.weight = nn.Parameter(bound * uniform((inputs, outputs), seeds))
        self.bias = nn.Parameter(torch.zeros(len(seeds), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """As the inputs, with other features."""
        x = x.transpose(0, 1)
        y = torch.baddbmm(self.bias, x.flatten(1, -2), self.weight)
        return y.unflatten(1, x.shape[1:-1]).transpose(0, 1)


def uniform(shape: tuple[int, ...], seeds: Sequence[int]) -> Tensor:
    """Numbers between -1 and 1: for every seed what it always gives, whoever stands beside it."""
    drawn = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return 2 * torch.stack(drawn) - 1


def loss_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of each seed, added up: every model has the gradient of its own."""
    seeds = targets.shape[1]
    kinds = outputs.shape[-1]
    return seeds * nn.functional.cross_entropy(outputs.reshape(-1, kinds), targets.flatten())


def accuracies(stages: Sequence[nn.Module], weights: Weights, data: Pair) -> list[float]:
    """The share of the targets that each seed's model gets right."""
    x, targets = data
    with torch.no_grad():
        for stage, parameters in zip(stages, weights, strict=True):
            x = functional_call(stage, parameters, (x,))
    right = (x.argmax(-1) == targets).float()
    return right.transpose(0, 1).flatten(1).mean(1).tolist()


# --- handwritten digits --------------------------------------------------------------------------


@cache
def digits() -> tuple[Pair, Pair]:
    """(inputs, targets) to train on, and to test with: 1437 and 360 digits of 64 pixels each."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs = torch.tensor(found.data / 16, dtype=torch.float32)
    targets = torch.tensor(found.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def digit_stages(p: int, seeds: Sequence[int] = SEEDS, width: int = 64) -> list[nn.Module]:
    """Classifiers of `p` linear layers with ReLU between them, one layer per stage."""
    sizes = [64, *[width] * (p - 1), 10]
    stages: list[nn.Module] = []
    for s in range(p):
        own = [1000 * seed + s for seed in seeds]
        he = math.sqrt(6)  # He's initialisation: ReLU then keeps the size of the signal
        layer = Linear(sizes[s], sizes[s + 1], own, gain=he)
        stages.append(nn.Sequential(layer, nn.ReLU()) if s < p - 1 else layer)
    return stages


def digit_stream(batches: int, samples: int, seeds: Sequence[int] = SEEDS) -> list[Pair]:
    """Batches to train on; every seed draws its own digits."""
    (inputs, targets), _ = digits()
    rows = [_draw(len(inputs), (batches, samples), seed) for seed in seeds]
    return [(inputs[row], targets[row]) for row in torch.stack(rows, dim=2)]


def digit_test(seeds: Sequence[int] = SEEDS) -> Pair:
    """The test digits, the same for every seed. A guess is right for about one in ten."""
    _, (inputs, targets) = digits()
    return inputs[:, None].expand(-1, len(seeds), -1), targets[:, None].expand(-1, len(seeds))


# --- the text of Python's documentation ----------------------------------------------------------


@cache
def text() -> str:
    """What ``help()`` says about Python's own words and rules: some 400,000 characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@cache
def codes() -> Tensor:
    """The text as numbers, one for each kind of character."""
    number = {character: n for n, character in enumerate(sorted(set(text())))}
    return torch.tensor([number[character] for character in text()])


def text_stream(
    batches: int, samples: int, length: int, seeds: Sequence[int] = SEEDS
) -> list[Pair]:
    """Passages from the first nine tenths of the text, and, as targets, the same passages one
    character later: at every place a model guesses the character that follows."""
    return _passages(codes()[: len(codes()) * 9 // 10], batches, samples, length, seeds)


def text_test(samples: int, length: int, seeds: Sequence[int] = SEEDS) -> Pair:
    """Passages from the last tenth of the text, the same for every seed."""
    ((x, targets),) = _passages(codes()[len(codes()) * 9 // 10 :], 1, samples, length, [0])
    return x.expand(-1, len(seeds), -1), targets.expand(-1, len(seeds), -1)


def transformer_stages(
    p: int, width: int, heads: int, length: int, seeds: Sequence[int] = SEEDS
) -> list[nn.Module]:
    """Character-level Transformers, decoder only, of `p` blocks, one per stage. Stage 0 also has
    the embedding, the last stage the output layer."""
    kinds = int(codes().max()) + 1
    parts: list[list[nn.Module]] = [
        [Block(width, heads, [1000 * seed + 10 * s for seed in seeds])] for s in range(p)
    ]
    ends = [1000 * seed + 999 for seed in seeds]
    parts[0].insert(0, Embedding(kinds, length, width, ends))
    parts[-1] += [nn.LayerNorm(width, elementwise_affine=False), Linear(width, kinds, ends)]
    return [nn.Sequential(*part) for part in parts]


class Embedding(nn.Module):
    """Characters to vectors, with a vector for the place added to each."""

    def __init__(self, kinds: int, length: int, width: int, seeds: Sequence[int]):
        super().__init__()
        self.character = nn.Parameter(uniform((kinds, width), seeds))
        self.place = nn.Parameter(torch.zeros(len(seeds), length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Samples x seeds x length, to samples x seeds x length x width."""
        seed = torch.arange(x.shape[1])[:, None]
        return self.character[seed, x] + self.place


class Block(nn.Module):
    """Causal self-attention and a network of two layers, each on the normalised input and added to
    it (the pre-norm form of GPT-2)."""

    def __init__(self, width: int, heads: int, seeds: Sequence[int]):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        ours = [[seed + layer for seed in seeds] for layer in range(4)]
        self.query_key_value = Linear(width, 3 * width, ours[0])
        self.attention_out = Linear(width, width, ours[1])
        self.up = Linear(width, 4 * width, ours[2])
        self.down = Linear(4 * width, width, ours[3])

    def forward(self, x: Tensor) -> Tensor:
        """Samples x seeds x length x width, as the input."""
        split = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.flatten(0, 1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _draw(below: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def _passages(
    source: Tensor, batches: int, samples: int, length: int, seeds: Sequence[int]
) -> list[Pair]:
    starts = [_draw(len(source) - length, (batches, samples), seed) for seed in seeds]
    passages = source[torch.stack(starts, dim=2)[..., None] + torch.arange(length + 1)]
    return [(passage[..., :-1], passage[..., 1:]) for passage in passages]
