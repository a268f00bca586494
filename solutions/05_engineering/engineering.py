# %% [markdown]
# # Engineering
#
# Why is my real pipeline slower than the drawing?
#
# **After this unit you can**
#
# - name the parts of the gap between a drawing and a run: imbalance, messages, and the rest,
# - work out what a message costs, and whether anybody waits for it,
# - profile the layers of a model, cut it where its slowest stage is fastest, and put several workers on a slow stage,
# - find a good number of microbatches in a few runs,
# - find three faults that make training in a pipeline wrong or unstable, and cure them.
#
# **It takes** two sittings of about 60 minutes, with a place to stop after section 4. **You need** [unit 04](../04_one_forward_one_backward/one_forward_one_backward.ipynb): 1F1B. For section 7 also [unit 03](../03_weight_versions/weight_versions.ipynb): gradients that come late.
#
# Ten exercises earn points. As before, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
import math
import os
import time
from collections.abc import Callable
from itertools import pairwise

import pipeschool as ps
import torch
from pipeschool import course_data, grade, lateness
from pipeschool.runtime import reference
from torch import nn

torch.set_num_threads(1)
(inputs, targets), _ = course_data.digits()  # 1437 handwritten digits, 64 pixels each
batch = (inputs[:1024], targets[:1024])
loss = nn.functional.cross_entropy

torch.manual_seed(0)
widths = [64, 384, 384, 384, 384, 256, 128, 128, 64, 64, 32]  # wide in front, narrow behind
layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
layers.append(nn.Linear(32, 10))
stages = ps.partition.split_layers(layers, 4)

print(f"{len(layers)} layers in {len(stages)} stages: {[len(stage) for stage in stages]}")

# %% [markdown]
# ## 1. The gap
#
# The shop has a floor plan on the wall. On it all stations are equally fast, and a cup is at the next station the moment it leaves the last one. By the plan, eight cups take so and so long. On the first real day it takes longer, and everybody blames somebody else.
#
# Let us do what the shop should do: take the gap apart. Here are four stages. The first is slower than the others. Handing on takes a while as well: a message is on its way for 20 ms, its *latency*.
#
# The floor plan knows none of this. It spreads the work evenly:

# %%
latency = 0.02  # seconds
forward, backward = [0.03, 0.02, 0.02, 0.02], [0.06, 0.04, 0.04, 0.04]  # seconds, per stage
schedule = ps.one_f_one_b(p=4, m=8)

drawing = ps.simulate(schedule, ps.Cost(sum(forward) / 4, sum(backward) / 4))
print(f"by the drawing: {1000 * drawing.makespan:.0f} ms")

# %% [markdown]
# **Predict.** What will four real processes need, in ms? (The first run of a notebook takes some seconds to start.)

# %%
guess_real = None  # ms, a number

# %%
uneven = ps.simulate(schedule, ps.Cost(forward, backward))
with_messages = ps.simulate(schedule, ps.Cost(forward, backward, latency=latency))
measured = ps.run(schedule, stages, [batch], loss=loss, pace=(forward, backward), latency=latency)

grade.reveal(guess_real, round(1000 * measured.trace.makespan), "ms, measured, paced")
ps.draw.compare(drawing, measured.trace)

# %% [markdown]
# At the top the drawing, below it four real processes. They do the real work and wait until the declared time is over, counted from when their input was there. Every message is really held back for 20 ms. So the run is *measured*, and *paced*: what was declared lasts at least so long, what was not takes what it takes, and every time is from a clock. (It does not show how four stages at full speed share your cores; section 4 does.)
#
# Each line of the next table lets one more thing into the prediction. What it adds is that thing's share of the gap. Then `ps.why_late` holds the run against the best of these predictions, and takes apart what nobody declared. It goes back along the actions that made the run as long as it was.

# %%
steps = [
    ("the drawing: equal stages, free messages", drawing.makespan),
    ("+ imbalance: stage 0 is slower", uneven.makespan),
    ("+ transfer: messages take time", with_messages.makespan),
    ("+ all that nobody declared (measured)", measured.trace.makespan),
]
before = 0.0
for name, seconds in steps:
    print(f"{name:<42}{1000 * seconds:>8.1f} ms", end="")
    print(f"{1000 * (seconds - before):>+8.1f} ms" if before else "")
    before = seconds

why = ps.why_late(with_messages, measured.trace)
for name, seconds in (
    ("    actions: longer than their pace", why.work),
    ("    messages: longer than their latency", why.delivery),
    ("    between two actions of a worker", why.between),
    ("    of these: the machine was busy", why.machine),
):
    print(f"{name:<53}{1000 * seconds:>+8.1f} ms")
print(f"in one line: {why}")
start_up = "start-up, before the first action"
print(f"{start_up:<42}{1000 * measured.start_seconds:>8.1f} ms, paid once, not in the lines above")

# %% [markdown]
# Now the gap has names:
#
# - **Imbalance**: the slowest stage sets the pace (unit 02). Sections 3 to 5 fight it.
# - **Transfer**: somebody waits for a message. Section 2.
# - **Start-up**: processes begin, torch loads, workers find each other. Paid once. It hurts only in short runs; never put it into a time per batch.
# - **The rest**: a worker that is woken a little late, so that its *actions* take longer than their pace. *Messages*, which need some time even where no latency is declared: they are copied, and the receiver wakes up. Python *between two actions*. And sometimes a *machine that was busy* with something else; if that is most of it, run these cells again before you believe the table.
#
# **Try it.** Set `latency = 0`, or make the four stages equal, and run these cells again. Which line of the table changes?
#
# ## 2. What a message costs
#
# A boy with a tray walks from one station to the next. How long he is on his way is the latency. How many cups he can bring per minute is the *bandwidth*. A longer way does not mean fewer cups per minute.
#
# A message with $S$ bytes takes
#
# $$\text{latency} + \frac{S}{\text{bandwidth}}$$
#
# seconds, with the latency in seconds and the bandwidth in bytes per second. And $S$ is the samples in a microbatch, times the numbers that the stage hands on for one sample, times the bytes of a number (4 in float32, 2 in bfloat16). The gradient that comes back is just as large.
#
# ### Exercise 1: one message (2 points)


# %%
def message_seconds(
    samples: int, m: int, numbers: int, number_bytes: int, latency: float, bandwidth: float
) -> float:
    """Seconds until the largest message across one boundary has arrived.

    samples: in the batch. m: microbatches, cut as evenly as it goes. numbers: that the stage hands
    on for each sample. number_bytes: bytes of one of them.
    latency: seconds. bandwidth: bytes per second.

    Example: message_seconds(samples=6, m=3, numbers=5, number_bytes=4, latency=1, bandwidth=20)
    is 3.0: two samples are 40 bytes, which take 2 seconds, and 1 second of latency.
    """
    ### BEGIN SOLUTION
    largest = math.ceil(samples / m)
    return latency + largest * numbers * number_bytes / bandwidth
    ### END SOLUTION


# %%
grade.check(message_seconds, points=2)
### BEGIN HIDDEN TESTS
grade.check(message_seconds, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Stage 0 hands on 384 numbers for each digit. Say the link brings 10 million bytes per second, a slow wireless network, with 5 ms of latency.

# %%
my_message = grade.yours(message_seconds)
print("\n  m   ms for one message   ms for all messages of a batch, one way")
for m in (2, 4, 8, 16, 32):
    one = 1000 * my_message(1024, m, 384, 4, 0.005, 10e6)
    print(f"{m:>3}{one:>12.1f}{m * one:>24.1f}")

# %% [markdown]
# The bytes of a batch are the same for any $m$. The latencies are not: each microbatch pays its own. This is one reason not to cut too finely. But what does a message cost *the pipeline*? That depends on whether somebody waits.
#
# **Predict.** GPipe, four workers, eight microbatches, and each message takes one second. A batch has $2 \cdot 3 \cdot 8 = 48$ messages. By how many seconds do they lengthen it, if they travel while the workers compute?

# %%
guess_longer = None  # seconds

# %% [markdown]
# ### Exercise 2: who waits? (4 points)
#
# There are two ways to send.
#
# - **Overlapped**: the worker gives the tray to the boy, and goes on at once. Now the link is one more station: it takes one message after the other. If it is faster than the workers, only the first cup waits for it on each of the $p - 1$ boundaries, and so does the last one on its way back.
# - **Not overlapped**: the worker walks. While it carries, it does not compute. The receiver may begin when the tray is there.
#
# Write the time of a GPipe batch for both. Draw it for $p = 2$, $m = 3$ on paper first. The third part of the checks has a link that is *slower* than the workers: then who sets the pace?


# %%
def gpipe_seconds(
    p: int, m: int, forward: float, backward: float, message: float, overlapped: bool
) -> float:
    """Seconds of one GPipe batch whose messages each occupy their link for `message` seconds.

    p, m: workers and microbatches. forward, backward: seconds for one microbatch, on every worker.
    overlapped: True where a worker goes on while its message is under way, False where it is
    busy with it. With p = 1 there are no messages.

    Example: gpipe_seconds(p=2, m=2, forward=1, backward=2, message=1, overlapped=True) is 11, and
    with overlapped=False it is 13.
    """
    ### BEGIN SOLUTION
    if p == 1:
        return m * (forward + backward)
    if not overlapped:
        return (m + p - 1) * (forward + backward) + 2 * (m + p - 2) * message
    one = p * (forward + backward) + 2 * (p - 1) * message  # the way of one microbatch
    return one + (m - 1) * (max(forward, message) + max(backward, message))
    ### END SOLUTION


# %%
grade.check(gpipe_seconds, points=4)
### BEGIN HIDDEN TESTS
grade.check(gpipe_seconds, points=4, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_seconds = grade.yours(gpipe_seconds)
longer = my_seconds(4, 8, 1, 2, 1, True) - my_seconds(4, 8, 1, 2, 0, True)
grade.reveal(guess_longer, longer, "seconds, overlapped")

print("\npredicted seconds of a batch, forward 1, backward 2, p = 4")
print("  m   no messages   overlapped   not overlapped   overlapped, link of 4 seconds")
for m in (4, 8, 32, 128):
    row = [my_seconds(4, m, 1, 2, *rest) for rest in ((0, True), (1, True), (1, False), (4, True))]
    print(f"{m:>3}{row[0]:>14g}{row[1]:>13g}{row[2]:>17g}{row[3]:>32g}")

# %% [markdown]
# Overlapped, all but the messages at the ends are hidden, however many there are. Without overlap, every worker pays for each of its own. And where the link is the slowest station, no overlap helps: send fewer bytes. Cut the model where it is narrow, or use bfloat16.
#
# So how does a worker overlap a *receive*? It need not be there when the message comes. Between the processes of one machine, `ps.run` lets the operating system keep small messages, and puts large ones into memory that both can see. When the worker comes to its receive, the message mostly lies there. PyTorch programs get the same with `irecv` long before `wait`.
#
# ### When 1F1B waits
#
# GPipe hides messages well. 1F1B does not: unit 04 showed that its next cup is not back in time. **Predict.** Latency 20 ms, four equal stages, 60 ms for each microbatch. Which is fastest: GPipe, 1F1B, or *eager 1F1B*, which lets up to twice as many cups in?

# %%
guess_fastest = None  # "gpipe", "one_f_one_b" or "eager_1f1b"

# %%
traces, lines, far = {}, {}, 0.02  # seconds of latency
print("you predicted:", guess_fastest)
for build in (ps.gpipe, ps.one_f_one_b, ps.eager_1f1b):
    line = build(p=4, m=8)
    predicted = ps.simulate(line, ps.Cost(0.02, 0.04, latency=far))
    run = ps.run(line, stages, [batch], loss=loss, pace=(0.02, 0.04), latency=far)
    traces[line.name] = run.trace
    lines[line.name] = predicted, run.trace
    print(f"{line.name:<12} predicted {1000 * predicted.makespan:.0f} ms", end=", ")
    print(
        f"measured, paced {1000 * run.trace.makespan:.0f} ms, in flight {predicted.peak_activations}"
    )
lateness.tell(lines)
ps.draw.gantt(traces["one_f_one_b"], traces["eager_1f1b"])

# %% [markdown]
# In the upper chart there are gaps in every turn: a worker waits for a gradient that is still on its way. In the lower one a few cups more are in flight, and they fill the gaps. Eager 1F1B is about as fast as GPipe, and its memory does not grow with $m$.
#
# ### Two kinds of messages
#
# All these went from one worker to *one* other: **point to point**. In a **collective** such as an all-reduce, all workers of a group put something in and get the sum out, so all wait for the last one. Data parallel training does this with all gradients: in a ring each of $r$ workers sends $2\,(r - 1)/r$ times the bytes of the weights, once per batch (unit 06 shows why). How do the two compare?

# %%
ends = (2, 5, 8)  # the last layers of stages 0, 1 and 2
activations = sum(4 * 1024 * widths[end + 1] for end in ends)
weights = sum(4 * p.numel() for layer in layers for p in layer.parameters())
print(f"pipeline of 4:      {2 * activations / 3 / 1e6:.2f} MB per batch, on an average boundary")
print(f"data parallel on 4: {2 * 3 / 4 * weights / 1e6:.2f} MB per batch, from each worker")

# %% [markdown]
# The first number grows with the batch, the second with the model. So a large model on slow links speaks for a pipeline, a small model with large batches for data parallelism. Unit 06 decides with such numbers.
#
# ## 3. Which layer takes how long?
#
# Now to imbalance. The shop gets a stop-watch. `ps.partition.profile_layers` sends microbatches through every layer, in this notebook's process, and notes seconds and bytes.
#
# **Predict.** Layer 2 multiplies by a matrix of 384 times 384 numbers, layer 8 by one of 64 times 64. How many times slower is layer 2?

# %%
guess_times_slower = None

# %%
profile = ps.partition.profile_layers(layers, batch, m=8, loss=loss, rounds=20)
print("layer  numbers handed on   forward ms   spread   backward ms   spread")
for number, layer in enumerate(profile.layers):
    width = [*widths[1:], 10][number]
    times = (layer.forward, layer.forward_spread, layer.backward, layer.backward_spread)
    a, b, c, d = (1000 * seconds for seconds in times)
    print(f"{number:>5}{width:>19}{a:>13.3f}{b:>9.3f}{c:>14.3f}{d:>9.3f}")
seconds = [layer.seconds for layer in profile.layers]
print(f"the first microbatch of all, there and back: {1000 * profile.warm_up:.2f} ms", end=", ")
print(f"a later one: {1000 * sum(seconds):.2f} ms")
print(f"multiplications of layer 2 over those of layer 8: {384**2 / 64**2:g}")
grade.reveal(guess_times_slower, round(seconds[2] / seconds[8], 1), "times slower")

# %% [markdown]
# How to read a profile:
#
# - The **first round** is slower, often many times: memory is asked for, code is loaded. It is left out.
# - The **spread** is the distance from the first to the third quartile, the middle half of all times. Where it is as large as the time itself, the number is no good: something else was running. Measure again.
# - Very **short layers** look longer than they are: some tens of microseconds of Python belong to each, and small matrices use a device badly. So counting multiplications is no replacement for measuring.
#
# Run the cell a second time. Which numbers stay, and which jump?
#
# ### Exercise 3: one number out of many (1 point)
#
# Sometimes a measurement takes ten times as long, because another program was at work. A mean believes it. A *median*, the number in the middle of the sorted ones, does not.


# %%
def typical_seconds(times: list[float]) -> float:
    """The median of all times but the first, which is the warm-up.

    times: seconds of the same work, in the order in which it was done; two or more.
    With an even number of them, the mean of the two in the middle.

    Example: typical_seconds([50.0, 4.0, 6.0, 5.0]) is 5.0.
    """
    ### BEGIN SOLUTION
    known = sorted(times[1:])
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
    ### END SOLUTION


# %%
grade.check(typical_seconds, points=1)
### BEGIN HIDDEN TESTS
grade.check(typical_seconds, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
typical = grade.yours(typical_seconds)
times = []
x = torch.randn(128, 400)
fresh = nn.Linear(400, 400)
for _ in range(21):
    begin = time.perf_counter()
    fresh(x).sum().backward()
    times.append(1000 * (time.perf_counter() - begin))
print("\nms:", " ".join(f"{t:.2f}" for t in times))
print(f"mean of all {sum(times) / len(times):.2f} ms, typical {typical(times):.2f} ms")

# %% [markdown]
# ## 4. Cut it well
#
# Equal numbers of layers are not equal times. A *cut* is the number of the first layer behind it: cuts `[3, 6]` make stages of layers 0 to 2, 3 to 5, and 6 to the end.
#
# The slowest stage sets the pace. So of all ways to cut, we want the one whose slowest stage is fastest.
#
# ### Exercise 4: the partitioner (5 points)
#
# To try all ways is hopeless: 52 layers on 8 workers have 115 million of them. But they share their parts. Suppose that the first stage ends before layer `cut`. Then the rest is the same question again: cut the layers from `cut` on into $p - 1$ stages. Call its answer $T(\text{cut}, p - 1)$, the time of the slowest stage there. So
#
# $$T(i, q) = \min_{\text{cut} > i} \; \max\Big(\sum_{k=i}^{\text{cut}-1} t_k, \;\; T(\text{cut}, q - 1)\Big), \qquad T(i, 1) = \sum_{k=i}^{n-1} t_k$$
#
# where $t_k$ are the seconds of layer $k$, $n$ is the number of layers, $i$ the first layer that is left, and $q$ the stages that are left. This is a *dynamic programme*: work out each $T(i, q)$ once, and keep it. Also keep the cuts that gave it.
#
# How far may `cut` go? Behind it there must be a layer for each of the $q - 1$ stages that are left.


# %%
def best_cuts(times: list[float], p: int) -> list[int]:
    """The p - 1 cuts whose slowest stage is as fast as can be; every stage has a layer or more.

    times: seconds of each layer. p: stages, at most as many as there are layers.
    A cut is the number of the first layer behind it, so cuts rise. Of equally good ones, any will do.

    Example: best_cuts(times=[5.0, 1.0, 1.0, 1.0, 3.0], p=3) is [1, 4].
    """
    ### BEGIN SOLUTION
    n = len(times)
    before = [0.0]  # before[i]: seconds of all layers in front of layer i
    for t in times:
        before.append(before[-1] + t)
    best = [(before[n] - before[i], []) for i in range(n)]  # for one stage, from layer i on
    for q in range(2, p + 1):
        best = [
            min(
                (max(before[cut] - before[i], best[cut][0]), [cut, *best[cut][1]])
                for cut in range(i + 1, n - q + 2)
            )
            for i in range(n - q + 1)
        ]
    return best[0][1]
    ### END SOLUTION


# %%
grade.check(best_cuts, points=5)
### BEGIN HIDDEN TESTS
grade.check(best_cuts, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Now your cuts for the real profile, beside those of the library: `equal` numbers of layers, and `balanced`, which does what yours does and also knows links and memory. `pipedream` may put several workers on one stage.

# %%
cuts_of = grade.yours(best_cuts)
plans = {
    "equal": ps.partition.equal(profile, 4),
    "yours": ps.partition.cut_at(profile, cuts_of(seconds, 4)),
    "balanced": ps.partition.balanced(profile, 4),
    "pipedream": ps.partition.pipedream_plan(profile, 4),
}
print(f"\n{'plan':<11}{'cuts':<12}{'workers':<14}{'slowest, ms per microbatch':>27}")
for name, plan in plans.items():
    cuts, workers = (" ".join(map(str, items)) for items in (plan.cuts, plan.replicas))
    print(f"{name:<11}{cuts:<12}{workers:<14}{1000 * plan.bottleneck:>27.3f}")

# %% [markdown]
# (A plan of `pipedream` without any cut is plain data parallelism: all layers, on four workers that take turns. Here links count as free, and then it wins. Unit 06 puts the link into the choice.)
#
# **Predict.** How many times as fast as the equal cut will your cut be, on real workers, for a batch of 8 microbatches? (Your number is a bit less than the slowest stages say. Why?)

# %%
guess_factor = None

# %%
slow_motion = 0.12 / plans["equal"].bottleneck  # so that four workers fit on few cores
results, predictions = {}, {}
for name in ("equal", "yours"):
    plan = plans[name]
    cost = plan.cost()
    pace = tuple([slow_motion * t for t in times] for times in (cost.forward, cost.backward))
    predictions[name] = ps.simulate(plan.schedule(m=8), ps.Cost(*pace))
    results[name] = ps.run(
        plan.schedule(m=8), plan.stages(layers), [batch], loss=loss, pace=pace
    ).trace

factor = results["equal"].makespan / results["yours"].makespan
foretold = predictions["equal"].makespan / predictions["yours"].makespan
grade.reveal(guess_factor, round(factor, 2), "times as fast, measured, paced")
print(f"Predicted: {foretold:.2f} times.")
lateness.tell({name: (predictions[name], trace) for name, trace in results.items()})
ps.draw.gantt(results["equal"], results["yours"])

# %% [markdown]
# Above is the equal cut, below yours: look for the worker that never waits. The profile predicted the factor before anything ran in a pipeline. It is less than the ratio of the slowest stages, because filling and draining takes a microbatch's whole way, and that is equally long for any cut. (If a line above says *run it again*, the measured factor is not worth much: run the cell again.)
#
# Slow motion, because four workers at full speed would share your cores. Here is your cut in two at full speed, with four times as many digits. Nothing is declared: the prediction is what `ps.profile` has measured, one stage at a time.

# %%
halves = ps.partition.cut_at(profile, cuts_of(seconds, 2)).stages(layers)
more = (inputs.repeat(4, 1), targets.repeat(4))
two = ps.one_f_one_b(p=2, m=8)
alone = ps.profile(halves, more, m=8, loss=loss)
full_speed = ps.run(two, halves, [more], loss=loss)
print(f"2 workers on a machine with {os.cpu_count()} cores")
ps.draw.compare(ps.simulate(two, alone), full_speed.trace)

# %% [markdown]
# Two workers that compute at once share the machine's memory, so their *actions* take longer than a profile says that times each alone. With fewer free cores than workers they share cores as well, and the line says so. So take a profile for what it is: right about which stage is slower, and too kind to all of them.
#
# ### Workers that are not equal
#
# A slow worker should get fewer layers. Give `balanced` the speeds. **Try it**: put the slow worker in another place.

# %%
speed = [1, 1, 0.5, 1]  # worker 2 is half as fast
for name, plan in (
    ("cut for equal workers", ps.partition.cut_at(profile, plans["balanced"].cuts, speed=speed)),
    ("cut for these workers", ps.partition.balanced(profile, 4, speed=speed)),
):
    trace = ps.simulate(plan.schedule(m=8), plan.cost())
    print(f"{name}: layers {[len(r) for r in plan.ranges]}", end=", ")
    print(
        f"slowest {1000 * plan.bottleneck:.2f} ms, a batch {1000 * trace.makespan:.1f} ms (predicted)"
    )

# %% [markdown]
# ### One weight in two places
#
# Many language models use *one* table of words twice: to read words (the embedding) and to write them (the output head). The two are *tied*. One is the first layer and the other the last. Where should they go?
#
# **Predict.** A planner that must keep them on one stage: what will it say for four workers?

# %%
guess_tied = None  # "first stage", "last stage" or "no plan"

# %%
torch.manual_seed(0)
tied = [nn.Linear(64, 64, bias=False) for _ in range(4)]
tied[3].weight = tied[0].weight  # one parameter, two layers
small = (inputs[:256], targets[:256])
tied_profile = ps.partition.profile_layers(tied, small, m=4, loss=loss)
print("you predicted:", guess_tied)
try:
    ps.partition.balanced(tied_profile, 4)
except ValueError as refusal:
    print("the planner:", refusal)

apart = ps.partition.balanced(tied_profile, 4, keep_together=())  # we know what we do
tied_run = ps.run(apart.schedule(m=4), apart.stages(tied), [small], loss=loss)
alone = reference.gradients([nn.Sequential(*tied)], [small], m=4, loss=loss)[0]["0.weight"]
for worker in (0, 3):
    (found,) = tied_run.gradients[worker].values()
    print(f"worker {worker}: off from one process by {(found - alone).abs().max():.0e}")

# %% [markdown]
# On a line, first and last stage are different workers, so nothing fits. There are three cures:
#
# 1. Keep a copy on each, and **add up both gradients before every update**, with an all-reduce between first and last worker. The run above did so: both workers hold the gradient of one process. It only works with a flush, when the two are at the same update.
# 2. A placement that puts both ends on *one* worker: the V of unit 07.
# 3. Untie them: two tables of their own. More weights, no message.
#
# Forget it, and the two copies drift apart, without any error message.
#
# *This is a good place to stop for today. The second half needs nothing of what you computed but the first cell: run that when you come back.*

# %% [markdown]
# ## 5. Two people at the slow station
#
# What if one layer is so slow that no cut helps? In the shop: put a second person there. They take turns, one cup for you, one for me.
#
# A stage that takes $t$ seconds for a microbatch is done with one every $t / r$ seconds if $r$ workers take turns. Each single cup is as slow as ever. It is the line that moves faster.
#
# Workers are numbered along the line: those of stage 0 first, then those of stage 1, and so on. Microbatch 0 goes to the first worker of each stage, microbatch 1 to the second, and behind the last one it is the first one's turn again (*round robin*).
#
# **Predict.** Three stages on 1, 2 and 1 workers. Which worker does stage 1 of microbatch 5? And which does stage 2 of it?

# %%
guess_stage_1 = None
guess_stage_2 = None

# %% [markdown]
# ### Exercise 5: whose turn is it? (2 points)


# %%
def worker_of(replicas: list[int], stage: int, microbatch: int) -> int:
    """The worker that does this microbatch at this stage.

    replicas: the number of workers of each stage. Workers, stages, microbatches count from 0.

    Example: worker_of(replicas=[3, 2], stage=1, microbatch=4) is 3.
    """
    ### BEGIN SOLUTION
    return sum(replicas[:stage]) + microbatch % replicas[stage]
    ### END SOLUTION


# %%
grade.check(worker_of, points=2)
### BEGIN HIDDEN TESTS
grade.check(worker_of, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
turn = grade.yours(worker_of)
grade.reveal(guess_stage_1, turn([1, 2, 1], 1, 5), "is the worker of stage 1")
grade.reveal(guess_stage_2, turn([1, 2, 1], 2, 5), "is the worker of stage 2")
for stage in range(3):
    print(
        f"stage {stage}: microbatches 0 to 7 on worker",
        [turn([1, 2, 1], stage, k) for k in range(8)],
    )

# %% [markdown]
# Both workers of stage 1 have the same weights. Each has seen half of the cups only. If each used its own gradient, they would train two different models. So **they share every update**: the gradients of both are added up first, and both do the same step. That is data parallelism, inside one stage.
#
# ### Exercise 6: who gets help? (3 points)
#
# You have more workers than stages. Where do they help most? Think of handing them out one at a time.


# %%
def spread_workers(seconds: list[float], workers: int) -> list[int]:
    """How many workers to put on each stage, so that the line is as fast as it can be.

    seconds: of each stage, for one microbatch on one worker. workers: to spread, all of them; at
    least as many as stages. Every stage needs one. Where several ways are equally fast, any will do.

    Example: spread_workers(seconds=[1.0, 5.0], workers=3) is [1, 2].
    """
    ### BEGIN SOLUTION
    replicas = [1] * len(seconds)
    while sum(replicas) < workers:
        pace = [t / r for t, r in zip(seconds, replicas, strict=True)]
        replicas[pace.index(max(pace))] += 1
    return replicas
    ### END SOLUTION


# %%
grade.check(spread_workers, points=3)
### BEGIN HIDDEN TESTS
grade.check(spread_workers, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** Three stages of 60, 120 and 60 ms. With a fourth worker in the right place, how many times as fast is a batch of 8 microbatches? How fast, if there are very many microbatches?

# %%
guess_fourth_worker = None

# %%
three = ps.partition.split_layers(layers, 3)
pace = ([0.02, 0.04, 0.02], [0.04, 0.08, 0.04])
spread = grade.yours(spread_workers)
replicas = spread([0.06, 0.12, 0.06], 4)
lines = {"3 workers": ps.one_f_one_b(p=3, m=8)}
lines["4 workers"] = ps.round_robin(replicas, m=8, weights="flush")
runs = {name: ps.run(line, three, [batch], loss=loss, pace=pace) for name, line in lines.items()}
one_process = reference.gradients(three, [batch], m=8, loss=loss)
error = reference.max_error(runs["4 workers"].gradients, one_process)
print(f"workers of each stage: {replicas}")
print(f"largest difference from the gradients of one process: {error:.1e}")

factor = runs["3 workers"].trace.makespan / runs["4 workers"].trace.makespan
grade.reveal(guess_fourth_worker, round(factor, 2), "times as fast, measured, paced")
lateness.tell(
    {name: (ps.simulate(lines[name], ps.Cost(*pace)), run.trace) for name, run in runs.items()}
)
for m in (8, 32, 128):
    times = [
        ps.simulate(line, ps.Cost(*pace)).makespan
        for line in (ps.one_f_one_b(3, m), ps.round_robin(replicas, m, weights="flush"))
    ]
    print(f"m = {m:<4} predicted: {times[0] / times[1]:.2f} times")
ps.draw.gantt(*(run.trace for run in runs.values()))

# %% [markdown]
# The long black boxes in the lower chart are updates: the two workers of the slow stage add up their gradients, and the first one waits for the other.
#
# A third more workers, and in the long run nearly twice the pace: help where everybody waits is worth more than its share.
#
# **Try it.** Give the fourth worker to stage 0 instead: `replicas = [2, 1, 1]`. What do you get for it?
#
# ## 6. How many microbatches?
#
# So far we said: more microbatches, smaller bubble. The real world adds: *each microbatch costs something, however small it is*. A station must be wiped after each tray, whether there were ten cups on it or one.
#
# Say a microbatch of $n$ samples takes $a + b\,n$ seconds on each worker, there and back. $a$ is the price of a microbatch, $b$ that of a sample. A batch of $N$ samples in $m$ microbatches on $p$ workers takes
#
# $$(m + p - 1)\Big(a + b\,\frac{N}{m}\Big)$$
#
# seconds. Few microbatches: a large bubble. Many: $a$ is paid too often.
#
# **Try it with sliders.** A fixed batch with $b$ alone: set $m = 16$ with forward 0.5 and backward 1, then $m = 8$ with 1 and 2, then $m = 4$ with 2 and 4. It is the same work each time. Watch the makespan.

# %%
ps.widgets.explore(("one_f_one_b",), m=16, forward=0.5, backward=1)

# %% [markdown]
# **Predict.** $p = 4$, $N = 64$, and $a = b$. Which $m$ from 1 to 64 is best? And how much slower is $m = 64$?

# %%
guess_best_m = None
guess_slower_64 = None  # times as slow

# %%
curve = {m: 64 / ((m + 3) * (1 + 64 / m)) for m in range(1, 65)}  # samples per second, a = b = 1
top = max(curve, key=curve.get)
grade.reveal(guess_best_m, top, "microbatches")
grade.reveal(guess_slower_64, round(curve[top] / curve[64], 2), "times as slow with 64")
for m in (1, 2, 4, 8, top, 16, 24, 32, 64):
    print(
        f"m = {m:>2} {'#' * round(40 * curve[m] / curve[top])} {curve[m] / curve[top]:.0%} of the best"
    )

# %% [markdown]
# The hill is flat on top: a little beside the best costs next to nothing. So a search need not be exact, and a real measurement is noisy anyway. But each *probe* is a real run, perhaps minutes on an expensive cluster. We want few of them.
#
# A fair place to start is $m = 4p$: there the bubble is at most 20% of the total. Then double for as long as it pays, or halve. Once you have three values of which the middle one is best, the top is between the outer two. Then *bisect*: halve what is left, again and again.
#
# ### Exercise 7: tune m (4 points)
#
# Throughput rises up to its best $m$, and falls after it. On which side of the top is some $m$? Compare it with $m + 1$.


# %%
def best_m(measure: Callable[[int], float], start: int, most: int, budget: int) -> int:
    """An m from 1 to `most` whose throughput is within 0.5% of the best, in at most `budget` probes.

    measure: measure(m) is the throughput with m microbatches, samples per second; a probe. It rises
        up to the best m and falls after it. Asking for the same m again costs no further probe.
    start: where to begin, 4p; it may be larger than `most`.
    budget: 3 log2(most) + 3, rounded up. To try every m takes too many.

    Example: best_m(measure=lambda m: 50 - abs(m - 20), start=8, most=64, budget=21) is 20.
    """
    ### BEGIN SOLUTION
    low, high = 1, most
    m = min(start, most)
    while high - low > 2 and 1 < m < most:  # double or halve, until the top is passed
        if measure(m) < measure(m + 1):
            low, m = m + 1, 2 * m
            if m > high:
                break
        else:
            high, m = m, m // 2
            if m < low:
                break
    while low < high:  # bisect
        m = (low + high) // 2
        if measure(m) < measure(m + 1):
            low = m + 1
        else:
            high = m
    return low
    ### END SOLUTION


# %%
grade.check(best_m, points=4)
### BEGIN HIDDEN TESTS
grade.check(best_m, points=4, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# The stub's measurements come from a formula. Now real ones: each probe of the next cell is a run on four processes, paced with $a + b\,n$.

# %%
search = grade.yours(best_m)
small = (inputs[:64], targets[:64])
a = b = 0.002  # seconds of a forward; a backward takes twice as long
probes, disturbed = {}, []


def pace_of(samples):
    return a + b * samples, 2 * (a + b * samples)


def measure(m):
    if m not in probes:
        line = ps.one_f_one_b(p=4, m=m)
        run = ps.run(line, stages, [small], loss=loss, pace=pace_of(64 / m))
        probes[m] = 64 / run.trace.makespan
        if ps.why_late(ps.simulate(line, ps.Cost(*pace_of(64 / m))), run.trace).disturbed:
            disturbed.append(m)
    return probes[m]


found_m = search(measure, 16, 64, 21)
print(
    f"\nyour search: m = {found_m}, {probes[found_m]:.1f} samples/s, in {len(probes)} runs instead of 64"
)
print("probes:", ", ".join(f"{m}: {rate:.1f}" for m, rate in sorted(probes.items())))
print("disturbed by the machine:", ", ".join(map(str, sorted(disturbed))) or "none")
print(
    f"by the formula the best is m = {top}; m = {found_m} has {curve[found_m] / curve[top]:.1%} of its throughput"
)

# %% [markdown]
# Near the top $m$ and $m + 1$ differ by less than one run differs from the next. So run the cell twice, and you may get another $m$, nearly as good. A probe that the machine disturbed says too little, and can send the search the wrong way: if there are any, run the cell again.
#
# Now the library's tuner. It does the same, and a few things more: it tries only those $m$ that make microbatches as even as can be, it does not trust differences smaller than the noise, and it can keep to a memory cap.

# %%
print(
    ps.tune.tune_microbatches(
        "1f1b", stages, small, loss=loss, pace=pace_of, repeats=1, noise=0.02, limit=6
    )
)

# %% [markdown]
# ## 7. Three faults that nobody reports
#
# A pipeline that is fast and learns nothing is no use. The worst faults raise no error. The loss falls a bit slower, or explodes in the third hour.
#
# ### How to find them
#
# Compare your pipeline's gradients with those of one process, on the same batch. If they differ, ask first: **is one a multiple of the other?** Then only the *scale* is wrong, and you look for a forgotten division. If not, the *direction* is wrong, and something else is broken.
#
# ### Exercise 8: scale or direction? (3 points)
#
# Real gradients are a little off after so many roundings. So do not ask for equality. Measure the length of the difference beside the length of the gradient: up to a ten-thousandth of it does not count. (One number alone tells little. Where a gradient is nearly 0, rounding is most of what is there. And gradients may be tiny as a whole.)


# %%
def scale_of(found: list[float], right: list[float]) -> float | None:
    """The one factor c with found = c * right, up to rounding; None where there is none.

    found, right: two gradients, as long lists of numbers; `right` is not all 0.

    Example: scale_of(found=[3.0, 6.0], right=[1.0, 2.0]) is 3.0; for found=[3.0, 5.0] it is None.
    """
    ### BEGIN SOLUTION
    largest = max(range(len(right)), key=lambda i: abs(right[i]))
    factor = found[largest] / right[largest]
    length = math.hypot(*found)
    rest = math.hypot(*(f - factor * r for f, r in zip(found, right, strict=True)))
    return factor if rest <= 1e-4 * length else None
    ### END SOLUTION


# %%
grade.check(scale_of, points=3)
### BEGIN HIDDEN TESTS
grade.check(scale_of, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Three suspects, on four real workers, with 8 microbatches:
#
# - *forgot to divide*: each microbatch's mean loss is used as it is, and the gradients are added up. (`ps.run` weighs them rightly, so we put the factor back in.)
# - *BatchNorm*: a stage normalises over the samples that it sees.
# - *LayerNorm* in its place: it looks at one sample at a time.
#
# **Predict** for each: a factor (which one?), or `"direction"`.

# %%
guess_suspects = {"forgot to divide": None, "BatchNorm": None, "LayerNorm": None}

# %%
diagnose = grade.yours(scale_of)


def with_norm(norm):
    """Four stages; the second one ends in `norm`."""
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(64, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), norm, nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Linear(32, 10),
    ]


def flat(gradients):
    """All numbers of all stages, in one list."""
    return [x for stage in gradients for g in stage.values() for x in g.flatten().tolist()]


def undivided(outputs, answers):
    """What one microbatch adds if nobody divides by the 8 microbatches."""
    return 8 * loss(outputs, answers)


suspects = {
    "forgot to divide": (nn.Identity(), undivided),
    "BatchNorm": (nn.BatchNorm1d(32), loss),
    "LayerNorm": (nn.LayerNorm(32), loss),
}
for name, (norm, its_loss) in suspects.items():
    line = with_norm(norm)
    # the right gradient is that of the whole batch at once, in one process
    right = reference.gradients(line, [batch], m=1, loss=loss)
    got = ps.run(ps.one_f_one_b(p=4, m=8), line, [batch], loss=its_loss).gradients
    factor = diagnose(flat(got), flat(right))
    said = "the direction is wrong" if factor is None else f"the right gradient times {factor:.4g}"
    print(f"{name:<18}{said}   (you predicted {guess_suspects[name]})")

# %% [markdown]
# The cures:
#
# - **Scale**: weigh each microbatch by its share of the samples (unit 01). SGD steps $m$ times too far without it. Adam hides the fault, because it divides by the size of the gradient. It shows again as soon as you clip. The first table below has the length of the first step, over that of the right one.
# - **BatchNorm**: it computes its mean over 128 samples instead of 1024, so it is *another function*, and its running mean counts each batch $m$ times. Use LayerNorm or GroupNorm, or freeze its statistics. The second table has the largest error in the gradient of a small regression, and what is left of an old running mean after one batch (0.9 is right). An error needs a scale, so the lines below it hold the error on our digits beside the largest number of the right gradient. *momentum* is BatchNorm with a running mean that forgets less per microbatch: that mends the mean, and leaves the gradient wrong. *frozen* keeps the old mean as it is.
# - **Dropout with recomputation** is a relative of it: if the second forward draws other random numbers, the gradient is that of another function. The third table has the errors; `ps.run` restores the random numbers.

# %%
print(ps.stability.table(ps.stability.undivided_gradients()), end="\n\n")
print(ps.stability.table(ps.stability.norms((1, 8))))
for name in ("BatchNorm", "LayerNorm"):
    line = with_norm(suspects[name][0])
    cut, whole = (reference.gradients(line, [batch], m=m, loss=loss) for m in (8, 1))
    off, largest = reference.max_error(cut, whole), max(map(abs, flat(whole)))
    print(f"digits, {name}, m = 8: off by {off:.1e}, largest number {largest:.1e}", end=" ")
    print(f"({off / largest:.0%})")
print()
print(ps.stability.table([ps.stability.dropout_recompute()]))

# %% [markdown]
# ### Exercise 9: clip together (2 points)
#
# Clipping makes a gradient that is too long shorter, and keeps its direction. But in a pipeline no worker has the whole gradient. If each clips its own piece, the long pieces shrink and the short ones do not, and the *direction* changes.
#
# The cure costs one small message: each worker tells the length (the norm) of its piece. The length of the whole is the root of the sum of all squares. From it everybody works out the same factor.


# %%
def clip_factor(norms: list[float], clip_norm: float) -> float:
    """What every stage multiplies its gradient by, so that the whole is no longer than clip_norm.

    norms: the length of each stage's gradient. A gradient that is short enough stays as it is.

    Example: clip_factor(norms=[6.0, 8.0], clip_norm=5.0) is 0.5, since the whole has length 10.
    """
    ### BEGIN SOLUTION
    whole = math.hypot(*norms)
    return clip_norm / whole if whole > clip_norm else 1.0
    ### END SOLUTION


# %%
grade.check(clip_factor, points=2)
### BEGIN HIDDEN TESTS
grade.check(clip_factor, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** Four stages, and somebody forgot to scale the pixels: they go from 0 to 16. We clip the gradient to a tenth of its length, each stage on its own. What is the cosine of the angle between it and the right direction? (1 is the same direction, 0 a right angle.)

# %%
guess_cosine = None

# %%
my_factor = grade.yours(clip_factor)
unscaled = (16 * batch[0], batch[1])
gradients = reference.gradients(with_norm(nn.Identity()), [unscaled], m=8, loss=loss)
norms = [math.hypot(*flat([stage])) for stage in gradients]
limit = math.hypot(*norms) / 10
rows = ps.stability.clip_factors(gradients, limit)
print("\nstage   length   factor, each on its own   factor, together (yours)")
for row in rows:
    print(f"{row.stage:>5}{row.norm:>9.3f}{row.per_stage:>26.3f}{my_factor(norms, limit):>27.3f}")
grade.reveal(guess_cosine, round(ps.stability.direction(rows), 3), "is the cosine, each on its own")
print(f"together: {ps.stability.direction(rows, together=True):.3f}")

# %% [markdown]
# Stage 0 has the longest piece, and loses most. Clipped on their own, all pieces end up equally long, whatever they were: the shares that the stages have in the step are gone. That does keep explosions away, but it is not what one process does. So where a schedule flushes, `clip_norm` of `ps.run` clips together, as you did: its workers meet before the update and add up their squares. `clip_over="stage"` asks for each on its own. Without a flush there is no moment at which all gradients are there, and so no other way.
#
# ### Exercise 10: late gradients (3 points)
#
# Unit 03's gradients came late. Too late for the same learning rate? Take the simplest training there is: one weight $w$, the loss $w^2 / 2$, whose gradient is $w$. With the rate $\eta$ and a delay of $d$ steps
#
# $$w_{t+1} = w_t - \eta\, w_{t-d}$$
#
# Before step $d$ there is no gradient so old: use $w_0$.


# %%
def late_descent(rate: float, delay: int, steps: int) -> list[float]:
    """The weights from the start to the end, steps + 1 of them; the first is 1.0.

    rate: the learning rate. delay: how many steps old the gradients are; 0 for none.

    Example: late_descent(rate=0.5, delay=2, steps=3) is [1.0, 0.5, 0.0, -0.5].
    """
    ### BEGIN SOLUTION
    weights = [1.0]
    for t in range(steps):
        weights.append(weights[t] - rate * weights[max(0, t - delay)])
    return weights
    ### END SOLUTION


# %%
grade.check(late_descent, points=3)
### BEGIN HIDDEN TESTS
grade.check(late_descent, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** Without a delay every rate below 2 converges. What is the largest good rate with a delay of 3, as on stage 0 of four workers?

# %%
guess_largest_rate = None

# %%
my_descent = grade.yours(late_descent)


def largest_rate(delay, steps=4000):
    """The largest rate whose weights do not grow, by bisection with your function."""
    low, high = 0.0, 2.5
    for _ in range(12):
        rate = (low + high) / 2
        weights = my_descent(rate, delay, steps // 8)
        grows = max(map(abs, weights[-50:])) > max(map(abs, weights[:50]))
        low, high = (low, rate) if grows else (rate, high)
    return low


grade.reveal(guess_largest_rate, round(largest_rate(3), 3), "with a delay of 3")
print("\ndelay   your bisection   2 sin(π / (4d + 2))")
for delay in (0, 1, 3, 7):
    print(f"{delay:>5}{largest_rate(delay):>17.3f}{ps.stability.stable_rate(delay):>22.3f}")

# %% [markdown]
# The formula is known since 1976 (Levin and May). For long delays the largest rate is nearly in proportion to $1 / (1 + d)$. So an asynchronous pipeline of many stages needs a smaller rate. Does real training agree? Here are digits on four real workers, with a rate that is fine without a delay.

# %%
torch.manual_seed(2)
net = [nn.Sequential(nn.Linear(n, 32), nn.Tanh()) for n in (64, 32, 32)] + [nn.Linear(32, 10)]
stream = [(inputs[i : i + 32], targets[i : i + 32]) for _ in range(3) for i in range(0, 1408, 32)]
print(ps.stability.table(ps.stability.delayed_training(net, stream, rate=1.0, loss=loss)))

# %% [markdown]
# `loss` is the mean over the last tenth of the training, `worst` the largest of all; somebody who guesses has $\ln 10 \approx 2.3$. Compare the first two lines: the same rate, the same data. Then look which cure helps.
#
# A rate that starts small and rises (Yang et al., PipeMare, MLSys 2021) helps through the wild beginning. But at its end it is the old rate again: it cures only if that one is below the delay's bound. Clipping keeps the steps short, and so the explosion away.
#
# ## 8. Several machines
#
# All runs so far were on one machine. On two it is the same schedule, the same stages and the same `ps.run`. PyTorch's own launcher starts the processes. Put your `ps.run(...)` into a file, `train.py`, and start this on *both* machines:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 train.py
# ```
#
# `--nnodes` is the number of machines, `--nproc-per-node` the workers on each: two times two, so a schedule with $p = 4$. `HOST` is the name of one of the two machines, where the workers meet, and 29400 a free port on it. Each process finds out its own number and does its row of the schedule. All of them get the whole result.
#
# Which boundary lies between the machines? Workers are numbered machine by machine, so with $p = 4$ it is the one behind stage 1. There latency is largest and bandwidth smallest. You know what to do: cut the model where it is narrow, give `balanced` the link's `bandwidth`, let a few more cups in.
#
# And if a machine is lost? A pipeline has no spare station: without one stage there is no forward. So nobody goes on. Every process that is left ends with an error that names the worker that is gone; none waits for ever. You start again from the last checkpoint (`ps.train` writes them). Write one as often as you can bear to lose the time since the last.
#
# **Think.** Four machines, each lost about once in 40 days. How often does the pipeline stop? (About every 10 days: the more stages, the more checkpoints.)
#
# ## 9. The claims lab
#
# As before: decide first, write `"right"`, `"wrong"` or `"half"` (right in part, or only under a condition that the claim leaves out) in place of the `"?"`, run the cell, and only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > The bubble of a pipeline is in essence load imbalance.

# %%
verdicts[1] = "?"

print("bubble of total, predicted, p = 4")
for m in (4, 16, 128):
    balanced, one_slow = (
        ps.simulate(ps.one_f_one_b(4, m), ps.Cost(times, [2 * t for t in times])).bubble_of_total
        for times in ([1, 1, 1, 1], [1, 1.5, 1, 1])
    )
    print(f"m = {m:<4} equal stages {balanced:>6.1%}   one stage slower by half {one_slow:>6.1%}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** Balanced pipelines still fill and drain. Imbalance adds to that. More microbatches make the first part small, and do not touch the second.
# </details>
#
# ### Claim 2
#
# > In a Transformer the early layers are cheap and the late layers are dear.

# %%
verdicts[2] = "?"

text = course_data.text_stream(1, 8, 64, seeds=[0])[0]
blocks = [
    layer for stage in course_data.transformer_stages(6, 64, 4, 64, seeds=[0]) for layer in stage
]
found = ps.partition.profile_layers(blocks, text, m=2, loss=course_data.loss_of_all, rounds=20)
print("ms of a microbatch, there and back, measured here")
for layer in found.layers:
    print(f"{layer.name:<10}{1000 * layer.seconds:>8.2f}")

width, words, length = 768, 50_000, 1024
block = 12 * width**2 + 2 * length * width  # multiplications for each word of the text
print(f"\nmultiplications per word, width {width}: a block {block / 1e6:.1f} million", end=", ")
print(f"an output head for {words} words {width * words / 1e6:.1f} million")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** The blocks cost the same, from the first to the last. The ends differ: an embedding only looks rows up, and an output head for many words can cost as much as several blocks.
# </details>
#
# ### Claim 3
#
# > To tune the number of microbatches, start at m = 4p, then bisect on the throughput.

# %%
verdicts[3] = "?"

print("bubble of total at m = 4p, predicted:", end=" ")
print(
    ", ".join(
        f"p = {p}: {ps.simulate(ps.one_f_one_b(p, 4 * p)).bubble_of_total:.1%}"
        for p in (2, 4, 8, 16)
    )
)
print(f"your search needed {len(probes)} runs; the m it found has", end=" ")
print(f"{curve[found_m] / curve[top]:.1%} of the best throughput by the formula")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, as a start. The bubble is $(p-1)/(5p-1)$ there, at most 20%. Then measure: the best m is larger or smaller, depending on what a microbatch costs by itself.
# </details>
#
# ### Claim 4
#
# > With the batch as it is, too large a microbatch makes the bubble larger.

# %%
verdicts[4] = "?"

for m in (64, 16, 4, 2):
    each = 64 / m
    trace = ps.simulate(ps.one_f_one_b(4, m), ps.Cost(each, 2 * each))
    print(f"64 samples in microbatches of {each:>2g}: bubble of total {trace.bubble_of_total:.1%}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right.** Larger microbatches are fewer microbatches, and each worker waits for $p - 1$ of them, large ones.
# </details>
#
# ### Claim 5
#
# > Put the embedding and the output layer where they need not cross a stage.

# %%
verdicts[5] = "?"

table = 4 * width * words
message = 4 * length * width
print(f"gradients of one table, {words} words: {table / 1e6:.0f} MB, once per batch")
print(f"activations of one microbatch, {length} words of text: {message / 1e6:.0f} MB, each way")
line = ps.one_f_one_b(4, 8)
print(
    f"on a line: first layer on worker {line.placement[0]}, last layer on worker {line.placement[-1]}"
)

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** It matters where they are tied: then first and last worker must add up their gradients before each update. On a line it cannot be avoided, since the two are at its two ends; it takes a V, or untied tables. And where they are not tied, nothing crosses.
# </details>
#
# ### Claim 6
#
# > With stages well balanced and links fast, four workers are four times as fast as one.

# %%
verdicts[6] = "?"

for m in (1, 4, 16, 64):
    trace = ps.simulate(ps.one_f_one_b(4, m), ps.Cost(1, 2))
    print(
        f"m = {m:<3} predicted: {sum(trace.busy) / trace.makespan:.2f} times as fast as one worker"
    )

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** It is $p\,m / (m + p - 1)$ times, which comes close only for large m. In reality everything from the table in section 1 comes off as well. If the model fits on one device and that device is fast enough, a pipeline is not what you need.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit05.CLAIMS)

# %% [markdown]
# ## Summary
#
# - The gap between drawing and run has parts: imbalance, transfer, start-up, and the rest. Let one in at a time, and see which is large.
# - A message takes latency + bytes / bandwidth. Overlapped, only those at the ends are paid; 1F1B also waits for latency, and eager 1F1B hides it.
# - Profile with a warm-up, and take medians. Look at the spread before you believe a number.
# - The best cut has the fastest slowest stage. A dynamic programme finds it: the rest is the same question again.
# - $r$ workers that take turns make a stage of $t$ seconds pass a microbatch every $t / r$. They share every update.
# - Start at $m = 4p$, double or halve, then bisect. The hill is flat on top.
# - Compare gradients with one process: a wrong scale is a forgotten division, a wrong direction is something like BatchNorm. Clip together. A gradient that comes $d$ steps late needs a smaller rate.
#
# ## Check yourself
#
# 1. Your run is 25% slower than the drawing, and twice as many microbatches do not help. Which part of the gap is it likely to be?
# 2. Four stages take 2, 2, 6 and 2 seconds, and you get two more workers. Where do you put them, and how often does a microbatch come out then?
# 3. A pipeline with Adam trains fine, and goes wrong as soon as you clip. Which of the faults would you look for first?
#
# <details>
# <summary>Answers</summary>
#
# 1. Imbalance (or a slow link): the slowest station sets the pace, however many microbatches there are. Start-up and fill would have become a smaller share.
# 2. Both on the third stage: 6 / 3 = 2, so one comes out every 2 seconds.
# 3. A wrong scale. Adam hides gradients that were not divided by m. Clipping compares their length with a fixed number.
# </details>
#
# Next comes [unit 06](../06_choosing/choosing.ipynb): which schedule, which mix of data, tensor and pipeline parallelism, or none at all?
