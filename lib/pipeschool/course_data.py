"""Real data that needs no download, and small models for it, cut into stages.

Handwritten digits come with scikit-learn; the text is that of Python's own documentation, which
comes with Python. An experiment needs several seeds. For the digits, models of several seeds stand
side by side in one module, which takes hardly longer than one of them: their weights have a first
dimension for the seed, their samples a second one, and nothing leads from one model to another.
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


class SideBySide(nn.Module):
    """A linear layer for each seed; x is samples x seeds x inputs. With ReLU unless it is last."""

    def __init__(self, inputs: int, outputs: int, seeds: Sequence[int], last: bool):
        super().__init__()
        bound = math.sqrt(6 / inputs)  # He initialisation, uniform: ReLU keeps the signal's size
        drawn = [
            (2 * torch.rand(inputs, outputs, generator=torch.Generator().manual_seed(s)) - 1)
            for s in seeds
        ]
        self.weight = nn.Parameter(bound * torch.stack(drawn))
        self.bias = nn.Parameter(torch.zeros(len(seeds), 1, outputs))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Samples x seeds x outputs."""
        y = torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)
        return y if self.last else torch.relu(y)


def digit_stages(p: int, seeds: Sequence[int] = range(5), width: int = 64) -> list[nn.Module]:
    """Classifiers of `p` linear layers with ReLU between them, one layer per stage; one classifier
    for each seed, side by side."""
    sizes = [64, *[width] * (p - 1), 10]
    return [
        SideBySide(sizes[s], sizes[s + 1], [1000 * seed + s for seed in seeds], last=s == p - 1)
        for s in range(p)
    ]


def digit_stream(batches: int, samples: int, seeds: Sequence[int] = range(5)) -> list[Pair]:
    """`batches` batches for `digit_stages`: every seed draws its own digits, with replacement."""
    (inputs, targets), _ = digits()
    rows = [
        torch.randint(
            len(inputs), (batches, samples), generator=torch.Generator().manual_seed(seed)
        )
        for seed in seeds
    ]
    return [(inputs[row], targets[row]) for row in torch.stack(rows, dim=2)]


def loss_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropies of all seeds, added up: each model's gradient is that of its own."""
    seeds = outputs.shape[1]
    return seeds * nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def digit_accuracies(stages: Sequence[nn.Module], weights: Weights) -> list[float]:
    """Share of the test digits that each seed's classifier reads right. Chance is about 0.1."""
    _, (inputs, targets) = digits()
    with torch.no_grad():
        x = inputs[:, None].expand(-1, len(next(iter(weights[0].values()))), -1)
        for stage, parameters in zip(stages, weights, strict=True):
            x = functional_call(stage, parameters, (x,))
    return (x.argmax(-1) == targets[:, None]).float().mean(0).tolist()


# --- the text of Python's documentation ----------------------------------------------------------


@cache
def text() -> str:
    """What ``help()`` says about Python's own words and rules: some 400,000 characters."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@cache
def codes() -> Tensor:
    """The text as numbers; one for each kind of character."""
    number = {character: n for n, character in enumerate(sorted(set(text())))}
    return torch.tensor([number[character] for character in text()])


def text_stream(batches: int, samples: int, length: int, seed: int) -> list[Pair]:
    """Batches of passages out of the first nine tenths of the text, and of the same passages one
    character later: the character that follows is what a model has to guess."""
    return _passages(codes()[: len(codes()) * 9 // 10], batches, samples, length, seed)


def transformer_stages(p: int, width: int, heads: int, length: int, seed: int) -> list[nn.Module]:
    """A character-level Transformer, decoder only, of `p` blocks, one per stage. Stage 0 also has
    the embedding, the last stage the output layer."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        kinds = int(codes().max()) + 1
        parts: list[list[nn.Module]] = [[Block(width, heads)] for _ in range(p)]
        parts[0].insert(0, Embedding(kinds, length, width))
        parts[-1] += [nn.LayerNorm(width), nn.Linear(width, kinds)]
    return [nn.Sequential(*part) for part in parts]


class Embedding(nn.Module):
    """Characters (samples x length) to vectors, with a vector for the place added to each."""

    def __init__(self, kinds: int, length: int, width: int):
        super().__init__()
        self.character = nn.Embedding(kinds, width)
        self.place = nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        """Samples x length x width."""
        return self.character(x) + self.place.weight[: x.shape[1]]


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each on the normalised input and added to it
    (the pre-norm form of GPT-2)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Samples x length x width, as the input."""
        n, length, width = x.shape
        split = self.query_key_value(self.norm(x)).view(n, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.feed_forward(x)


def text_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy per character, in nats."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def text_score(stages: Sequence[nn.Module], weights: Weights, length: int) -> tuple[float, float]:
    """(cross entropy in nats, share guessed right) per character, on the last tenth of the text."""
    ((x, targets),) = _passages(codes()[len(codes()) * 9 // 10 :], 1, 256, length, seed=0)
    with torch.no_grad():
        for stage, parameters in zip(stages, weights, strict=True):
            x = functional_call(stage, parameters, (x,))
        loss = text_loss(x, targets)
    return loss.item(), (x.argmax(-1) == targets).float().mean().item()


def _passages(source: Tensor, batches: int, samples: int, length: int, seed: int) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - length, (batches, samples, 1), generator=generator)
    passages = source[starts + torch.arange(length + 1)]
    return [(passage[:, :-1], passage[:, 1:]) for passage in passages]
