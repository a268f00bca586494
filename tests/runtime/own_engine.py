"""An engine as a student writes it: autograd as it is, on the modules as they are."""

from __future__ import annotations

import torch


class MyEngine:
    """The whole loop over a row: ``ps.run(..., engine=MyEngine)``."""

    def __init__(self, share):
        self.share = share
        self.last = share.last_stage
        self.mail = {}  # (what, stage, microbatch) -> tensors that came, or that are to go
        self.kept = {}  # (stage, microbatch) -> inputs and outputs between forward and backward

    def run(self):
        for action in self.share.actions():
            kind, stage, k = action
            if kind == "F":
                self.forward(stage, k)
            elif kind == "B":
                self.backward(stage, k)
            elif kind == "U":
                self.share.update(action)
            elif kind == "SEND_F":
                self.share.wire.send(action, self.mail.pop(("activations", stage + 1, k)))
            elif kind == "SEND_B":
                self.share.wire.send(action, self.mail.pop(("gradients", stage - 1, k)))
            elif kind == "RECV_F":
                self.mail["activations", stage, k] = self.share.wire.receive(action)
            elif kind == "RECV_B":
                self.mail["gradients", stage, k] = self.share.wire.receive(action)
            else:
                raise NotImplementedError(f"this engine does not know how to do {kind}")

    def forward(self, stage, k):
        if stage == 0:
            inputs = self.share.inputs_of(k)
        else:
            came = self.mail.pop(("activations", stage, k))
            inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in came)
        outputs = self.share.stages[stage].module(*inputs)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        if stage == self.last:
            loss = self.share.loss_of(k)(outputs[0] if len(outputs) == 1 else outputs)
            self.share.losses[k] = loss.item()
            outputs = (loss,)
        else:
            self.mail["activations", stage + 1, k] = outputs
        self.kept[stage, k] = inputs, outputs

    def backward(self, stage, k):
        inputs, outputs = self.kept.pop((stage, k))
        if stage == self.last:
            gradients = (torch.full_like(outputs[0], self.share.loss_weight(k)),)
        else:
            gradients = self.mail.pop(("gradients", stage, k))
        pairs = [
            (out, gradient)
            for out, gradient in zip(outputs, gradients, strict=True)
            if out.requires_grad and gradient is not None
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        if stage > 0:
            self.mail["gradients", stage - 1, k] = tuple(x.grad for x in inputs)
