"""The engine: the loop over one worker's row of a lowered schedule.

It knows what each kind of action does, and nothing else. When an action may end, what its messages
travel on, which version of the weights it meets: all that is up to what the `Share` holds.
"""

from __future__ import annotations

from pipeschool.actions import Action
from pipeschool.dependencies import used_by
from pipeschool.runtime.share import Share
from pipeschool.runtime.stages.tensors import Tensors


class Engine:
    """Does a worker's share of a run. Your own class can take its place: ``ps.run(engine=Mine)``
    calls ``Mine(share).run()`` on every worker. `Share` says what is there to work with.
    """

    def __init__(self, share: Share):
        self.share = share
        # What one action has left for another, under the name of the one that will use it: the
        # inputs of a stage under its forward, the gradients of its outputs under its backward.
        self.mail = share.mail

    def run(self) -> None:
        """The whole row, in its order."""
        for action in self.share.actions():
            self.do(action)

    def do(self, action: Action) -> None:
        """One action of any kind."""
        kind, s, k = action
        match kind:
            case "F":
                self.forward(action)
            case "B":
                self.leave(action, self.share.stages[s].backward(k, self.gradients(action)))
            case "I":
                self.leave(action, self.share.stages[s].backward_input(k, self.gradients(action)))
            case "W":
                self.share.stages[s].backward_weight(k)
            case "U":
                self.share.update(action)
            case "SEND_F" | "SEND_B":
                self.share.wire.send(action, self.mail.pop(used_by(action)))
            case "RECV_F" | "RECV_B":
                self.mail[used_by(action)] = self.share.wire.receive(action)

    def forward(self, action: Action) -> None:
        """The outputs of a stage; on the last one the loss, too."""
        _, s, k = action
        stage = self.share.stages[s]
        inputs: Tensors = self.mail.pop(action) if s > 0 else self.share.inputs_of(k)
        if not self.share.schedule.trains:
            outputs = stage.infer(k, inputs)
        elif s < self.share.last_stage:
            outputs = stage.forward(k, inputs)
        else:
            outputs = stage.forward(k, inputs, self.share.loss_of(k))
        if s < self.share.last_stage:
            self.leave(action, outputs)
        else:
            self.share.note_result(k, outputs)

    def gradients(self, action: Action) -> Tensors | float:
        """What a backward starts from: the gradients of the outputs that came from the next stage.
        The last one has a loss instead, and the weight of that."""
        if action.stage == self.share.last_stage:
            return self.share.loss_weight(action.microbatch)
        came: Tensors = self.mail.pop(action._replace(kind="B"))
        return came

    def leave(self, action: Action, tensors: Tensors) -> None:
        """What `action` has made, for the neighbour stage; the first has none to go back to."""
        if used_by(action).stage >= 0:
            self.mail[used_by(action)] = tensors
