# %% [markdown]
# # One forward, one backward
#
# How do I keep the counter clear without losing time?
#
# **After this unit you can**
#
# - write 1F1B, the schedule that most large trainings run, and run it on real workers,
# - say why its warm-up is $p - 1 - s$ forwards, and what is in flight on each worker,
# - find a deadlock between two workers, and cure it,
# - trade memory for time with recomputation, and know both prices before you pay,
# - work out every byte of a worker, predict its peak, and measure it.
#
# **It takes** two sittings of about 45 minutes, with a place to stop after section 4. **You need** [unit 01](../01_synchronous_bubble/synchronous_bubble.ipynb): GPipe and the bubble. For sections 4 and 7 also [unit 03](../03_weight_versions/weight_versions.ipynb): weight versions.
#
# Nine exercises earn points. As before, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
import os
from dataclasses import replace
from functools import partial

import pipeschool as ps
import torch
from pipeschool import course_data, grade, lateness
from pipeschool.dependencies import sender_of
from pipeschool.runtime import reference
from torch import nn

torch.set_num_threads(1)
(inputs, targets), _ = course_data.digits()  # 1437 handwritten digits, 64 pixels each
batch = (inputs[:1024], targets[:1024])

torch.manual_seed(0)
stages = [
    nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()),
    nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()),
    nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()),
    nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)),
]
loss = nn.functional.cross_entropy
cost = ps.Cost(forward=1, backward=2)
pace = (0.03, 0.06)  # seconds of a forward, of a backward

print(f"{len(stages)} stages, one batch of {len(batch[0])} digits")

# %% [markdown]
# ## 1. The counter fills up
#
# Under GPipe all cups go down the line first. Only then the first one comes back. Where are they in the meantime? On the counter. Every station keeps its notes on every cup, because it needs them when the cup is back.
#
# In training the notes are *activations*: what a forward leaves in memory for its backward. Call what one worker keeps for one microbatch $A$. GPipe keeps $m \cdot A$ on every worker. So far you saw that in units of $A$. Now let us see it in bytes.
#
# `ps.profile` sends one microbatch through the stages, in this notebook's own process, and notes the seconds and the bytes of each stage.

# %%
profile = ps.profile(stages, batch, m=8, loss=loss)
kB = [round(size / 1000) for size in profile.activation_bytes]
print("A on stage 0 to 3, in kB:  ", kB)
print("one message, in kB:        ", [round(size / 1000) for size in profile.message_bytes])
print("weights, in kB:            ", [round(size / 1000) for size in profile.parameter_bytes])

# %% [markdown]
# **Predict.** GPipe with $m = 8$ on four workers. About how many kB of activations lie on worker 1 when its counter is fullest?

# %%
guess_full_counter = None  # kB, a number

# %%
predict = replace(profile, forward=pace[0], backward=pace[1])  # these bytes, at the declared pace
gpipe_predicted = ps.simulate(ps.gpipe(p=4, m=8), predict)
gpipe_measured = ps.run(ps.gpipe(p=4, m=8), stages, [batch], loss=loss, pace=pace, memory=True)

most = max(level.activations for level in gpipe_predicted.memory[1])
grade.reveal(guess_full_counter, round(most / 1000), "kB")
ps.draw.live_bytes(gpipe_predicted, gpipe_measured.trace)

# %% [markdown]
# At the top the schedule, below it each worker's memory. The areas are predicted, kind by kind. The black line is measured: four real processes counted every tensor that was alive. (MB are millions of bytes.)
#
# The run is *paced*: the processes really compute, send and keep, and an action ends no earlier than its declared time after its input was there. So the order of things is that of four devices, and the bytes and the times are measured. How fast four stages would be that share your cores at full speed, it does not show.
#
# Activations rise like a staircase while cups go down, and fall while they come back. The *buffers* are the inputs that came from the stage before. A backward needs them as well, so they are kept as long. *Working* is what a backward needs for itself while it runs.
#
# **Try it.** What if there are twice as many cups of the same size? Change `factor` and run the cell a few times.

# %%
factor = 2
gpipe_more = ps.simulate(ps.gpipe(p=4, m=8 * factor), predict)
for name, trace in (("m = 8", gpipe_predicted), (f"m = {8 * factor}", gpipe_more)):
    peaks = ", ".join(f"{peak / 1e6:.2f}" for peak in trace.peak_bytes)
    print(f"{name:<8} bubble {trace.bubble_of_total:.1%} of total, peaks in MB: {peaks}")

# %% [markdown]
# More microbatches make the bubble small, and the counter full. GPipe lets you choose which of the two you suffer from. Can we have both?

# %% [markdown]
# ## 2. Take a cup back as soon as it comes
#
# Look at the chart once more. The first cup reaches the end of the line early. The last worker could send it back *at once*. It does not, because the rule says: all forwards first.
#
# The third manager drops that rule. Hers is: **when a cup comes back, take it before you take a new one.** Then each cup that comes in follows one that went out, and the counter stops filling up. The meeting at the end of the batch stays, so the weights change when nothing is on the way, and training is what it was.
#
# What does a worker do until the first cup is back? Forwards, to keep the line busy. This is the *warm-up*. Then it takes turns: one forward, one backward. At the end there are no new cups, and the rest comes back: the *drain*.
#
# **Predict.** Four workers. Worker 3 is the end of the line. How many forwards does it do before its first turn? And worker 0? (The forward of the first turn does not count.)

# %%
guess_warm_up_3 = None
guess_warm_up_0 = None

# %% [markdown]
# ### Exercise 1: the length of the warm-up (2 points)
#
# Think of worker $s$ and cup 0. After its own forward, the cup must go through all workers further down. While one of them works on cup 0, worker $s$ has time for one more forward.
#
# If there are only few cups, a warm-up can be shorter than that.


# %%
def warm_up(worker: int, p: int, m: int) -> int:
    """How many forwards a worker does before it begins to take turns.

    worker: from 0 to p - 1. p: workers. m: microbatches, perhaps fewer than p.

    Example: warm_up(worker=4, p=6, m=12) is 1.
    """
    ### BEGIN SOLUTION
    return min(p - 1 - worker, m)
    ### END SOLUTION


# %%
grade.check(warm_up, points=2)
### BEGIN HIDDEN TESTS
grade.check(warm_up, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_warm_up = grade.yours(warm_up)
grade.reveal(guess_warm_up_3, my_warm_up(3, 4, 8), "on worker 3")
grade.reveal(guess_warm_up_0, my_warm_up(0, 4, 8), "on worker 0")

# %% [markdown]
# People are often off by one here. When the first backward begins, a worker has done *one forward more* than its warm-up: that of the first turn. Unit 02 counted these, $p - s$ of them. It is the same row, cut in another place.

# %% [markdown]
# ## 3. One forward, one backward
#
# ### Exercise 2: the order (5 points)
#
# Write one worker's row. It has three pieces: the warm-up, the turns, the drain. Cups come back in the order in which they went down. The tricky case is $m < p$: some workers then never take a turn.


# %%
def one_f_one_b_order(worker: int, p: int, m: int) -> list[ps.Action]:
    """All forwards and backwards of `worker`, in order, under 1F1B with a flush.

    worker: from 0 to p - 1; it holds stage number `worker`.
    p, m: workers and microbatches; m may be smaller than p.

    Example: one_f_one_b_order(worker=2, p=4, m=2) is
    [ps.F(2, 0), ps.F(2, 1), ps.B(2, 0), ps.B(2, 1)].
    """
    ### BEGIN SOLUTION
    first = min(p - 1 - worker, m)
    order = [ps.F(worker, k) for k in range(first)]
    for k in range(m - first):
        order += [ps.F(worker, first + k), ps.B(worker, k)]
    return order + [ps.B(worker, k) for k in range(m - first, m)]
    ### END SOLUTION


# %%
grade.check(one_f_one_b_order, points=5)
### BEGIN HIDDEN TESTS
grade.check(one_f_one_b_order, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** GPipe needs $(m + p - 1)(t_F + t_B)$ seconds, here with $p = 4$, $m = 8$, $t_F = 1$, $t_B = 2$. And your order?

# %%
guess_1f1b = None  # seconds

# %%
my_order = grade.yours(one_f_one_b_order)
mine = ps.Schedule.from_workers(my_order, p=4, m=8, name="my 1f1b")
gpipe = ps.simulate(ps.gpipe(p=4, m=8), cost)
grade.reveal(guess_1f1b, ps.simulate(mine, cost).makespan, "seconds")
ps.draw.gantt(gpipe, ps.simulate(mine, cost))

# %% [markdown]
# The same time, exactly. The triangles at the two ends are those of GPipe, cut apart and put elsewhere: a worker waits $(p - 1)(t_F + t_B)$ seconds in both. **1F1B does not make the bubble smaller.** It makes the *counter* emptier.
#
# **Try it.** Find any `p`, `m`, `forward` and `backward` for which the two makespans differ. And watch the last line of the table: when does it stop growing with `m`?

# %%
ps.widgets.explore(("gpipe", "one_f_one_b"))

# %% [markdown]
# ### For real
#
# Four processes, the same pace as GPipe above. And first of all: are the gradients right? `reference` computes those of one process, without any pipeline.

# %%
measured = ps.run(mine, stages, [batch], loss=loss, pace=pace, memory=True)
one_process = reference.gradients(stages, [batch], m=8, loss=loss)
error = reference.max_error(measured.gradients, one_process)
print(f"largest difference from the gradients of one process: {error:.1e}")
for name, trace in (("GPipe", gpipe_measured.trace), ("your 1F1B", measured.trace)):
    print(f"{name:<10} measured, paced: {trace.makespan:.3f} s", end=", ")
    print(f"bubble of total {trace.bubble_of_total:.1%}")
lateness.tell(
    {
        "GPipe": (gpipe_predicted, gpipe_measured.trace),
        "your 1F1B": (ps.simulate(mine, predict), measured.trace),
    }
)
ps.draw.live_bytes(ps.simulate(mine, predict), measured.trace)

# %% [markdown]
# Compare with the chart in section 1. The staircase is cut off after a few steps, and it is lower for each worker down the line. And the times? They are the same if the machine disturbed neither run. Where a line says *run it again*, run the cell again (for GPipe the one in section 1).
#
# Without a pace, the prediction has to come from a stop-watch. `ps.profile` times two larger stages, one at a time, and then both run under 1F1B at full speed.

# %%
heavy = [
    nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(2)
]
large = (torch.randn(2048, 512), torch.randn(2048, 512))
two = ps.one_f_one_b(p=2, m=8)
alone = ps.profile(heavy, large, m=8)
full_speed = ps.run(two, heavy, [large])
print(f"2 workers on a machine with {os.cpu_count()} cores")
ps.draw.compare(ps.simulate(two, alone), full_speed.trace)

# %% [markdown]
# The stop-watch timed each stage alone. Together they share the machine's memory, so *actions* take longer; with fewer free cores than workers they share those too, and the line says so. One device per stage is what the paced run stands for.
#
# ### Exercise 3: in flight (1 point)
#
# A microbatch is *in flight* on a worker when its forward is done there and its backward is not. How many are it at most?


# %%
def in_flight(worker: int, p: int, m: int) -> int:
    """The most microbatches that a worker holds activations of, under 1F1B.

    Example: in_flight(worker=4, p=6, m=12) is 2.
    """
    ### BEGIN SOLUTION
    return min(m, p - worker)
    ### END SOLUTION


# %%
grade.check(in_flight, points=1)
### BEGIN HIDDEN TESTS
grade.check(in_flight, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
held = grade.yours(in_flight)
print("\nmost microbatches in flight on worker 0 to 3")
print("your formula:   ", [held(worker, 4, 8) for worker in range(4)])
print("1F1B, measured: ", [round(peak) for peak in measured.trace.peak_activations])
print("GPipe, measured:", [round(peak) for peak in gpipe_measured.trace.peak_activations])
print("\npeak bytes of everything, measured, in MB")
for name, trace in (("1F1B", measured.trace), ("GPipe", gpipe_measured.trace)):
    print(f"{name:<6}", ", ".join(f"{peak / 1e6:.2f}" for peak in trace.peak_bytes))

# %% [markdown]
# The number does not depend on $m$ any more, once $m \ge p$. So you may take as many microbatches as the bubble asks for. And it differs from worker to worker: the first has the fullest counter, the last only ever holds one cup.

# %% [markdown]
# ## 4. Which 1F1B?
#
# You met the name before. In unit 02 PipeDream took turns in the same way, but without a meeting at the end of the batch. Both are called 1F1B, and people mix them up:
#
# - **1F1B with a flush**, this unit's: synchronous. Also called PipeDream-Flush or DAPPLE, and the usual choice in Megatron-LM.
# - **PipeDream's 1F1B**, asynchronous: an update after every backward, old weights kept in a stash.
#
# **Predict** for both: how many copies of its weights does worker 0 of 4 keep? And how many updates late are its gradients?

# %%
guess_copies = {"flush": None, "pipedream": None}
guess_late = {"flush": None, "pipedream": None}

# %%
with_flush = ps.simulate(ps.one_f_one_b(p=4, m=8, batches=3), cost)
without = ps.simulate(ps.pipedream(p=4, m=8, batches=3), cost)
for name, trace in (("flush", with_flush), ("pipedream", without)):
    grade.reveal(guess_copies[name], trace.weight_versions[0], f"(copies of its weights, {name})")
    grade.reveal(guess_late[name], trace.staleness[0], f"(updates late, {name})")
    print(f"{name}: in flight {trace.peak_activations}, 24 microbatches in {trace.makespan:g} s\n")
ps.draw.gantt(with_flush, without)

# %% [markdown]
# The same counter, $\min(m, p - s)$ cups on worker $s$. PipeDream saves the refill between batches, and pays with copies and with lateness. The flush keeps one copy, and is never late. When somebody says "we use 1F1B", ask for the flush.
#
# *This is a good place to stop for today. The second half needs your `in_flight` and your order: run the cells above once when you come back.*

# %% [markdown]
# ## 5. A deadlock
#
# A row of forwards and backwards is not all that a worker does. It also passes things on. `ps.lower` adds these messages to a schedule:

# %%
print(ps.lower(ps.one_f_one_b(p=2, m=2)))

# %% [markdown]
# `0SEND_F0` hands the activations of microbatch 0 on, from stage 0 to the next one. `1RECV_F0` takes them in, on stage 1. Gradients go the other way, with `SEND_B` and `RECV_B`. `0U0` at the end is stage 0's update.
#
# A send puts its message into the line and never waits. A receive waits until its message is there. So a worker that receives at the wrong moment can wait for something that will never come.
#
# In the shop: "I will not hand you this cup before you give me the other one back." If the other one waits for the cup, the shop stands still, with polite people in it.
#
# **Predict.** One of these two pipelines stands still. Which one?

# %%
guess_stands_still = None  # "first" or "second"


# %%
def rows_of(*lines: str) -> list[list[ps.Action]]:
    """Rows of actions out of their text."""
    return [[ps.Action.parse(word) for word in line.split()] for line in lines]


def as_schedule(rows: list[list[ps.Action]], m: int) -> ps.Schedule:
    return ps.Schedule.from_workers(lambda worker, *_: rows[worker], len(rows), m, name="rows")


first = rows_of(
    "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)
second = rows_of(
    "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
)

# %%
print("you predicted:", guess_stands_still)
for name, rows in (("first", first), ("second", second)):
    try:
        ps.check(as_schedule(rows, m=2))
        print(f"{name}: runs")
    except ps.IllegalSchedule as problem:
        print(f"{name}: {problem}")

# %% [markdown]
# `ps.check` finds it without running anything, and `ps.run` refuses such rows. A real cluster would just hang, with all lights on. How does `check` know? It goes along all rows without a clock, again and again, until nothing is possible any more:


# %%
def stuck_at(rows: list[list[ps.Action]]) -> dict[int, ps.Action]:
    """{worker: the receive at which it waits for ever}; empty where all rows run to their end."""
    place = [0] * len(rows)
    sent = set()
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(rows):
            while place[worker] < len(row):
                action = row[place[worker]]
                if action.kind.startswith("RECV") and sender_of(action) not in sent:
                    break  # its message is not there yet
                sent.add(action)
                place[worker] += 1
                moved = True
    return {w: rows[w][i] for w, i in enumerate(place) if i < len(rows[w])}


for worker, receive in stuck_at(second).items():
    print(f"worker {worker} waits at {receive} for {sender_of(receive)}")

# %% [markdown]
# ### Exercise 4: find the circle (3 points)
#
# In a long line, many workers may stand still, but only some of them are to blame. Worker 0 may wait for worker 1, which waits for worker 2, which waits for worker 1 again. Then workers 1 and 2 are the *circle*. Worker 0 is only a victim.
#
# Start with `stuck_at(rows)` and `sender_of(receive)`. Here worker number $s$ holds stage number $s$, so `.stage` of an action is also its worker.


# %%
def waiting_circle(rows: list[list[ps.Action]]) -> list[int]:
    """The workers that wait for each other in a circle: each for the next, the last for the first.

    rows: what each worker does, messages included. One stage per worker.
    Returns [] where all rows run to their end. Any worker of the circle may come first.

    Example: with the rows of `second` above it is [0, 1], or [1, 0].
    """
    ### BEGIN SOLUTION
    waits_for = {worker: sender_of(receive).stage for worker, receive in stuck_at(rows).items()}
    if not waits_for:
        return []
    seen = []
    worker = min(waits_for)
    while worker not in seen:
        seen.append(worker)
        worker = waits_for[worker]
    return seen[seen.index(worker) :]
    ### END SOLUTION


# %%
grade.check(waiting_circle, points=3)
### BEGIN HIDDEN TESTS
grade.check(waiting_circle, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
circle = grade.yours(waiting_circle)
five = [list(row) for row in ps.lower(ps.one_f_one_b(p=5, m=4)).workers]
five[2].remove(late := ps.Action("SEND_F", 2, 2))  # worker 2 hands its microbatch 2 on too late
five[2].insert(five[2].index(ps.Action("RECV_B", 2, 1)) + 1, late)

print("\nwho waits for whom:", {w: sender_of(r).stage for w, r in stuck_at(five).items()})
print("the circle:", circle(five))

# %% [markdown]
# All five stand still, and two of them are to blame. In a line a circle always has two workers, next to each other: everybody waits for a neighbour, so if you follow who waits for whom, you turn round somewhere, and there the two face each other.
#
# ### Exercise 5: the cure (3 points)
#
# The rule that avoids it: **send at once what is done, and receive only what is needed next.** In a row that means: each send directly behind the work that makes its content, each receive directly in front of the work that needs it.
#
# Write a function that puts one row's messages in order. Which messages does stage 0 not have? And the last stage?


# %%
def mend_row(row: list[ps.Action], p: int) -> list[ps.Action]:
    """The same forwards and backwards in the same order, with each message in its place.

    row: what one worker does; its messages may be anywhere. p: how many workers there are.
    Messages: ps.Action("RECV_F", stage, microbatch), and so on with SEND_F, RECV_B, SEND_B.

    Example: mend_row([ps.F(0, 0), ps.B(0, 0)], p=1) is [ps.F(0, 0), ps.B(0, 0)].
    """
    ### BEGIN SOLUTION
    mended = []
    for action in row:
        kind, stage, k = action
        if action.is_message:
            continue
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        if 0 <= source < p:
            mended.append(ps.Action(f"RECV_{kind}", stage, k))
        mended.append(action)
        if 0 <= target < p:
            mended.append(ps.Action(f"SEND_{kind}", stage, k))
    return mended
    ### END SOLUTION


# %%
grade.check(mend_row, points=3)
### BEGIN HIDDEN TESTS
grade.check(mend_row, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Now for real: your own 1F1B, with your own messages, on four processes.

# %%
mend = grade.yours(mend_row)
by_hand = ps.Schedule.from_workers(
    lambda worker, p, m: mend(my_order(worker, p, m), p), p=4, m=8, name="mended"
)
print(" ".join(map(str, by_hand.workers[1][:12])), "...")
mended = ps.run(ps.check(by_hand), stages, [batch], loss=loss)
error = reference.max_error(mended.gradients, one_process)
print(f"it runs; largest difference from the gradients of one process: {error:.1e}")

# %% [markdown]
# ### Worse than standing still
#
# **Predict.** Two receives from the same worker are swapped: worker 1 takes in microbatch 1 before microbatch 0. Does it hang, does it compute something wrong, or is all well?

# %%
guess_swapped = None  # "hang", "wrong" or "well"

# %%
swapped = rows_of(
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
)
print("you predicted:", guess_swapped)
for matching in ("tag", "in_order"):
    try:
        ps.check(as_schedule(swapped, m=2), matching=matching)
        print(f"matching={matching!r}: runs")
    except ps.IllegalSchedule as problem:
        print(f"matching={matching!r}: {problem}")

# %% [markdown]
# It depends on who carries the messages. gloo, which we use on CPUs, reads the tag on each message, so the right one arrives. NCCL, which GPUs use, has no tags: the first receive gets the first message, *whatever is in it*. Nothing hangs. Microbatch 0's digits are then graded against microbatch 1's answers. How wrong would the gradient be?

# %%
whole = nn.Sequential(*stages)


def gradient(cups):
    """The gradient of the first weights, for (inputs, targets) one after the other."""
    whole.zero_grad()
    for x, y in cups:
        (loss(whole(x), y) / len(cups)).backward()
    return whole[0][0].weight.grad.clone()


x0, x1 = batch[0][:128], batch[0][128:256]
y0, y1 = batch[1][:128], batch[1][128:256]
right, wrong = gradient([(x0, y0), (x1, y1)]), gradient([(x1, y0), (x0, y1)])
print(f"off by {(right - wrong).norm() / right.norm():.0%} of its length, and no error message")
whole.zero_grad()

# %% [markdown]
# That is why `ps.check` and `ps.run` go by the stricter rule unless you say otherwise: receives from a worker come in the order of its sends.
#
# (Our sends never wait. Some systems' sends wait until somebody takes the message. Then two neighbours that both *send* first stand still as well, and in 1F1B that would happen at every turn: one has activations for the other, the other a gradient. Such systems post the send and the receive together.)

# %% [markdown]
# ## 6. Make it again
#
# 1F1B leaves up to $p$ cups on the first counter. For a long line even that is too much. There is a second trick, and it works with any schedule: **throw the notes away, and keep only the order slip.** When the cup comes back, make it once more, quickly, and write the notes anew.
#
# In training: a forward keeps only its *input*. The backward first does the forward again, which gives it the activations, and then the real backward. This is *recomputation*, or activation checkpointing (Chen et al., 2016; GPipe uses it too).
#
# How much does it save on one worker? Say $k$ microbatches are in flight, $A$ are the activations of one, and $X$ is its input.
#
# | | at the worst moment |
# |---|---|
# | without recomputation | $k\,(X + A)$ |
# | with it | $k\,X$, and the activations of the one microbatch whose backward is running |
#
# ### Exercise 6: bytes saved (2 points)


# %%
def bytes_saved(worker: int, p: int, m: int, activations: int) -> int:
    """By how many bytes recomputation lowers a worker's peak under 1F1B.

    activations: the bytes that a forward of one microbatch keeps, besides its input.

    Example: bytes_saved(worker=4, p=6, m=12, activations=500) is 500.
    """
    ### BEGIN SOLUTION
    return (min(m, p - worker) - 1) * activations
    ### END SOLUTION


# %%
grade.check(bytes_saved, points=2)
### BEGIN HIDDEN TESTS
grade.check(bytes_saved, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 7: time paid (1 point)
#
# All stages recompute. How much longer does a batch take?


# %%
def seconds_paid(p: int, m: int, forward: float, backward: float) -> float:
    """How many seconds longer a batch takes under 1F1B if every backward goes forward first.

    forward, backward: the seconds of one, without recomputation; all stages alike.

    Example: seconds_paid(p=1, m=2, forward=3, backward=6) is 6.
    """
    ### BEGIN SOLUTION
    return (m + p - 1) * forward
    ### END SOLUTION


# %%
grade.check(seconds_paid, points=1)
### BEGIN HIDDEN TESTS
grade.check(seconds_paid, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** On which worker does it save most, and on which nothing at all?

# %%
guess_saves_most = None  # number of a worker
guess_saves_nothing = None

# %%
saved, paid = grade.yours(bytes_saved), grade.yours(seconds_paid)
again = ps.run(mine, stages, [batch], loss=loss, pace=pace, memory=True, recompute=True)
error = reference.max_error(again.gradients, one_process)
print(f"\nlargest difference from the gradients of one process: {error:.1e}")

formula = [saved(w, 4, 8, round(a)) for w, a in enumerate(profile.activation_bytes)]
found = [a - b for a, b in zip(measured.trace.peak_bytes, again.trace.peak_bytes, strict=True)]
print("\nbytes saved on worker 0 to 3, in kB")
print("your formula:", [round(size / 1000) for size in formula])
print("measured:    ", [round(size / 1000) for size in found])
grade.reveal(guess_saves_most, formula.index(max(formula)), "(the worker where it saves most)")
grade.reveal(guess_saves_nothing, formula.index(min(formula)), "(the worker where it saves least)")

longer = again.trace.makespan - measured.trace.makespan
print(f"\nseconds paid: your formula {paid(4, 8, *pace):.3f}, measured {longer:.3f}", end=" ")
print(f"({longer / measured.trace.makespan:+.0%} of the batch)")
runs = {
    "nobody": (ps.simulate(mine, predict), measured.trace),
    "everybody": (ps.simulate(mine, replace(predict, recompute=True)), again.trace),
}
print("who recomputes, and the time of the run:")
lateness.tell(runs)
ps.draw.live_bytes(ps.simulate(mine, replace(predict, recompute=True)), again.trace)

# %% [markdown]
# (The seconds paid are the difference of two runs. They mean something if the machine disturbed neither; else run the cell again, and for *nobody* the one in section 3.)
#
# The last worker pays as much time as the others and saves nothing: it never had more than one cup. Also note what recomputation does not touch: the buffers. The inputs must be there, or nothing could be made again.
#
# With $t_B = 2 t_F$ the price is a third more time, $(2t_F + t_B)$ over $(t_F + t_B)$, whatever $p$ and $m$ are. You will use it where it is needed, and only there.

# %% [markdown]
# ## 7. Every byte of a worker
#
# Activations are not all. Here is the whole bill of one worker, at its worst:
#
# | kind | how many bytes |
# |---|---|
# | weights | one copy, the newest |
# | versions | copies older than the newest, if the schedule keeps any (unit 03) |
# | gradients | one number for each weight; all microbatches add to the same ones |
# | optimizer | plain SGD keeps nothing, momentum one number for each weight, Adam two |
# | activations | $A$ for each microbatch in flight |
# | buffers | the input of each microbatch in flight, one message; worker 0 reads the data instead |
#
# ### Exercise 8: the bill (4 points)
#
# (A backward also needs some working memory while it runs. Leave that out here.)
#
# PipeDream keeps a version for each microbatch in flight. The newest is one of them, and it counts under weights.


# %%
def worker_bytes(
    schedule: str,
    worker: int,
    p: int,
    m: int,
    optimizer: str,
    weights: int,
    activations: int,
    message: int,
) -> dict[str, int]:
    """The most bytes of each kind that a worker holds, without recomputation.

    schedule: "gpipe", "1f1b" (with a flush) or "pipedream" (asynchronous, with a stash).
    optimizer: "sgd", "momentum" or "adam".
    weights, activations, message: bytes of one copy of the worker's weights, of A, of one input.
    Returns a dictionary with the six kinds of the table as keys; one that is left out counts 0.
    m is at least p.

    Example: worker_bytes("1f1b", 0, 1, 4, "sgd", 400, 100, 20) is {"weights": 400, "versions": 0,
    "gradients": 400, "optimizer": 0, "activations": 100, "buffers": 0}.
    """
    ### BEGIN SOLUTION
    held = m if schedule == "gpipe" else min(m, p - worker)
    return {
        "weights": weights,
        "versions": (held - 1) * weights if schedule == "pipedream" else 0,
        "gradients": weights,
        "optimizer": {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] * weights,
        "activations": held * activations,
        "buffers": held * message if worker > 0 else 0,
    }
    ### END SOLUTION


# %%
grade.check(worker_bytes, points=4)
### BEGIN HIDDEN TESTS
grade.check(worker_bytes, points=4, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Does the bill agree with real memory? The next cell runs two batches with Adam under each schedule, and counts.

# %%
my_bill = grade.yours(worker_bytes)
adam = partial(torch.optim.Adam, lr=0.001)
kinds = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")
sizes = profile.parameter_bytes[1], profile.activation_bytes[1], profile.message_bytes[0]
schedules = {
    "gpipe": ps.gpipe(p=4, m=8, batches=2),
    "1f1b": mine.repeat(2),
    "pipedream": ps.pipedream(p=4, m=8, batches=2),
}
options = dict(loss=loss, optimizer=adam, pace=(0.01, 0.02), memory=True)
traces = {n: ps.run(s, stages, [batch] * 2, **options).trace for n, s in schedules.items()}
bills = {n: my_bill(n, 1, 4, 8, "adam", *map(round, sizes)) for n in schedules}

print("\nkB on worker 1" + "".join(f"{name:>24}" for name in schedules))
print(" " * 14 + "    bill measured   more" * 3)
rows = {  # (bill, measured) of each schedule
    kind: [(bills[n][kind], max(getattr(x, kind) for x in traces[n].memory[1])) for n in schedules]
    for kind in kinds
}
columns = zip(*rows.values(), strict=True)
rows["all"] = [tuple(map(sum, zip(*column, strict=True))) for column in columns]
for kind, row in rows.items():
    print(f"{kind:<14}", end="")
    for bill, most in row:
        more = f"{most / bill - 1:.0%}" if bill else "-"
        print(f"{bill / 1000:>8.0f}{most / 1000:>9.0f}{more:>7}", end="")
    print()
print(f"one message: {profile.message_bytes[0] / 1000:.0f} kB")

# %% [markdown]
# Weights, versions, gradients and optimizer agree. Two rows may differ, and the column *more* says by what share. The measured buffers have one message more: the gradient that has just come in lies there too, until its backward begins. The fewer messages are on the bill, the larger a share one more is. And `activations` includes whatever else lies around at that moment, such as a message that is being sent. The last row says what they make of the whole.

# %% [markdown]
# Now a model of the size that needs pipelines: 8 billion weights on 8 workers, in numbers of 4 bytes. Each microbatch is one text of 2048 words, each word 4096 numbers. We take $A$ as 30 times the input, a usual size for the blocks of a Transformer.

# %%
word = 4 * 2048 * 4096
print("GB on worker 0 and on worker 7, with Adam, m = 32")
for name in ("gpipe", "1f1b", "pipedream"):
    totals = [
        sum(my_bill(name, w, 8, 32, "adam", 4 * 10**9, 30 * word, word).values()) for w in (0, 7)
    ]
    print(f"{name:<11}{totals[0] / 1e9:>8.1f}{totals[1] / 1e9:>8.1f}")

# %% [markdown]
# ### Exercise 9: a plan that fits (3 points)
#
# Your devices have `cap` bytes each. Where 1F1B alone does not fit, recompute. But recomputing costs time, so do it on no worker that fits without.
#
# (In every case of the checks, recomputation is enough to make a worker fit.)


# %%
def recompute_plan(
    p: int, m: int, fixed: list[int], activations: int, message: int, cap: int
) -> list[bool]:
    """For each worker, whether it should recompute under 1F1B: only where it would not fit.

    fixed: bytes of weights, gradients and optimizer, one number per worker.
    activations, message: bytes of A, and of one input; worker 0 needs no buffers.
    cap: the bytes of a device. A worker that needs just as many fits.

    Example: recompute_plan(p=2, m=4, fixed=[50, 50], activations=100, message=10, cap=249) is
    [True, False]: without, the workers need 250 and 160 bytes.
    """
    ### BEGIN SOLUTION
    plan = []
    for worker in range(p):
        k = min(m, p - worker)
        buffers = k * message if worker > 0 else 0
        plan.append(fixed[worker] + k * activations + buffers > cap)
    return plan
    ### END SOLUTION


# %%
grade.check(recompute_plan, points=3)
### BEGIN HIDDEN TESTS
grade.check(recompute_plan, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Say our devices have 1 MB, and we keep 0.3 MB of it for what a backward needs while it works. Then 700 kB are left to plan with. The next cell asks your function for a plan, and runs it.
#
# **Predict.** Only some workers will recompute. Will the batch take about half of the extra time that it takes if everybody does?

# %%
guess_half = None  # "less", "half" or "more"

# %%
my_plan = grade.yours(recompute_plan)
fixed = [round(2 * size) for size in profile.parameter_bytes]  # weights and gradients
plan = my_plan(4, 8, fixed, *map(round, sizes[1:]), 700_000)
print("the plan:", plan)
some = ps.run(mine, stages, [batch], loss=loss, pace=pace, memory=True, recompute=plan)

print(f"\n{'recomputing':<16}{'seconds':>10}{'highest peak, MB':>20}")
for name, run in (("nobody", measured), ("as planned", some), ("everybody", again)):
    highest = max(run.trace.peak_bytes) / 1e6
    fits = "fits" if highest <= 1 else "does not fit"
    print(f"{name:<16}{run.trace.makespan:>10.3f}{highest:>20.2f}   {fits}")
print("you predicted:", guess_half)
runs["as planned"] = ps.simulate(mine, replace(predict, recompute=plan)), some.trace
lateness.tell(runs)

print("\nsimulated: how much of the extra time the plan pays")
for m in (4, 8, 32, 128):
    times = [
        ps.simulate(ps.one_f_one_b(p=4, m=m), ps.Cost(1, 2, recompute=again_on)).makespan
        for again_on in (False, plan, True)
    ]
    print(f"m = {m:<5}{(times[1] - times[0]) / (times[2] - times[0]):.0%}")

# %% [markdown]
# The slowest stage sets the pace (unit 02). Once *one* stage recomputes, the others wait for it in every slot, and the longer the batch, the more this counts. On equal stages the plan saves little time. It pays where stages are unequal: give those that recompute fewer layers. Unit 05 cuts a model by such numbers.

# %% [markdown]
# ## 8. Outlook: when messages take time
#
# So far messages cost nothing. Let each one be on its way for a while (its *latency*), as between two machines.
#
# **Predict.** Will GPipe and 1F1B still take the same time?

# %%
guess_slower = None  # "same", "gpipe slower" or "1f1b slower"

# %%
latency = 0.5  # try others, from 0 to 1.5
slow = ps.Cost(forward=1, backward=2, latency=latency)
eager = ps.eager_1f1b(p=4, m=8)  # a warm-up twice as long
for schedule in (ps.gpipe(p=4, m=8), mine, eager):
    trace = ps.simulate(schedule, slow)
    print(f"{schedule.name:<12}{trace.makespan:>6g} s   in flight {trace.peak_activations}")
print("you predicted:", guess_slower)
ps.draw.gantt(ps.simulate(mine, slow), ps.simulate(eager, slow))

# %% [markdown]
# **Try it** with other latencies, too. With 0 all three take the same time. With more, 1F1B is slower than GPipe. 1F1B lets in just as many cups as the round trip needs if handing on takes no time. With slow messages the next cup is not back in time, and the gaps are in every turn. A few cups more in flight fill them: *eager 1F1B* (Zhuang et al., MLSys 2023) warms up with $2(p - 1 - s)$ forwards. It pays with memory, up to $2(p - s) - 1$ in flight, still without $m$ in it.
#
# So there is no single best warm-up. There is a trade: memory for hidden messages. Unit 05 measures what your messages cost.

# %% [markdown]
# ## 9. The claims lab
#
# As before: decide first, write `"right"`, `"wrong"` or `"half"` (right in part, or only under a condition that the claim leaves out) in place of the `"?"`, run the cell, and only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > 1F1B has a smaller bubble than GPipe.

# %%
verdicts[1] = "?"

gap = 0.0
for p in range(1, 9):
    for m in range(1, 25):
        for times in (ps.Cost(1, 2), ps.Cost(2, 1), ps.Cost(1, 1)):
            one, all_first = (
                ps.simulate(build(p, m), times) for build in (ps.one_f_one_b, ps.gpipe)
            )
            gap = max(gap, abs(one.bubble_of_total - all_first.bubble_of_total))
print(f"for all p up to 8 and m up to 24, the two bubbles differ by {gap:.1e} at most")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** On equal stages with free messages both wait $(p - 1)(t_F + t_B)$. With slow messages (section 8) 1F1B even waits longer. What 1F1B makes smaller is the memory. Because of that you can *afford* more microbatches, and those make the bubble smaller. This is where the rumour comes from.
# </details>
#
# ### Claim 2
#
# > 1F1B saves about 40% of the memory and costs 5% of the throughput, against all forwards first.

# %%
verdicts[2] = "?"

print("fullest worker, 1F1B against GPipe   memory of everything   time of a batch")
for p, m in ((4, 4), (4, 8), (4, 32), (8, 8), (8, 64)):
    sizes = {
        name: [getattr(profile, name)[1]] * p  # p stages like stage 1
        for name in ("parameter_bytes", "gradient_bytes", "activation_bytes", "message_bytes")
    }
    equal = ps.Cost(forward=1, backward=2, **sizes)
    one, all_first = (ps.simulate(build(p, m), equal) for build in (ps.one_f_one_b, ps.gpipe))
    memory = max(one.peak_bytes) / max(all_first.peak_bytes) - 1
    time = one.makespan / all_first.makespan - 1
    print(f"p = {p}, m = {m:<27}{memory:>17.0%}{time:>18.0%}")
print("\nWhich of the two numbers is always the same?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** It does save memory. But how much depends on $p$, on $m$ and on what else is in memory: next to nothing where $m = p$, most of it where $m$ is large. And with free messages the schedule costs no throughput at all.
# </details>
#
# ### Claim 3
#
# > For $p = 4$ and $m = 8$, a synchronous pipeline holds $m \cdot p = 32$ activations, 1F1B holds $p = 4$. That is down to 12%.

# %%
verdicts[3] = "?"

for name, trace in (("GPipe", gpipe_measured.trace), ("1F1B", measured.trace)):
    peaks = [round(peak) for peak in trace.peak_activations]
    print(f"{name:<6} measured on each worker: {peaks}   all together: {sum(peaks)}")
print("\nWhere do the 32 and the 4 come from? Are they the same kind of number?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** 32 is the sum over all workers, 4 is one worker alone. Worker against worker it is 8 against at most 4; all together 32 against $p(p+1)/2 = 10$. Also, 1F1B with a flush *is* a synchronous pipeline.
# </details>
#
# ### Claim 4
#
# > Under 1F1B, more microbatches of the same size do not need more memory, once there are at least $p$.

# %%
verdicts[4] = "?"

for m in (2, 4, 8, 16, 64):
    peaks = ps.simulate(ps.one_f_one_b(p=4, m=m), predict).peak_bytes
    print(f"m = {m:<4} peaks in MB: {', '.join(f'{peak / 1e6:.2f}' for peak in peaks)}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right.** At most $p - s$ are in flight on worker $s$, however many follow. (Between $m = 4$ and 8 a little is added: with more than $p$ microbatches, worker 0 has gradients *and* a full counter at the same time.) GPipe's memory grows with every microbatch.
# </details>
#
# ### Claim 5
#
# > Recomputation makes training a third slower.

# %%
verdicts[5] = "?"

for forward, backward in ((1, 2), (1, 1), (1, 3)):
    before = ps.simulate(mine, ps.Cost(forward, backward)).makespan
    after = ps.simulate(mine, ps.Cost(forward, backward, recompute=True)).makespan
    print(f"forward {forward}, backward {backward}: {after / before - 1:+.0%}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** It is $t_F / (t_F + t_B)$ more, which is a third if a backward takes twice as long as a forward. That is the usual case for large matrix products, and no law. And it holds if everything is made again. Keeping a few cheap but large things can cost far less.
# </details>
#
# ### Claim 6
#
# > 1F1B needs several versions of the weights.

# %%
verdicts[6] = "?"

for name, trace in (("with a flush", with_flush), ("PipeDream's", without)):
    print(f"1F1B {name:<13} versions on worker 0 to 3: {trace.weight_versions}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** PipeDream's does, the one with a flush does not: nothing is in flight when its weights change. Always ask which 1F1B is meant.
# </details>
#
# ### Claim 7
#
# > If all stages are equal, all workers of a 1F1B pipeline need the same memory.

# %%
verdicts[7] = "?"

print("measured peaks, MB:", [round(peak / 1e6, 2) for peak in measured.trace.peak_bytes])
print("in flight at most: ", measured.trace.peak_activations)

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** Worker 0 holds $p$ microbatches, the last one a single one. A cluster of equal devices is full on one side and half empty on the other. Unit 07 has a placement that evens this out.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit04.CLAIMS)

# %% [markdown]
# ## Summary
#
# - GPipe keeps the activations of all $m$ microbatches on every worker. 1F1B takes a microbatch back as soon as it comes, and keeps at most $\min(m, p - s)$ on worker $s$.
# - The warm-up is $p - 1 - s$ forwards: one for each worker further down. Then turns, then the drain.
# - Time and bubble are GPipe's, as long as messages are fast. The gradient is that of one process.
# - 1F1B with a flush is synchronous: one copy of the weights, nothing late. PipeDream's 1F1B is not.
# - A deadlock is a circle of workers that wait for each other. Send at once, receive only what is needed next, and keep the order of each link.
# - Recomputation keeps inputs only. It saves $(k - 1)\,A$ where $k$ are in flight, and costs $t_F$ in every slot.
# - A worker's bill: weights, versions, gradients, optimizer, activations, buffers. Predict it before you buy.
#
# ## Check yourself
#
# 1. Eight workers, 1F1B, $m = 64$. How long is the warm-up of worker 2, and how many microbatches does it hold at most?
# 2. A colleague's 1F1B run hangs in its first batch, on two machines that each wait in a receive. What would you look at first?
# 3. The last worker of your 1F1B pipeline runs out of memory. Will recomputation on it help?
#
# <details>
# <summary>Answers</summary>
#
# 1. 8 − 1 − 2 = 5 forwards; it holds at most 6.
# 2. The order of sends and receives in the two rows. One of the two must send something before the receive at which it now waits. Check it with `ps.check`, which names the circle.
# 3. No. It has one microbatch in flight, and its backward needs those activations anyway. Give it fewer layers, or make microbatches smaller.
# </details>
#
# Next comes [unit 05](../05_engineering/engineering.ipynb): why is my real pipeline slower than the drawing?
