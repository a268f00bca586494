"""What is sent to a worker: of a tensor that is a piece of a larger one, the piece alone."""

from __future__ import annotations

import pipeschool as ps
import pytest
import torch
from pipeschool.runtime.host.serialize import deserialize, serialize
from pipeschool.runtime.keepable import alone
from pipeschool.runtime.stages.microbatches import cut
from test_run import linear_stages

LARGE = torch.arange(1_000_000, dtype=torch.float64).reshape(1000, 1000)
SMALL = 20_000  # bytes: what a piece of a hundred numbers may take

PIECES = {
    "rows": LARGE[3:4, :100],
    "columns": LARGE[:10, 5:15],
    "transposed": LARGE[:10, 5:15].T,
    "every other": LARGE[0, :200:2],
    "one number": LARGE[7, 7],
    "none": LARGE[:0],
    "asked for a gradient": LARGE[:1, :100].clone().repeat(100, 1)[:1].requires_grad_(),
    "conjugated": torch.complex(LARGE[:10, :10], LARGE[10:20, :10]).conj()[:2],
    "integers": LARGE.long()[:4, :4],
    "repeated": LARGE[:1, :1].expand(1000, 1000),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_travels_without_the_rest(name):
    piece = PIECES[name]
    data = serialize(piece)
    again = deserialize(data)
    assert len(data) < SMALL
    assert torch.equal(again, piece)
    assert (again.dtype, again.requires_grad) == (piece.dtype, piece.requires_grad)
    assert again.grad_fn is None


def test_a_weight_travels_without_the_rest():
    layer = torch.nn.Linear(10, 10, bias=False).double()
    layer.weight = torch.nn.Parameter(LARGE[:10, :10])
    layer.register_buffer("seen", LARGE[20:30, :10])
    data = serialize(layer)
    again = deserialize(data)
    assert len(data) < SMALL
    assert isinstance(again.weight, torch.nn.Parameter)
    assert again.weight.requires_grad
    assert torch.equal(again.weight, layer.weight)
    assert torch.equal(again.seen, LARGE[20:30, :10])


@pytest.mark.parametrize(
    "whole",
    [
        torch.ones(3, 4),
        torch.ones(3, 4).T,
        torch.ones(3, 4, device="meta")[:1],
        torch.eye(4).to_sparse(),
    ],
)
def test_what_is_whole_is_sent_as_it_is(whole):
    assert alone(whole) is whole


def test_what_a_caller_has_noted_on_a_tensor_travels_with_it():
    piece = LARGE[:1, :10]
    piece.unit = "ml"
    assert deserialize(serialize(piece)).unit == "ml"


def test_a_batch_that_comes_again_is_sent_once():
    batch = torch.randn(64, 100), torch.randn(64, 1)
    once, often = (len(serialize(cut([batch] * n, ps.gpipe(2, 8, batches=n)))) for n in (1, 10))
    assert often < 1.2 * once


def test_an_epoch_cut_from_one_tensor_is_no_larger_than_the_tensor():
    whole = torch.randn(1600, 1000)
    batches = [(whole[k : k + 64], whole[k : k + 64, :1]) for k in range(0, 1600, 64)]
    assert len(serialize(cut(batches, ps.gpipe(4, 8, batches=25)))) < 1.1 * whole.nbytes


def test_pieces_and_batches_that_come_again_give_the_same_run():
    torch.manual_seed(0)
    x, y = torch.randn(400, 6).double(), torch.randn(400, 6).double()
    cuts = [(x[k : k + 16], y[k : k + 16]) for k in (0, 16, 0)]
    stages = linear_stages(3)
    schedule = ps.one_f_one_b(3, 4)

    def run(batches):
        return ps.run(schedule, stages, batches, optimizer=lambda w: torch.optim.SGD(w, lr=0.1))

    pieces = run(cuts)
    copies = run([(a.clone(), b.clone()) for a, b in cuts])
    assert pieces.losses == copies.losses
    for mine, theirs in zip(pieces.state_dicts, copies.state_dicts, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
