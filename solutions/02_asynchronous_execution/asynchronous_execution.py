# %% [markdown]
# # Asynchronous execution
#
# What if nobody waits for the batch to end?
#
# **After this unit you can**
#
# - say what asynchrony gains for one batch, and what for a stream of many,
# - write the asynchronous order of one worker, updates included, and run it on real workers,
# - tell latency from throughput, and find the stage that sets the pace,
# - read from a run which weights every action met, and prove a gradient wrong.
#
# **It takes** two sittings of about 40 minutes, with a place to stop after section 5. **You need** [unit 01](../01_synchronous_bubble/synchronous_bubble.ipynb): microbatches, GPipe, and the bubble.
#
# Nine exercises earn points. As in unit 01, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
import copy
import itertools
import math
import os

import pipeschool as ps
import torch
from pipeschool import grade, lateness
from sklearn.datasets import load_digits
from torch import nn

torch.set_num_threads(1)
digits = load_digits()  # 1797 scanned handwritten digits, 8 x 8 pixels each
inputs = torch.tensor(digits.data / 16, dtype=torch.float32)
targets = torch.tensor(digits.target)

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(64, 128), nn.ReLU()),
    *(nn.Linear(128, 128), nn.ReLU()),
    *(nn.Linear(128, 128), nn.ReLU()),
    *(nn.Linear(128, 10), nn.Identity()),
)
stages = ps.partition.split_layers(model, 4)  # four stages of two layers each
loss = nn.functional.cross_entropy
cost = ps.Cost(forward=1, backward=2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


print(f"{len(inputs)} digits, {len(stages)} stages")

# %% [markdown]
# ## 1. A meeting after every batch
#
# In unit 01 the manager of the tea shop let one cup follow the other down the line. One rule stayed: the cups come in batches, and after each batch there is a meeting. When the last cup has come back, everybody adjusts their recipe, together. Only then is the next order taken. The meeting is the *flush*.
#
# Here are three batches of eight cups. The thin black lines are the meetings.

# %%
ps.draw.gantt(ps.simulate(ps.gpipe(p=4, m=8, batches=3), cost))

# %% [markdown]
# You know every one of these triangles. They come back with every batch: the line runs empty before a meeting, and fills again after it.
#
# In this unit $p$ is the number of stages, one per worker. $m$ is the number of microbatches in one batch. $t_F$ and $t_B$ are the seconds of one forward and one backward of one microbatch on one stage. All stages are alike, until section 5.
#
# **Predict** before you compute, for $p = 4$, $m = 8$, $t_F = 1$, $t_B = 2$. How long do 20 batches take with a meeting after each? And suppose that nobody ever waits for a meeting: how long does *one* batch take then, and how long do 20?

# %%
guess_20_with_meetings = None  # seconds, a number
guess_1_without = None
guess_20_without = None


# %% [markdown]
# ### Exercise 1: the time with flushes (1 point)


# %%
def flush_time(p: int, m: int, batches: int, forward: float, backward: float) -> float:
    """The seconds that GPipe needs for `batches` batches, with a flush after each.

    p, m: stages, and microbatches in one batch.
    forward, backward: the seconds of one of them, for one microbatch on one stage.

    Example: flush_time(p=1, m=2, batches=3, forward=1, backward=2) is 18.
    """
    ### BEGIN SOLUTION
    return batches * (m + p - 1) * (forward + backward)
    ### END SOLUTION


# %%
grade.check(flush_time, points=1)
### BEGIN HIDDEN TESTS
grade.check(flush_time, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
grade.reveal(guess_20_with_meetings, grade.yours(flush_time)(4, 8, 20, 1, 2), "seconds")

# %% [markdown]
# ## 2. Nobody waits
#
# The next manager abolishes the meetings. Her rule: pass each cup on at once. When a cup comes back to your station, adjust your own recipe, by yourself, and carry on with the next cup. She takes new orders as long as there are customers.
#
# Now there is no batch any more, only a *stream* of $n$ microbatches. There is no *barrier* in it, that is, no point where everybody waits for everybody. And every microbatch makes an update of its own. This is *asynchronous* pipeline training. PipeDream (Narayanan et al., 2019) made it known.
#
# Is that still the same training? Keep the question. First we look at what it gains, and in section 6 at what it costs.
#
# ### Exercise 2: the time of a stream (1 point)
#
# Count in *slots*. A slot is $t_F + t_B$ seconds, the work of one worker on one microbatch. How many slots does worker 0 work? And what must the line do besides, at its two ends?


# %%
def stream_time(p: int, n: int, forward: float, backward: float) -> float:
    """The seconds from the first forward to the last backward of a stream without any flush.

    p, n: stages, and microbatches in the stream.
    forward, backward: the seconds of one of them, for one microbatch on one stage.

    Example: stream_time(p=1, n=5, forward=1, backward=2) is 15.
    """
    ### BEGIN SOLUTION
    return (n + p - 1) * (forward + backward)
    ### END SOLUTION


# %%
grade.check(stream_time, points=1)
### BEGIN HIDDEN TESTS
grade.check(stream_time, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
time_of = grade.yours(stream_time)
print("\none batch of 8 without a meeting:")
grade.reveal(guess_1_without, time_of(4, 8, 1, 2), "seconds")
print("20 batches without meetings, a stream of 160:")
grade.reveal(guess_20_without, time_of(4, 160, 1, 2), "seconds")
print(f"\none batch with its flush: {ps.simulate(ps.gpipe(4, 8), cost).makespan:g} seconds")

# %% [markdown]
# The first number surprises many people. **One batch gains nothing.** It has to go down the line and come back, with a meeting at the end or without. And 20 batches gain. Here is why, with all 20 on one time axis. You will write the lower schedule yourself in a minute.

# %%
sawtooth = ps.simulate(ps.gpipe(p=4, m=8, batches=20), cost)
band = ps.simulate(ps.pipedream(p=4, m=8, batches=20), cost)
ps.draw.gantt(sawtooth, band)

# %% [markdown]
# Above, a sawtooth: the line fills and drains 20 times. Below, one solid band: it fills once and drains once. The boxes are the same. Asynchrony removes the refill *between* batches, and nothing else.
#
# **Try it.** The sliders show *one* batch, with a flush and without. Can you find any `p`, `m`, `forward` and `backward` for which the two makespans differ? And what does differ, in the last line of the table?

# %%
ps.widgets.explore(("gpipe", "pipedream"))

# %% [markdown]
# ### Exercise 3: the gain (2 points)
#
# How many times as fast is the stream? Divide the two times. The stream of so many batches has $n = \text{batches} \cdot m$ microbatches. The longer it is, the less filling and draining count: work out the limit as well.


# %%
def gain(p: int, m: int, batches: float) -> float:
    """How many times as long GPipe takes as a stream of the same microbatches.

    batches: how many batches of m microbatches there are; math.inf asks for the limit.

    Example: gain(p=3, m=2, batches=1) is 1.0.
    """
    ### BEGIN SOLUTION
    if batches == math.inf:
        return (m + p - 1) / m
    return batches * (m + p - 1) / (batches * m + p - 1)
    ### END SOLUTION


# %%
grade.check(gain, points=2)
### BEGIN HIDDEN TESTS
grade.check(gain, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
gain_of = grade.yours(gain)
print("\nbatches         ", *(f"{batches:>7}" for batches in (1, 2, 5, 20, 100, math.inf)))
print("gain, p=4, m=8  ", *(f"{gain_of(4, 8, b):>7.3f}" for b in (1, 2, 5, 20, 100, math.inf)))
print("\nm               ", *(f"{m:>7}" for m in (1, 2, 4, 8, 16, 64)))
print("limit for p=4   ", *(f"{gain_of(4, m, math.inf):>7.3f}" for m in (1, 2, 4, 8, 16, 64)))
print("limit for p=16  ", *(f"{gain_of(16, m, math.inf):>7.3f}" for m in (1, 2, 4, 8, 16, 64)))

# %% [markdown]
# The limit is $(m + p - 1)/m$: what GPipe's batch takes, over what its work takes. Look along the two lower lines. When batches have many microbatches, flushes are rare, and little is left to gain.

# %% [markdown]
# ## 3. Write the order
#
# If nobody waits, how many cups should be on the way? Worker 0 could take orders all day, and the counter would overflow. But when there is one cup for every station, everybody is busy. A further cup would only stand around. So PipeDream lets $p$ microbatches in, and then a new one only when one comes back.
#
# Further down the line fewer are enough. Between worker $s$ and the end there are $p - s$ stations, worker $s$ counted. So worker $s$ has at most $p - s$ microbatches in flight: forward done, backward not.
#
# **Predict.** How many forwards does worker 1 of 4 do before its first backward?

# %%
guess_warm_up = None

# %%
kinds = [span.action.kind for span in band.rows[1]]
grade.reveal(guess_warm_up, kinds.index("B"), "forwards")

# %% [markdown]
# After that it takes turns: one backward, one forward, one backward, ... From this the order has its name, *1F1B*. (Unit 04 has a synchronous schedule with the same name. Always ask which one is meant.)
#
# ### Exercise 4: the asynchronous order (5 points)
#
# Write one worker's row, updates included. An update is `ps.U(worker, k)`, printed `2U0` on worker 2, and `k` counts the worker's updates from 0. Where does it go? Nobody waits, so as early as there is a gradient for it.


# %%
def async_order(worker: int, p: int, n: int) -> list[ps.Action]:
    """All actions of `worker`, in order: its forwards F, its backwards B, its updates U.

    At most p - worker microbatches are in flight, and no worker waits longer than it must.
    worker: from 0 to p - 1; it holds stage number `worker`.
    p, n: stages, and microbatches in the stream, which come in one after the other from
        number 0; n may be smaller than p.

    Example: async_order(worker=2, p=4, n=1) is [ps.F(2, 0), ps.B(2, 0), ps.U(2, 0)].
    """
    ### BEGIN SOLUTION
    first = min(p - worker, n)
    order = [ps.F(worker, k) for k in range(first)]
    for k in range(n):
        order += [ps.B(worker, k), ps.U(worker, k)]
        if first + k < n:
            order.append(ps.F(worker, first + k))
    return order
    ### END SOLUTION


# %%
grade.check(async_order, points=5)
### BEGIN HIDDEN TESTS
grade.check(async_order, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# `from_workers` makes a schedule of it. The new argument, `weights`, says what happens when weights change while a microbatch is on its way. `"stash"` is the careful choice. We use it until section 6, and there you will see what a careless one does.

# %%
my_order = grade.yours(async_order)
print()
print(ps.Schedule.from_workers(my_order, p=4, m=6, weights="stash", name="my stream"))
stream = ps.Schedule.from_workers(my_order, p=4, m=16, weights="stash", name="my stream")
predicted_stream = ps.simulate(stream, ps.Cost(forward=0.02, backward=0.04))

# %% [markdown]
# Now for real: four processes, paced as in unit 01. They really compute, send and update. A forward ends no earlier than 20 ms after its input was there, a backward no earlier than 40 ms, and all times are from the clock.

# %%
measured_stream = ps.run(
    stream, stages, [(inputs, targets)], loss=loss, optimizer=sgd, pace=(0.02, 0.04)
)
ps.draw.compare(predicted_stream, measured_stream.trace)

# %% [markdown]
# Every box of a worker is now followed by the next, except at the two ends. And the black lines, the updates, are everywhere. Nobody declared a time for them: they take what they take, and the line below the charts counts them among the *actions*. If it says *run it again*, the machine was busy: do that.
#
# ### Twenty batches, measured
#
# The claim of section 2, on real processes: 20 batches of 80 digits, first with a flush after each, then as one stream of your own order. The pace is 8 ms and 16 ms, so it takes about ten seconds.

# %%
twenty = [(inputs[i : i + 80], targets[i : i + 80]) for i in range(0, 1600, 80)]
long_stream = ps.Schedule.from_workers(
    my_order, p=4, m=8, batches=20, weights="stash", name="my stream"
)
options = dict(loss=loss, optimizer=sgd, pace=(0.008, 0.016))
with_flush = ps.run(ps.gpipe(p=4, m=8), stages, twenty, **options).trace
without_flush = ps.run(long_stream, stages, twenty, **options).trace

measured_gain = with_flush.makespan / without_flush.makespan
formula = gain_of(4, 8, 20)
print(f"gain measured {measured_gain:.3f}, by your formula {formula:.3f}", end=" ")
print(f"({measured_gain / formula - 1:+.1%})")
declared = ps.Cost(*options["pace"])
lateness.tell(
    {
        "with flushes": (ps.simulate(ps.gpipe(p=4, m=8, batches=20), declared), with_flush),
        "one stream": (ps.simulate(long_stream, declared), without_flush),
    }
)
for trace in (with_flush, without_flush):
    updates = sum(span.action.kind == "U" for span in trace.rows[0])
    print(f"{trace.name}: {updates} updates, each with the gradient of {1600 // updates} digits")
ps.draw.gantt(with_flush, without_flush)

# %% [markdown]
# The gain is what two runs say, and a machine that disturbed one of them says another number. So look at the two lines first: if one asks for it, run the cell again. What is left is the price of many actions. Messages and updates come on top of the pace, and the stream has an update for each microbatch.
#
# Be fair to GPipe: this compares *time*, and not what was learnt. GPipe made few updates, each with the gradient of a whole batch. The stream made many, each with the gradient of one microbatch. Which of them learns more per second is another question. Unit 03 turns to learning.
#
# And at full speed? A pace cannot show that. Here are two larger stages without one. `ps.profile` has timed each of them alone, its update included, and the prediction is made from that.

# %%
heavy = [
    nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(2)
]
large = (torch.randn(4096, 512), torch.randn(4096, 512))
short = ps.Schedule.from_workers(my_order, p=2, m=16, weights="stash", name="my stream")
alone = ps.profile(heavy, large, m=16, optimizer=sgd)
full_speed = ps.run(short, heavy, [large], optimizer=sgd)
print(f"2 workers on a machine with {os.cpu_count()} cores")
ps.draw.compare(ps.simulate(short, alone), full_speed.trace)

# %% [markdown]
# In a stream everybody always works, so the workers get in each other's way all the time. With a core for each they share the machine's memory, and their *actions* take longer than alone. With fewer free cores than workers they also take turns, and the line says so. Two devices would share nothing but the link.

# %% [markdown]
# ## 4. One cup, and all the cups
#
# Is the bubble gone now? Ask the simulator.

# %%
for batches in (1, 2, 20, 100):
    trace = ps.simulate(ps.pipedream(p=4, m=8, batches=batches), cost)
    idle = trace.makespan - trace.busy[0]
    share = trace.bubble_of_total
    print(f"{8 * batches:>5} microbatches: a worker waits {idle:g} s, {share:.2%} of the total")

# %% [markdown]
# It is as long as ever, $(p - 1)(t_F + t_B)$ for each worker: start-up and drain. But it is paid once, so its share $(p-1)/(n+p-1)$ goes to 0 as the stream gets longer.
#
# Two things are called "fast", and they are not the same:
#
# - **latency**: the seconds between a cup's first forward and its last backward. That is what the customer feels.
# - **throughput**: how many cups are done per second. That is what the shop earns.
#
# **Predict.** Three shops with four stations, 1 second forward and 2 seconds backward: one cup at a time (naive), batches of eight with meetings (GPipe), no meetings (a long stream). How long is a cup on its way, on average?

# %%
guess_latency = {"naive": None, "gpipe": None, "pipedream": None}  # seconds

# %% [markdown]
# ### Exercise 5: latency (2 points)
#
# A trace knows when everything happened. `trace.spans` is a list of spans of all workers. Each has an `.action` (with `.kind`, `.stage` and `.microbatch`), a `.start` and an `.end` in seconds. Careful: in an update U the number counts updates. It is no microbatch.


# %%
def latency(trace: ps.Trace, microbatch: int) -> float:
    """Seconds from the start of a microbatch's first forward to the end of its last backward.

    Example: latency(trace, 0) is 6 where trace = ps.simulate(ps.naive(p=2, m=1)), with a
    forward of 1 second and a backward of 2.
    """
    ### BEGIN SOLUTION
    spans = [
        span
        for span in trace.spans
        if span.action.kind in ("F", "B") and span.action.microbatch == microbatch
    ]
    return max(span.end for span in spans) - min(span.start for span in spans)
    ### END SOLUTION


# %%
grade.check(latency, points=2)
### BEGIN HIDDEN TESTS
grade.check(latency, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
latency_of = grade.yours(latency)
table = "\n                 latency (mean)   throughput   latency x throughput\n"
for schedule in (ps.naive(4, 8, 20), ps.gpipe(4, 8, 20), ps.pipedream(4, 8, 20)):
    trace = ps.simulate(schedule, cost)
    mean = sum(latency_of(trace, k) for k in range(160)) / 160
    throughput = 160 / trace.makespan
    grade.reveal(guess_latency[trace.name], round(mean, 2), f"seconds for a cup, {trace.name}")
    table += f"{trace.name:<16} {mean:>12.2f} s {throughput:>8.3f} / s {mean * throughput:>16.2f}\n"
print(table)

# %% [markdown]
# The stream's latency is nearly that of the naive shop. A pipeline does not make a cup any faster. It makes more of them at the same time: the throughput is nearly $p$ times as high. GPipe's cups take longest, because each of them waits for the last one of its batch.
#
# The last column is no accident: latency times throughput is the mean number of cups on the way. This is *Little's law*, and it holds for every queue there is. One cup in the naive shop, nearly $p$ in the stream.

# %% [markdown]
# ## 5. One slow station
#
# Toppings now take twice as long as everything else: stage 2 needs 2 seconds for a forward and 4 for a backward, the others 1 and 2. There are no meetings any more. So do the other three get more done?
#
# **Predict.** In the middle of a long stream, how many seconds pass between two cups that leave the line?

# %%
guess_pace = None  # seconds

# %% [markdown]
# ### Exercise 6: the pace of the line (2 points)


# %%
def steady_pace(forward: list[float], backward: list[float]) -> float:
    """The seconds between two microbatches that are done, in the middle of a long stream.

    forward, backward: the seconds of one forward and one backward, one number per stage.

    Example: steady_pace(forward=[1, 1], backward=[2, 2]) is 3.
    """
    ### BEGIN SOLUTION
    return max(f + b for f, b in zip(forward, backward, strict=True))
    ### END SOLUTION


# %%
grade.check(steady_pace, points=2)
### BEGIN HIDDEN TESTS
grade.check(steady_pace, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
pace_of = grade.yours(steady_pace)
grade.reveal(guess_pace, pace_of([1, 1, 2, 1], [2, 2, 4, 2]), "seconds")

forward, backward = [0.02, 0.02, 0.04, 0.02], [0.04, 0.04, 0.08, 0.04]
predicted_slow = ps.simulate(stream, ps.Cost(forward, backward))
measured_slow = ps.run(
    stream, stages, [(inputs, targets)], loss=loss, optimizer=sgd, pace=(forward, backward)
).trace
ps.draw.compare(predicted_slow, measured_slow)

# %%
done = [span.end for span in measured_slow.rows[0] if span.action.kind == "B"]
measured_pace = (done[-4] - done[3]) / (len(done) - 7)
print(f"between two cups: {measured_pace * 1000:.0f} ms measured,", end=" ")
print(f"{pace_of(forward, backward) * 1000:.0f} ms by your formula\n")
for worker, busy in enumerate(measured_slow.busy):
    print(f"worker {worker} works {busy / measured_slow.makespan:.0%} of the time")

# %% [markdown]
# In the middle of the stream worker 2 never rests, and the three others rest half of the time. Dropping the barrier does not help them: the cups they wait for are not made yet. In the steady state, the throughput of a line is that of its slowest stage. How to cut a model so that no stage is slow is a topic of unit 05.
#
# **Here is a good place to stop.** So far it was about time. The rest is about what it costs. When you come back, run the cells from the top: it takes less than a minute.

# %% [markdown]
# ## 6. Whose recipe was it?
#
# Now the bill. Think of cup 5 at station 0. It goes down the line, made by the recipe on the card as it is now. While it is away, three earlier cups come back, and each time station 0 changes its card. When cup 5 comes back, the question is: "It is too sweet. How would *your recipe* have to change?" But the recipe that made cup 5 is no longer on the card.
#
# That careless shop keeps one card per station and always reads what is on it. In pipeschool its name is `weights="latest"`.
#
# **Predict.** Will the run below fail? Will PyTorch print a warning? Will the loss go up?

# %%
careless = ps.Schedule.from_workers(my_order, p=4, m=12, weights="latest", name="latest")
first_960 = [(inputs[:960], targets[:960])]
run_latest = ps.run(careless, stages, first_960, loss=loss, optimizer=sgd, pace=(0.02, 0.04))

print("loss of each microbatch:", *(f"{value:.2f}" for value in run_latest.losses))

# %% [markdown]
# No error and no warning, and the loss looks like any other loss. If something is wrong here, nobody will tell you. So keep books.
#
# Every span of a trace has a `.version`. Version 0 is the weights at the start. Update number `t` of a stage makes version `t + 1`, and every F and B notes which version it used. Here is the book of worker 0.

# %%
for span in run_latest.trace.rows[0][:16]:
    verb = "makes" if span.action.kind == "U" else "uses "
    print(f"{span.action!s:>4} {verb} version {span.version}")

# %% [markdown]
# Find microbatch 3 in it. Which version did its forward use, and which one its backward? Now the whole run, one colour for each version. Forwards are in the upper lane, backwards in the lower one.

# %%
ps.draw.versions(run_latest.trace)

# %% [markdown]
# A thick edge marks a backward that met other weights than its forward.
#
# ### Exercise 7: catch them (3 points)


# %%
def mismatched(trace: ps.Trace) -> list[tuple[int, int]]:
    """All pairs (stage, microbatch) whose F and B did not use the same weight version.

    trace: its .spans hold the actions of all workers; see .action and .version of a span.
    The order of the pairs is yours.

    Example: mismatched(ps.simulate(ps.gpipe(p=2, m=4))) is [], for a flush lets no weights
    change while a microbatch is on its way.
    """
    ### BEGIN SOLUTION
    used = {span.action: span.version for span in trace.spans}
    return [
        (action.stage, action.microbatch)
        for action, version in used.items()
        if action.kind == "B" and version != used[ps.F(action.stage, action.microbatch)]
    ]
    ### END SOLUTION


# %%
grade.check(mismatched, points=3)
### BEGIN HIDDEN TESTS
grade.check(mismatched, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
catch = grade.yours(mismatched)
print("\nmicrobatches whose forward and backward met different weights, of 12:")
for stage in range(4):
    caught = sorted(k for s, k in catch(run_latest.trace) if s == stage)
    print(f"stage {stage}: {len(caught):>2}  {caught}")
print(f"\nin your run with stashing: {len(catch(measured_stream.trace))}")

# %% [markdown]
# Two things to notice. Microbatch 0 is never among them, and the last stage is always clean. Why? It does each backward directly after the forward, with no update in between.
#
# Is it bad luck, a race that goes another way next time? No. The *order* of a row decides, and no clock. So you can know the versions without any run.
#
# ### Exercise 8: predict the versions (3 points)
#
# Count updates in the row of your order, under `"latest"`. How many come before the forward of microbatch $k$ on stage $s$, and how many before its backward?


# %%
def versions_met(stage: int, microbatch: int, p: int) -> tuple[int, int]:
    """The weight versions that (F, B) of a microbatch use in async_order, under "latest".

    Example: versions_met(stage=3, microbatch=7, p=4) is (7, 7): the last stage has made seven
    updates when microbatch 7 comes, and makes none before its backward.
    """
    ### BEGIN SOLUTION
    return max(0, microbatch - (p - 1 - stage)), microbatch
    ### END SOLUTION


# %%
grade.check(versions_met, points=3)
### BEGIN HIDDEN TESTS
grade.check(versions_met, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
predict = grade.yours(versions_met)
work = [span for span in run_latest.trace.spans if span.action.kind != "U"]
agree = 0
for span in work:
    forward_version, backward_version = predict(span.action.stage, span.action.microbatch, p=4)
    agree += span.version == (forward_version if span.action.kind == "F" else backward_version)
print(f"\nyour formula and the books of the real run agree on {agree} of {len(work)} actions")

# %% [markdown]
# Once the line is full, the two versions on stage $s$ are $p - 1 - s$ updates apart. The further up the line, the worse.

# %% [markdown]
# ## 7. A gradient of what?
#
# Different versions: does it matter? Take the smallest line there is. Every station has one weight, and multiplies. A cup $x$ leaves the line as $w_2 w_1 w_0 x$, and the loss is $\frac{1}{2}(\text{output} - \text{target})^2$.
#
# On the way back each station gets a number, the gradient of the loss with respect to what it sent. From it the station works out two things: the gradient of its own weight (times what came *in* on the way down), and the message to the station before it (times *its own weight*). The last one gets output − target.
#
# Let a station's weight change while the cup is away. What does station 0 compute?
#
# ### Exercise 9: the torn gradient (3 points)


# %%
def first_gradient(x: float, target: float, down: list[float], up: list[float]) -> float:
    """What station 0 takes for the gradient of the loss with respect to its weight.

    down: every station's weight as the cup went down the line, station 0 first.
    up: every station's weight as its backward reads it, also station 0 first.

    Example: first_gradient(x=2, target=1, down=[3], up=[3]) is 10: the output is 6, so the
    error is 5, times what came in.
    """
    ### BEGIN SOLUTION
    cup = x
    for weight in down:
        cup = weight * cup
    message = cup - target
    for weight in reversed(up[1:]):  # what the stations after station 0 send back
        message = message * weight
    return message * x
    ### END SOLUTION


# %%
grade.check(first_gradient, points=3)
### BEGIN HIDDEN TESTS
grade.check(first_gradient, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Does PyTorch do that? The next cell overwrites one weight between a forward and its backward. It writes to `.data`, because autograd does not look there. (Unit 03 shows what happens where it does look.)

# %%
torn = grade.yours(first_gradient)
x, target, before, after = 2.0, 1.0, [3.0, 2.0, 1.0], [3.0, 5.0, 1.0]

weights = [torch.tensor(w, requires_grad=True) for w in before]
cup = torch.tensor(x)
for weight in weights:
    cup = weight * cup
overwritten = (cup - target) ** 2 / 2
weights[1].data.fill_(after[1])  # station 1 changes its card while the cup is away
overwritten.backward()

print(f"\nwith the old weights {torn(x, target, before, before):g}", end=", ")
print(f"with the new ones {torn(x, target, after, after):g}", end=", ")
print(f"torn {torn(x, target, before, after):g}")
print(f"PyTorch, overwritten: {weights[0].grad:g}")

# %% [markdown]
# Old error, new weights. The result belongs neither to the old weights nor to the new ones.
#
# ### Caught in the act
#
# And in the real pipeline? Let us be generous to it. With no barrier, different stages hold different versions at any time. So we do not ask for the gradient of *one* version of the whole model. Each stage may have used *any* version that it ever held. We compute the right gradient for every such mix, in one process, and look for the mix that comes closest to what the four workers computed.
#
# `history=True` makes the run note the weights after every update, `result.gradients` holds the gradients of the last microbatch, and 64-bit numbers keep rounding out of it.

# %%
exact = [copy.deepcopy(stage).double() for stage in stages]
size, n = 10, 4  # digits in a microbatch, microbatches in the stream
x, y = inputs[: n * size].double(), targets[: n * size]


def flat(gradients):
    """The gradients of one stage as one long vector."""
    return torch.cat([g.flatten() for g in gradients])


def right_gradients(history, mix):
    """Of the last microbatch, where stage s uses version mix[s] in forward and backward."""
    weights = [
        {name: w.clone().requires_grad_() for name, w in history[version][stage].items()}
        for stage, version in enumerate(mix)
    ]
    cup = x[-size:]
    for stage, chosen in zip(exact, weights, strict=True):
        cup = torch.func.functional_call(stage, chosen, (cup,))
    loss(cup, y[-size:]).backward()
    return [flat(w.grad for w in chosen.values()) for chosen in weights]


def off(ours, right):
    """The length of the difference over that of the right one."""
    return ((ours - right).norm() / right.norm()).item()


print("                            nearest of 256 mixes     off by, stage 0 to 3, then all")
for policy, lr in (("latest", 0.1), ("latest", 1.0), ("stash", 1.0)):
    schedule = ps.Schedule.from_workers(my_order, p=4, m=n, weights=policy)
    result = ps.run(
        schedule,
        exact,
        [(x, y)],
        loss=loss,
        optimizer=lambda parameters, lr=lr: torch.optim.SGD(parameters, lr=lr),
        history=True,
    )
    ours = [flat(gradients.values()) for gradients in result.gradients]
    tried = {}
    for mix in itertools.product(range(n), repeat=4):
        tried[mix] = right_gradients(result.history, mix)
    nearest = min(tried, key=lambda mix: off(torch.cat(ours), torch.cat(tried[mix])))
    errors = [off(a, b) for a, b in zip(ours, tried[nearest], strict=True)]
    errors.append(off(torch.cat(ours), torch.cat(tried[nearest])))
    print(f"{policy:<7} learning rate {lr:<5} {nearest!s:>17}", end="        ")
    print(*(f"{error:>7.1%}" for error in errors))

# %% [markdown]
# Read the table line by line.
#
# - Under `latest`, no mix fits: this is not the gradient of any model that the stages ever were. The error grows with the learning rate, because between forward and backward the weights have moved further.
# - The last stage is right, and so is the one before it. Stage 3 changed nothing between its F and B, so the message that it sends up is right. What stage 2 sends on is not. Every stage up the line adds an error of its own, as your `first_gradient` says.
# - The last line shows that the test is a fair one. With *stashing*, one mix fits to the last digit.
#
# At the smallest learning rate you might not even notice. That is why it is dangerous: training goes on, a little worse or a lot worse, and no message tells you. And look at the mix in the last line: every stage used *another* version. Stashing makes the gradient right, but of a model in which every stage is of another age. Is that good enough? That is unit 03.

# %% [markdown]
# ## 8. The claims lab
#
# As in unit 01: decide first, and write `"right"`, `"wrong"` or `"half"` in place of the `"?"`. Then run the cell. Only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > For $p = 4$, $m = 8$ and $t_F = t_B = 2$, synchronous training takes 128 seconds, and asynchronous training $(p + m - 1)(t_F + t_B) = 44$. So asynchrony makes it 65.6% shorter.

# %%
verdicts[1] = "?"

twos = ps.Cost(forward=2, backward=2)
times = {}
for schedule in (ps.naive(4, 8), ps.gpipe(4, 8), ps.one_f_one_b(4, 8), ps.pipedream(4, 8)):
    times[schedule.name] = ps.simulate(schedule, twos).makespan
    kind = "synchronous" if schedule.synchronous else "asynchronous"
    print(f"{schedule.name:<12} {kind:<13} {times[schedule.name]:g} s")
print(f"\nshorter than naive: {1 - times['pipedream'] / times['naive']:.1%}", end=", ")
print(f"shorter than gpipe: {1 - times['pipedream'] / times['gpipe']:.1%}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** Both numbers are real, but they do not belong to these names. 128 is one cup at a time, no pipeline at all. 44 is what every pipeline takes for one batch, a synchronous one too. The 65.6% are the gain of pipelining. Asynchrony gains nothing in this example.
# </details>
#
# ### Claim 2
#
# > With many stages or few microbatches it is different: there asynchrony speeds up even a single batch.

# %%
verdicts[2] = "?"

largest = max(
    ps.simulate(ps.gpipe(p, m), c).makespan - ps.simulate(ps.pipedream(p, m), c).makespan
    for p in range(1, 9)
    for m in range(1, 9)
    for c in (ps.Cost(1, 1), ps.Cost(1, 2), ps.Cost(3, 1))
)
print(f"for all p and m up to 8, GPipe takes at most {largest:g} s longer for one batch")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** The last backward of a batch ends at the same time, for all $p$ and $m$. What asynchrony saves is the wait between a batch and the next one, and with one batch there is no next one.
# </details>
#
# ### Claim 3
#
# > PipeDream's bubble is 0.

# %%
verdicts[3] = "?"

even, uneven = ps.Cost(1, 2), ps.Cost([1, 1, 2, 1], [2, 2, 4, 2])
for name, c in (("equal stages", even), ("stage 2 twice as slow", uneven)):
    for n in (8, 80, 800):
        trace = ps.simulate(ps.pipedream(p=4, m=n), c)
        print(f"{name:<22} n = {n:<5} bubble {trace.bubble_of_total:>6.2%} of total")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** In the steady state with equal stages nobody waits. Start-up and drain remain, and become negligible only in a long stream. And where stages are unequal, the fast ones wait for the slow one for ever.
# </details>
#
# ### Claim 4
#
# > PipeDream's stage 0 updates its weights right after its own forward. The later stages then use the newer weights for the same microbatch.

# %%
verdicts[4] = "?"

row = measured_stream.trace.rows[0]
print("worker 0:", " ".join(str(span.action) for span in row[:10]), "...")
firsts = []
for worker_row in measured_stream.trace.rows:
    firsts.append(next(span for span in worker_row if span.action.kind == "U"))
for span in sorted(firsts, key=lambda span: span.end):
    print(f"stage {span.worker} makes its first update {span.end * 1000:>4.0f} ms after the start")
print("\nWhat must come before an update? And which stage is the first to make one?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** An update needs a gradient, and a gradient needs the backward. That comes to stage 0 last of all, so stage 0 is the last to make its first update. The versions of other stages have nothing to do with stage 0's: every stage updates its own weights, and with stashing each keeps what its forward used.
# </details>
#
# ### Claim 5
#
# > The more microbatches a batch has, the more there is to gain from asynchrony.

# %%
verdicts[5] = "?"

for m in (2, 4, 8, 16, 32):
    batches = 320 // m
    slow, fast = (
        ps.simulate(build(p=4, m=m, batches=batches), cost).makespan
        for build in (ps.gpipe, ps.pipedream)
    )
    print(f"{batches:>4} batches of {m:>2}: {slow:>5g} s with flushes, {fast:g} s without", end="")
    print(f", gain {slow / fast:.2f}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong**, it is the other way round. The stream does not care how it is divided into batches. GPipe's flushes are fewer when batches are larger. With batches large enough, a synchronous pipeline loses little, and it keeps the right gradient. That is one reason why large models are mostly trained synchronously.
# </details>
#
# ### Claim 6
#
# > Under `latest` the loss still falls. So the gradients must be right.

# %%
verdicts[6] = "?"

lr = 0.2
ten = ps.Schedule.from_workers(my_order, p=4, m=8, batches=10, weights="latest")
for policy in ("latest", "stash"):
    trained = ps.run(
        ten,
        stages,
        twenty[:10],
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        weights=policy,
    )
    first, last = sum(trained.losses[:20]) / 20, sum(trained.losses[-20:]) / 20
    torn_ones = len(catch(trained.trace))
    print(f"{policy:<7} mean loss of the first 20 microbatches {first:.3f}", end=", ")
    print(f"of the last 20 {last:.3f}; torn: {torn_ones} of {4 * 80}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** A falling loss says that the steps point downhill more often than not. It does not say that they are gradients. Section 7 measured how far off they are. At a small learning rate the two runs look alike, and only the books tell them apart. **Try it:** set `lr` to 0.5, then to 1. Which of the two gives up first?
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit02.CLAIMS)

# %% [markdown]
# ## Summary
#
# - A flush makes the line run empty and fill again after every batch: $\text{batches} \cdot (m + p - 1)$ slots of $t_F + t_B$ seconds. A stream without flushes takes $n + p - 1$ slots for $n$ microbatches.
# - One batch gains nothing. In the limit a stream is $(m + p - 1)/m$ times as fast.
# - Worker $s$ needs at most $p - s$ microbatches in flight. It updates as soon as a backward is done.
# - The bubble is still there, at start-up and drain, but paid once. The slowest stage sets the pace.
# - A pipeline raises throughput. It does not shorten the way of one microbatch.
# - The price: weights change while a microbatch is on its way. Where each stage keeps only its latest weights, forward and backward of one microbatch use different versions, $p - 1 - s$ updates apart on stage $s$. The result is the gradient of no model that ever existed, and nothing warns you.
#
# ## Check yourself
#
# 1. A colleague changed from GPipe to PipeDream, with 8 stages and 56 microbatches in a batch. How much faster can the training get at most?
# 2. Your stream makes 100 microbatches per second on 4 equal stages. About how long is one microbatch on its way?
# 3. Under `latest` with 4 stages, how many updates lie between the forward and the backward of a microbatch on stage 1? And on stage 3?
#
# <details>
# <summary>Answers</summary>
#
# 1. By a factor of (56 + 7) / 56 = 1.125, for equal stages and a long stream. What it does to learning is another matter.
# 2. About 4 / 100 s = 40 ms. The number on the way is throughput times latency, and in the steady state that number is 4.
# 3. Two on stage 1, none on stage 3: it is $p - 1 - s$.
# </details>
#
# Next: [weight versions](../03_weight_versions/weight_versions.ipynb). Whose gradient is this, and may I use it?
