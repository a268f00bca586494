"""Independent answers to compare the library with. Of pipeschool they use `actions` alone.

Random legal schedules; the start and end of every action as longest paths in a graph; an abstract
machine that runs lowered rows in every order the workers could take; and for sends that wait, a
search through all states and another graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import product
from typing import NamedTuple

from pipeschool.actions import Action, B, F, I, IllegalSchedule, Schedule, W

Row = Sequence[Action]


def owner_of(rows: Sequence[Row]) -> dict[int, int]:
    """The worker of each stage."""
    return {action.stage: worker for worker, row in enumerate(rows) for action in row}


def names_it_all(error: IllegalSchedule) -> bool:
    """Does the one sentence of `error` name worker, action and microbatch, as its attributes do?"""
    text, action = str(error), error.action
    if error.worker is None or action is None or "\n" in text or text.endswith("."):
        return False
    number = (
        f"microbatch {error.microbatch}" if action.kind != "U" else f"update number {action[2]}"
    )
    return all(part in text for part in (f"worker {error.worker} ", str(action), number))


# ---------------------------------------------------------------------------------------------
# Random legal schedules


def random_schedule(
    seed: int, *, max_p: int = 4, max_chunks: int = 2, max_m: int = 5, weights: str | None = None
) -> Schedule:
    """Any legal schedule may come out of this: a random order that respects the dependencies.

    Stages lie on workers at random, each worker holding one at least; some backwards are split.
    """
    rng = random.Random(seed)
    p = rng.randint(1, max_p)
    m = rng.randint(1, max_m)
    stages = rng.randint(p, p * max_chunks)
    placement = [*range(p), *(rng.randrange(p) for _ in range(stages - p))]
    rng.shuffle(placement)
    weights = weights or rng.choice(["flush", "stash"])
    batches = rng.randint(1, 2)
    stream = m * (1 if weights == "flush" else batches)
    line = random_order(rng, stages, stream, split=rng.choice([0.0, 0.0, 0.5, 1.0]))
    return Schedule.from_workers(
        lambda worker, p, m: [a for a in line if placement[a.stage] == worker],
        p,
        m,
        batches=batches,
        weights=weights,
        name=f"random {seed}",
    )


def random_order(rng: random.Random, stages: int, m: int, split: float) -> list[Action]:
    """All compute of `m` microbatches in one line, nothing before what it needs."""
    needs: dict[Action, set[Action]] = {}
    for k in range(m):
        halves = [rng.random() < split for _ in range(stages)]
        backward = [(I if halved else B)(stage, k) for stage, halved in enumerate(halves)]
        for stage in range(stages):
            needs[F(stage, k)] = {F(stage - 1, k)} if stage else set()
            needs[backward[stage]] = {F(stage, k), *backward[stage + 1 : stage + 2]}
            if halves[stage]:
                needs[W(stage, k)] = {backward[stage]}
    # A random taste for one kind or another gives GPipe-like, 1F1B-like and odd schedules.
    taste = {kind: rng.choice([1, 1, 5, 50]) for kind in "FBIW"}
    line: list[Action] = []
    while needs:
        ready = [action for action, before in needs.items() if before.isdisjoint(needs)]
        weight = [taste[action.kind] for action in ready]
        line += rng.choices(ready, weight)
        del needs[line[-1]]
    return line


def scatter_messages(schedule: Schedule, seed: int) -> Schedule:
    """`schedule` with its messages at random places where they may stand.

    Sends come any time after their compute and receives any time before theirs, in the order of
    the sends on each link. This reaches what a lowering that is never early or late does not.
    """
    rng = random.Random(seed)
    owner = owner_of(schedule.workers)
    todo = [list(row) for row in schedule.workers]
    rows: list[list[Action]] = [[] for _ in todo]
    unsent: list[list[Action]] = [[] for _ in todo]
    under_way: dict[tuple[int, int], list[Action]] = {}  # per link, the receives that are next
    while True:
        options = [(worker, send) for worker, sends in enumerate(unsent) for send in sends]
        options += [(link[1], receives[0]) for link, receives in under_way.items() if receives]
        for worker, row in enumerate(todo):
            if row and _input_is_there(row[0], owner, rows[worker]):
                options.append((worker, row[0]))
        if not options:
            assert not any(todo), f"{schedule} has a deadlock"
            return replace(schedule, workers=tuple(map(tuple, rows)))
        worker, action = rng.choice(options)
        kind, stage, k = action
        rows[worker].append(action)
        letter, target = ("F", stage + 1) if kind[-1] == "F" else ("B", stage - 1)
        if kind.startswith("RECV"):
            next(queue for queue in under_way.values() if queue[:1] == [action]).pop(0)
        elif kind.startswith("SEND"):
            unsent[worker].remove(action)
            link = under_way.setdefault((worker, owner[target]), [])
            link.append(Action(f"RECV_{letter}", target, k))
        else:
            todo[worker].pop(0)
            if kind in ("F", "B", "I") and owner.get(target, worker) != worker:
                unsent[worker].append(Action(f"SEND_{letter}", stage, k))


def _input_is_there(action: Action, owner: dict[int, int], done: list[Action]) -> bool:
    """Has the worker of `action` received what it needs, if that comes by message?"""
    kind, stage, k = action
    if kind not in ("F", "B", "I"):
        return True
    letter, source = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
    by_message = source in owner and owner[source] != owner[stage]
    return not by_message or Action(f"RECV_{letter}", stage, k) in done


# ---------------------------------------------------------------------------------------------
# Start and end of every action


@dataclass(frozen=True)
class Rates:
    """What everything costs, spelled out: one number per stage (or worker, or boundary)."""

    seconds: dict[str, list[float]]  # kind -> one per stage, on a worker of speed 1
    speed: list[float]
    message_seconds: list[float]  # one per boundary
    latency: float


def longest_paths(rows: Sequence[Row], rates: Rates) -> dict[Action, tuple[float, float]]:
    """(start, end) of every compute action and update: each as early as a graph allows.

    The nodes are actions and messages, the edges what must be over first. A message waits for the
    message before it on its link, that is, from the same worker to the same other worker.
    """
    owner = owner_of(rows)
    last = max(owner)
    listed = {action for row in rows for action in row}
    seconds: dict[Hashable, float] = {}
    before: dict[Hashable, dict[Hashable, float]] = {}  # node -> earlier node -> extra seconds
    for worker, row in enumerate(rows):
        previous: Action | None = None
        link_tail: dict[int, Hashable] = {}
        for action in row:
            kind, stage, k = action
            seconds[action] = rates.seconds[kind][stage] / rates.speed[worker]
            before[action] = {} if previous is None else {previous: 0.0}
            previous = action

            source = None
            if kind == "F" and stage > 0:
                source = F(stage - 1, k)
            if kind in ("B", "I") and stage < last:
                source = I(stage + 1, k) if I(stage + 1, k) in listed else B(stage + 1, k)
            if source is not None:
                if owner[source.stage] == worker:
                    before[action][source] = 0.0
                else:
                    before[action]["message", source] = rates.latency

            target = stage + {"F": 1, "B": -1, "I": -1}.get(kind, 0)
            if 0 <= target <= last and owner[target] != worker:
                message = ("message", action)
                seconds[message] = rates.message_seconds[min(stage, target)]
                before[message] = {action: 0.0}
                if owner[target] in link_tail:
                    before[message][link_tail[owner[target]]] = 0.0
                link_tail[owner[target]] = message
    start: dict[Hashable, float] = {}
    end: dict[Hashable, float] = {}
    for node in TopologicalSorter(before).static_order():
        start[node] = max((end[o] + extra for o, extra in before[node].items()), default=0.0)
        end[node] = start[node] + seconds[node]
    return {node: (start[node], end[node]) for node in end if isinstance(node, Action)}


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """The most of these (from, to) that overlap at any time; one that ends frees its place."""
    changes = sorted([(end, -1) for _, end in intervals] + [(start, 1) for start, _ in intervals])
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


# ---------------------------------------------------------------------------------------------
# The abstract machine

Value = int  # stands for a tensor: equal where it was computed in the same way from the same

_records: dict[Hashable, Value] = {}


def record(*parts: Hashable) -> Value:
    """The tensor that was computed from these: one number for each different record."""
    return _records.setdefault(parts, len(_records))


def forward(weights: Value, inputs: Value) -> Value:
    """What a stage's forward makes, and its backward needs again."""
    return record("forward", weights, inputs)


def input_gradient(saved: Value, gradient: Value) -> Value:
    """What a stage's backward hands to the stage before."""
    return record("input gradient", saved, gradient)


def weight_gradient(saved: Value, gradient: Value) -> Value:
    """What a stage's backward leaves for the update."""
    return record("weight gradient", saved, gradient)


def loss_gradient(outputs: Value, microbatch: int) -> Value:
    """Where the backward starts: the last stage's outputs against the targets."""
    return record("loss", outputs, microbatch)


def update(number: int, weights: Value, gradients: Iterable[Value]) -> Value:
    """New weights. Gradients are summed: their order does not matter."""
    return record("update", number, weights, frozenset(gradients))


def weights_in_one_process(
    stages: int,
    microbatches: int,
    updates_every: int,
    version: Callable[[int, int], int],
    versions: bool = True,
) -> tuple[Value, ...]:
    """The last weights of every stage, where stage s uses `version(s, k)` for microbatch k.

    With `versions` off every forward uses the weights of the start, as in `Machine`.
    """
    weights = [[record("start", stage)] for stage in range(stages)]  # all versions of each
    gradients: list[list[Value]] = [[] for _ in range(stages)]
    for k in range(microbatches):
        tensor, saved = record("data", k), []
        for stage in range(stages):
            tensor = forward(weights[stage][version(stage, k) if versions else 0], tensor)
            saved.append(tensor)
        gradient = loss_gradient(tensor, k)
        for stage in reversed(range(stages)):
            gradients[stage].append(weight_gradient(saved[stage], gradient))
            gradient = input_gradient(saved[stage], gradient)
            if len(gradients[stage]) == updates_every:
                old = weights[stage]
                old.append(update(len(old) - 1, old[-1], gradients[stage]))
                gradients[stage] = []
    return tuple(versions[-1] for versions in weights)


class Memory(NamedTuple):
    """One worker: how far it is in its row, and the tensors it holds, by name."""

    position: int
    tensors: frozenset[tuple[Hashable, Value]]


Mail = tuple[tuple[tuple[Action, Value], ...], ...]  # per link: (tag, tensor), oldest first
State = tuple[tuple[Memory, ...], Mail]

DEADLOCK, MISSING, UNRECEIVED = "deadlock", "tensor missing", "message never received"


class Machine:
    """Runs lowered rows in every order that the workers could take.

    A tensor is the record of how it was computed, so a wrong one shows in all that is made of it.
    Sends are buffered. A receive takes, from the worker at its other end, the first message with
    its tag (``tag``) or the first there is (``in_order``), and keeps it under its own name.
    With `versions` off every forward uses the weights of the start: then only the gradients that
    went into each update tell one run from another.
    """

    def __init__(self, rows: Sequence[Row], matching: str, versions: bool = True):
        self.rows = rows
        self.matching = matching
        self.versions = versions
        self.owner = owner_of(rows)
        self.last = max(self.owner)
        workers = range(len(rows))
        self.links = {link: n for n, link in enumerate(product(workers, workers))}
        self.known: dict[Hashable, tuple[Memory, Value | None] | None] = {}

    def outcomes(self) -> set[str | tuple[Value, ...]]:
        """All ways in which a run can end: the last weights of every stage, or what went wrong."""
        stages = [sorted({action.stage for action in row}) for row in self.rows]
        start = tuple(
            Memory(0, frozenset((("weights", stage), record("start", stage)) for stage in held))
            for held in stages
        )
        todo: list[State] = [(start, ((),) * len(self.links))]
        seen = set(todo)
        found: set[str | tuple[Value, ...]] = set()
        while todo:
            state = todo.pop()
            moves = [move for w in range(len(self.rows)) if (move := self.move(w, state))]
            if not moves:
                found.add(self.ending(state))
            for move in moves:
                if isinstance(move, str):
                    found.add(move)
                elif move not in seen:
                    seen.add(move)
                    todo.append(move)
        return found

    def ending(self, state: State) -> str | tuple[Value, ...]:
        """What a state in which nobody can move amounts to."""
        memories, mail = state
        if any(memory.position < len(row) for memory, row in zip(memories, self.rows, strict=True)):
            return DEADLOCK
        if any(mail):
            return UNRECEIVED
        tensors = dict(pair for memory in memories for pair in memory.tensors)
        return tuple(tensors["weights", stage] for stage in range(self.last + 1))

    def move(self, worker: int, state: State) -> State | str | None:
        """The state after the next action of `worker`; None where it must wait or is through."""
        memories, mail = state
        memory = memories[worker]
        if memory.position == len(self.rows[worker]):
            return None
        action = self.rows[worker][memory.position]
        received = None
        if action.kind.startswith("RECV"):
            source = action.stage + (-1 if action.kind == "RECV_F" else 1)
            link = self.links[self.owner[source], worker]
            tags = [tag for tag, _ in mail[link]]
            if self.matching == "in_order":
                index = 0 if tags else None
            else:
                index = tags.index(action) if action in tags else None
            if index is None:
                return None
            received = mail[link][index][1]
            left = mail[link][:index] + mail[link][index + 1 :]
            mail = (*mail[:link], left, *mail[link + 1 :])
        done = self.do(worker, memory, action, received)
        if done is None:
            return MISSING
        memory, sent = done
        if sent is not None:
            forwards = action.kind == "SEND_F"
            target = action.stage + (1 if forwards else -1)
            tag = Action("RECV_F" if forwards else "RECV_B", target, action.microbatch)
            link = self.links[worker, self.owner[target]]
            mail = (*mail[:link], (*mail[link], (tag, sent)), *mail[link + 1 :])
        return (*memories[:worker], memory, *memories[worker + 1 :]), mail

    def do(
        self, worker: int, memory: Memory, action: Action, received: Value | None
    ) -> tuple[Memory, Value | None] | None:
        """What the worker remembers after `action`, and what it sends; None where a tensor it
        needs is not there. Depends on nothing else, so each case is worked out once."""
        case = (worker, memory, received)
        if case not in self.known:
            tensors = dict(memory.tensors)
            try:
                sent = self.work(worker, tensors, action, received)
                after = Memory(memory.position + 1, frozenset(tensors.items()))
                self.known[case] = (after, sent)
            except KeyError:
                self.known[case] = None
        return self.known[case]

    def work(
        self, worker: int, tensors: dict[Hashable, Value], action: Action, received: Value | None
    ) -> Value | None:
        """Do `action` on `tensors`; returns what it sends. KeyError where a tensor is missing."""
        kind, stage, k = action

        def hand_on(letter: str, neighbour: int, tensor: Value) -> None:
            if self.owner.get(neighbour) == worker:
                tensors[letter, neighbour, k] = tensor
            else:
                tensors[f"SEND_{letter}", stage, k] = tensor

        if kind.startswith("RECV"):
            assert received is not None
            tensors[kind[-1], stage, k] = received
        elif kind.startswith("SEND"):
            return tensors[kind, stage, k]
        elif kind == "F":
            weights = tensors["weights", stage] if self.versions else record("start", stage)
            inputs = tensors["F", stage, k] if stage else record("data", k)
            tensors["saved", stage, k] = forward(weights, inputs)
            hand_on("F", stage + 1, tensors["saved", stage, k])
        elif kind in ("B", "I"):
            saved = tensors["saved", stage, k]
            last = stage == self.last
            gradient = loss_gradient(saved, k) if last else tensors["B", stage, k]
            hand_on("B", stage - 1, input_gradient(saved, gradient))
            if kind == "B":
                tensors["gradient", stage, k] = weight_gradient(saved, gradient)
            else:
                tensors["half", stage, k] = gradient
        elif kind == "W":
            saved, gradient = tensors["saved", stage, k], tensors["half", stage, k]
            tensors["gradient", stage, k] = weight_gradient(saved, gradient)
        elif kind == "U":
            ready = [name for name in tensors if name[:2] == ("gradient", stage)]
            gradients = [tensors.pop(name) for name in ready]
            tensors["weights", stage] = update(k, tensors["weights", stage], gradients)
        return None


# ---------------------------------------------------------------------------------------------
# Sends that wait for their receivers

WRONG_TENSOR = "wrong tensor"


def steps_of(row: Row, fused: bool) -> list[list[Action]]:
    """The row in steps: each action alone, or messages next to each other together."""
    steps: list[list[Action]] = []
    for action in row:
        joins = fused and action.is_message and steps and steps[-1][0].is_message
        if joins:
            steps[-1].append(action)
        else:
            steps.append([action])
    return steps


def other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive."""
    kind, stage, k = message
    up = kind in ("SEND_F", "RECV_B")  # whose other end is a stage further
    way = "RECV" if kind.startswith("SEND") else "SEND"
    return Action(f"{way}_{kind[-1]}", stage + (1 if up else -1), k)


class Meetings:
    """Lowered rows in which nothing passes but between two who are both there.

    A state says, for each worker, its step and which messages of it are done. `moves` are all that
    could happen next: one action of one worker, a message between two, an update of all who share
    it. On a link the first message that is not done yet is next, at either end.
    """

    def __init__(self, schedule: Schedule):
        self.steps = [steps_of(row, schedule.fused) for row in schedule.workers]
        self.workers_of: dict[int, tuple[int, ...]] = dict(enumerate(schedule.replicas))
        if not self.workers_of:
            self.workers_of = {s: (w,) for s, w in owner_of(schedule.workers).items()}

    def peer(self, message: Action) -> int:
        """The worker at the other end."""
        workers = self.workers_of[other_end(message).stage]
        return workers[message.microbatch % len(workers)]

    def start(self) -> tuple[tuple[int, frozenset[Action]], ...]:
        """Nobody has done anything."""
        return ((0, frozenset()),) * len(self.steps)

    def next_on_link(self, state, worker: int, peer: int, way: str) -> Action | None:
        """The first message of `worker` to or from `peer` that it has come to and not done."""
        place, done = state[worker]
        for message in self.steps[worker][place] if place < len(self.steps[worker]) else []:
            if message.kind.startswith(way) and message not in done and self.peer(message) == peer:
                return message
        return None

    def after(self, state, worker: int, action: Action):
        """The state once `worker` has done `action`."""
        place, done = state[worker]
        done = done | {action}
        step = self.steps[worker][place]
        new = (place + 1, frozenset()) if done == set(step) else (place, done)
        return (*state[:worker], new, *state[worker + 1 :])

    def moves(self, state) -> list:
        """The states after each; WRONG_TENSOR where two do not match."""
        found: list = []
        for worker, (place, _) in enumerate(state):
            if place == len(self.steps[worker]):
                continue
            action = self.steps[worker][place][0]
            if action.is_message:
                for peer in range(len(state)):
                    send = self.next_on_link(state, worker, peer, "SEND")
                    receive = self.next_on_link(state, peer, worker, "RECV")
                    if send and receive:
                        after = self.after(self.after(state, worker, send), peer, receive)
                        found.append(after if other_end(send) == receive else WRONG_TENSOR)
                continue
            sharers = self.workers_of[action.stage] if action.kind == "U" else (worker,)
            here = [w for w in sharers if self.at(state, w) == action]
            if len(here) == len(sharers):
                after = state
                for w in sharers:
                    after = self.after(after, w, action)
                found.append(after)
        return found

    def at(self, state, worker: int) -> Action | None:
        """The first action of the step of `worker`."""
        place, _ = state[worker]
        return self.steps[worker][place][0] if place < len(self.steps[worker]) else None

    def outcomes(self) -> set[str]:
        """All ways in which it can end: ``through``, DEADLOCK or WRONG_TENSOR."""
        todo = [self.start()]
        seen = set(todo)
        found = set()
        while todo:
            state = todo.pop()
            moves = self.moves(state)
            if not moves:
                through = all(at == len(s) for (at, _), s in zip(state, self.steps, strict=True))
                found.add("through" if through else DEADLOCK)
            for after in moves:
                if after == WRONG_TENSOR:
                    found.add(WRONG_TENSOR)
                elif after not in seen:
                    seen.add(after)
                    todo.append(after)
        return found


def paths_through_meetings(
    schedule: Schedule, rates: Rates
) -> dict[tuple[int, Action], tuple[float, float]]:
    """(start, end) of every action of every worker where sends wait: longest paths in a graph.

    The nodes are the ends of steps, updates and messages; the edges what must be over first. A
    message waits for both its workers to come to their steps, and for the one before it on its
    link. CycleError where somebody would wait for ever.
    """
    rules = Meetings(schedule)
    seconds: dict[Hashable, float] = {}
    before: dict[Hashable, dict[Hashable, float]] = {}  # node -> earlier node -> extra seconds
    came: dict[tuple[int, Action], Hashable] = {}  # the node at which a worker comes to an action
    for worker, steps in enumerate(rules.steps):
        tail: Hashable = ("start", worker)
        seconds[tail], before[tail] = 0.0, {}
        link_tail: dict[int, Hashable] = {}
        for number, step in enumerate(steps):
            end = ("end", worker, number)
            seconds[end], before[end] = 0.0, {}
            for action in step:
                came[worker, action] = tail
                kind, stage, _ = action
                send = other_end(action) if kind.startswith("RECV") else action
                shared = action.is_message or kind == "U"
                node = ("done", send if shared else (worker, action))
                links = {tail: 0.0}
                if action.is_message:
                    boundary = send.stage - (send.kind == "SEND_B")
                    seconds[node] = rates.message_seconds[boundary]
                    if send == action:
                        peer = rules.peer(send)
                        if peer in link_tail:
                            links[link_tail[peer]] = 0.0
                        link_tail[peer] = node
                else:
                    seconds[node] = rates.seconds[kind][stage] / rates.speed[worker]
                before[node] = before.get(node, {}) | links
                before[end][node] = rates.latency if action.is_message else 0.0
            tail = end
    start: dict[Hashable, float] = {}
    over: dict[Hashable, float] = {}
    for node in TopologicalSorter(before).static_order():
        start[node] = max((over[o] + extra for o, extra in before[node].items()), default=0.0)
        over[node] = start[node] + seconds[node]
    found = {}
    for (worker, action), came_at in came.items():
        send = other_end(action) if action.kind.startswith("RECV") else action
        if action.is_message:
            found[worker, action] = (over[came_at], over["done", send] + rates.latency)
        else:
            node = ("done", action if action.kind == "U" else (worker, action))
            found[worker, action] = (start[node], over[node])
    return found
