"""Makes messages ready to leave as soon as there is something to send."""

from __future__ import annotations

from typing import Any

from pipeschool.actions import Action
from pipeschool.dependencies import used_by
from pipeschool.runtime.observers.observer import Observer
from pipeschool.runtime.wire.wire import Wire


class Packer(Observer):
    """Packs what an action has left in the mail for another worker, while the action's own time
    runs. So its send is short, and the large copies are seen where they are made."""

    def __init__(self, mail: dict[Action, Any], wire: Wire):
        self.mail = mail
        self.wire = wire

    def after(self, action: Action) -> None:
        """If it has made something to send."""
        if action.kind not in ("F", "B", "I"):
            return
        send = Action("SEND_F" if action.kind == "F" else "SEND_B", *action[1:])
        user = used_by(action)
        if send in self.wire.peers and user in self.mail:
            self.mail[user] = self.wire.pack(send, self.mail[user])
