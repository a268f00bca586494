"""All rows of a lowered schedule together, where a send is done only when its receiver is there.

So it is with NCCL: no tags, and on each channel, which is one direction between two workers, the
n-th send and the n-th receive belong together. A message passes once both workers have begun it,
and a worker goes on once all messages of its step have passed: a step is one message, or a group of
fused ones. What has begun stays begun, so the outcome does not depend on who moves first, and one
run settles it.

To fuse more never does harm: the messages of a group begin earlier than one by one, and their
worker waits for the same ones. So those that stand next to each other may all be one group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from pipeschool.actions import Action, Schedule
from pipeschool.checking.together import deadlock, waits_at_update, wrong_tensor
from pipeschool.dependencies import Channel, message_of, peer_of, sender_of


def rendezvous_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(worker, action) for every action, in an order in which the workers could do them; a send
    comes right before its receive.

    For lowered schedules whose rows are right by themselves. Raises `IllegalSchedule` where the
    workers cannot go on: they wait in a circle, or a receive would get somebody else's message.
    """
    steps = [schedule.steps_of(worker) for worker in range(schedule.p)]
    begun = Begun(schedule)
    meetings: defaultdict[Action, list[int]] = defaultdict(list)  # update -> who has come to it
    runnable = list(range(len(steps) - 1, -1, -1))
    while runnable:
        worker = runnable.pop()
        for step in steps[worker]:
            action = step[0]
            if action.is_message:
                for source, send, target, receive in begun.add(worker, step):
                    yield source, send
                    yield target, receive
                    peer = source + target - worker
                    if not begun.unmet[peer]:
                        runnable.append(peer)
                if begun.unmet[worker]:
                    break
            elif action.kind == "U":
                present, owners = meetings[action], schedule.owners[action.stage]
                present.append(worker)
                if len(present) < len(owners):
                    break
                runnable += present[:-1]
                yield from ((w, action) for w in present)
            else:
                yield worker, action
    at = {worker: messages[0] for worker, messages in enumerate(begun.unmet) if messages}
    waits = {worker: _waits_for(message, schedule) for worker, message in at.items()}
    for update, present in meetings.items():
        if at_update := waits_at_update(schedule, update, present):
            waits |= at_update
            at |= dict.fromkeys(at_update, update)
    if waits:
        raise deadlock(at, waits)


class Begun:
    """The messages that have been begun at one end and not yet at the other.

    unmet: for each worker, those of its step.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.unmet: list[list[Action]] = [[] for _ in range(schedule.p)]
        self.ends: defaultdict[tuple[Channel, bool], deque[Action]] = defaultdict(deque)

    def add(
        self, worker: int, step: tuple[Action, ...]
    ) -> Iterator[tuple[int, Action, int, Action]]:
        """`worker` begins the messages of `step`. Of those that pass at once: the worker and action
        that send, and those that receive."""
        self.unmet[worker] = list(step)
        for message in step:
            peer, sends = peer_of(message, self.schedule), message.kind.startswith("SEND")
            channel = Channel(worker, peer) if sends else Channel(peer, worker)
            if not self.ends[channel, not sends]:
                self.ends[channel, sends].append(message)
                continue
            other = self.ends[channel, not sends].popleft()
            send, receive = (message, other) if sends else (other, message)
            if message_of(send) != receive:
                raise wrong_tensor(*channel, receive, sender_of(receive), send)
            self.unmet[worker].remove(message)
            self.unmet[peer].remove(other)
            yield channel.source, send, channel.target, receive


def _waits_for(message: Action, schedule: Schedule) -> tuple[str, int]:
    """For what a worker waits at `message`, in words, and for whom."""
    peer = peer_of(message, schedule)
    if message.kind.startswith("SEND"):
        return f"for worker {peer} to receive it", peer
    return f"for {sender_of(message)} from worker {peer}", peer
