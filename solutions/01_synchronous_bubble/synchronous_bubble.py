# %% [markdown]
# # The synchronous bubble
#
# Why are three of four workers idle, and what do microbatches buy?
#
# **After this unit you can**
#
# - write the order of one worker's actions, naive and GPipe, and run it on real workers,
# - work out by hand when every action starts, how large the bubble is, and what it costs in memory,
# - check that a pipeline computes exactly the gradient that one process computes,
# - judge what people say about the bubble, with a number of your own.
#
# **It takes** two sittings of about 45 minutes. A line after section 4 says where to stop. **You need** [unit 00](../00_start_here/start_here.ipynb), Python, and to have trained some model in PyTorch.
#
# Ten exercises earn points. Each comes with a cell that checks your answer and says what is wrong, as often as you like. What you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so. So you can skip an exercise and go on with the cells below it.
#
# Run the cells one by one, with Shift+Enter. *Run All Cells* stops at the first exercise that is not solved yet, because its check fails. If that happens, go on below it by hand.

# %%
import os

import pipeschool as ps
import torch
from pipeschool import grade, lateness
from sklearn.datasets import load_digits
from torch import nn

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

print(f"{len(inputs)} digits, {len(stages)} stages")

# %% [markdown]
# ## 1. One cup at a time
#
# The tea shop has four stations in a line, with one person at each. The old manager has a simple rule: one cup at a time. The first person takes the order and passes the cup on. It is brewed, topped and sealed. The last person also tastes it (that is the *loss*), and then it goes back up the line, and everybody notes what they should change about their recipe. Only then is the next order taken. The recipes themselves change once, at the end, when all cups of the batch are back.
#
# This is *naive model parallelism*. The model is cut into $p$ stages, one per worker, because it does not fit on one device. The batch is worked on in $m$ parts, one after the other.
#
# **Predict.** Four workers, eight parts. One forward takes 1 second on each stage, one backward 2 seconds. When is the batch done? Write your guess into the cell. A wrong one costs nothing.

# %%
guess_naive = None  # seconds, a number

# %% [markdown]
# ### Exercise 1: the naive order (2 points)
#
# A schedule says, for every worker, what it does and in which order. It is written with two kinds of action: `ps.F(stage, k)` is the forward of part number `k` on a stage, `ps.B(stage, k)` its backward. Printed, they look like `2F0` and `2B0`. Everything is counted from 0, and worker number `w` holds stage number `w`.
#
# Write down what one worker does under the old manager's rule.


# %%
def naive_order(worker: int, p: int, m: int) -> list[ps.Action]:
    """All actions of `worker`, in order, when one part at a time goes down the line and back.

    worker: from 0 to p - 1; it holds stage number `worker`.
    p, m: how many workers there are, and into how many parts the batch is cut.

    Example: naive_order(worker=1, p=4, m=1) is [ps.F(1, 0), ps.B(1, 0)].
    """
    ### BEGIN SOLUTION
    order = []
    for k in range(m):
        order += [ps.F(worker, k), ps.B(worker, k)]
    return order
    ### END SOLUTION


# %%
grade.check(naive_order, points=2)
### BEGIN HIDDEN TESTS
grade.check(naive_order, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# `ps.Schedule.from_workers` asks your function for the row of every worker. `ps.simulate` works out when everything happens.

# %%
naive = ps.Schedule.from_workers(grade.yours(naive_order), p=4, m=8, name="naive")
cost = ps.Cost(forward=1, backward=2)
predicted_naive = ps.simulate(naive, cost)

grade.reveal(guess_naive, predicted_naive.makespan, "seconds")
ps.draw.gantt(predicted_naive)

# %% [markdown]
# Draw a vertical line anywhere through the chart: it meets exactly one box. One worker works, three wait. Nothing is ever done at the same time, so the times simply add up:
#
# $$T_{\text{naive}} = m \, p \, (t_F + t_B)$$
#
# Here $p$ is the number of stages, $m$ the number of parts, $t_F$ and $t_B$ the seconds of one forward and one backward of one part on one stage. More workers make the *model* fit. They do not make the batch faster.
#
# That was a drawing. The next cell runs your order on four real processes, on handwritten digits. As in unit 00 the stages are paced: they really compute and send, and a forward ends no earlier than 20 ms after its input was there, a backward no earlier than 40 ms. All times are from the clock. The prediction above the measurement is in seconds too. It is made from the declared pace, without looking at the run.

# %%
pace = (0.02, 0.04)  # seconds of a forward, of a backward
measured_naive = ps.run(naive, stages, [(inputs, targets)], loss=loss, pace=pace)
ps.draw.compare(ps.simulate(naive, ps.Cost(*pace)), measured_naive.trace)

# %% [markdown]
# The line below the charts says by how much the run was longer, and why. That is what a drawing leaves out: messages, and moments between actions. If it speaks of *a worker that the machine kept waiting*, run the cell again. (A paced run does not show how four stages at full speed share your cores. Section 3 does.)
#
# Why do they not all work at once? Because of what an action needs. A forward needs the result of the stage before it, and a backward needs the gradient from the stage after it. While your cup is with somebody else, you wait.

# %% [markdown]
# ## 2. Cut the batch
#
# A new manager comes. She cannot change what a cup needs. But she sees that *different* cups do not need each other. While cup 0 is being brewed, the order of cup 1 can be taken.
#
# From now on we call the parts *microbatches*. Two numbers describe them, and people mix them up:
#
# - the **count** $m$: how many microbatches one batch is cut into,
# - the **size**: how many samples are in one microbatch, about (samples in the batch) / $m$.
#
# With a fixed batch, more means smaller.
#
# Our batch has 1797 digits. Eight does not divide that.
#
# ### Exercise 2: split a batch (2 points)
#
# The slowest cup sets the pace of the whole line, so no microbatch should be larger than it has to be.


# %%
def split_batch(samples: int, m: int) -> list[int]:
    """The sizes of `m` microbatches that share `samples` samples as evenly as possible.

    Every microbatch gets at least one sample (samples >= m). The order of the sizes is yours.

    Example: split_batch(samples=6, m=3) is [2, 2, 2].
    """
    ### BEGIN SOLUTION
    size, left_over = divmod(samples, m)
    return [size + 1] * left_over + [size] * (m - left_over)
    ### END SOLUTION


# %%
grade.check(split_batch, points=2)
### BEGIN HIDDEN TESTS
grade.check(split_batch, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 3: the weight of each loss (2 points)
#
# The loss of a batch is the mean over *all its samples*. The last stage only ever sees one microbatch, and computes the mean over *its* samples. Training must not depend on how we cut. So each microbatch's loss gets a weight, and the weighted losses must add up to the loss of the batch. Their gradients then add up to the gradient of the batch.


# %%
def loss_weights(sizes: list[int]) -> list[float]:
    """The weight of each microbatch's mean loss in the mean loss of the batch.

    sizes: how many samples each microbatch has.

    Example: loss_weights(sizes=[5]) is [1.0].
    """
    ### BEGIN SOLUTION
    samples = sum(sizes)
    return [size / samples for size in sizes]
    ### END SOLUTION


# %%
grade.check(loss_weights, points=2)
### BEGIN HIDDEN TESTS
grade.check(loss_weights, points=2, seed=grade.seed())
### END HIDDEN TESTS


# %% [markdown]
# Does it hold in PyTorch? The next cell adds up the gradients of the microbatches, one backward after the other, and compares the sum with the gradient of the whole batch. It tries your weights, no weights at all, and $1/m$ for everybody. It does so for your sizes, and for very uneven ones. The *ratio* says how many times as long as the right gradient the sum is, and the *error* how far off it is, in lengths of the right gradient.


# %%
def gradient(sizes, weights):
    """The gradient of the first layer, added up microbatch by microbatch."""
    model.zero_grad()
    for x, y, weight in zip(inputs.split(sizes), targets.split(sizes), weights, strict=True):
        (weight * loss(model(x), y)).backward()
    return model[0].weight.grad.clone()


whole = gradient([len(inputs)], [1.0])
even = grade.yours(split_batch)(len(inputs), 8)
weigh = grade.yours(loss_weights)

for sizes in (even, [1000, 500, 200, 97]):
    m = len(sizes)
    print(f"\nm = {m}, sizes {sizes}\n{'weights':<12}{'ratio':>8}{'error':>10}")
    for name, weights in (("yours", weigh(sizes)), ("none", [1.0] * m), ("1/m", [1 / m] * m)):
        found = gradient(sizes, weights)
        ratio = (found.norm() / whole.norm()).item()
        error = ((found - whole).norm() / whole.norm()).item()
        print(f"{name:<12}{ratio:>8.2f}{error:>10.1e}")

# %% [markdown]
# With microbatches of (almost) the same size, the gradient without weights is $m$ times as long as it should be. That is the ratio; the error is $m - 1$ lengths, for so much is too much. With plain SGD you would see it at once, because the steps are $m$ times too long. Adam divides by the size of the gradient, so it hides the mistake.
#
# With uneven sizes it is not $m$ times. It even points in another direction, because samples in small microbatches count for more than the others. For the same reason $1/m$ is right only while all microbatches have the same size. Your weights are off by rounding only. pipeschool's runtime weighs exactly as you just did.

# %% [markdown]
# ## 3. Fill and drain
#
# The new manager's first rule: as soon as you have passed your cup on, take the next one. When all eight cups have been down the line, they come back up it, again one right behind the other. When the last one is back, everybody adjusts their recipe, together. That last step is the *flush*: nothing is on the way while the weights change. It makes the schedule *synchronous*.
#
# This is GPipe (Huang et al., 2019): all forwards, then all backwards.
#
# **Predict.** The same four workers, eight microbatches, $t_F = 1$, $t_B = 2$. Now when is the batch done?

# %%
guess_gpipe = None  # seconds, a number

# %% [markdown]
# ### Exercise 4: the GPipe order (3 points)
#
# The backwards may come in any order that all workers agree on. The paper draws them in reverse.


# %%
def gpipe_order(worker: int, p: int, m: int) -> list[ps.Action]:
    """All actions of `worker`, in order: its forwards, then its backwards.

    worker: from 0 to p - 1; it holds stage number `worker`.
    p, m: how many workers and how many microbatches there are; m may be smaller than p.

    Example: gpipe_order(worker=2, p=4, m=1) is [ps.F(2, 0), ps.B(2, 0)].
    """
    ### BEGIN SOLUTION
    forwards = [ps.F(worker, k) for k in range(m)]
    backwards = [ps.B(worker, k) for k in range(m)]
    return forwards + backwards
    ### END SOLUTION


# %%
grade.check(gpipe_order, points=3)
### BEGIN HIDDEN TESTS
grade.check(gpipe_order, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
gpipe = ps.Schedule.from_workers(grade.yours(gpipe_order), p=4, m=8, name="gpipe")
predicted_gpipe = ps.simulate(gpipe, cost)

grade.reveal(guess_gpipe, predicted_gpipe.makespan, "seconds")
ps.draw.gantt(predicted_naive, predicted_gpipe)

# %% [markdown]
# Both charts share one time axis, and both hold the same boxes. Only the order changed.
#
# How long does it take? Follow the forwards in the lower chart, from the top left to the bottom right. Microbatch 0 goes down the line of $p$ stages, and the other $m - 1$ follow, each $t_F$ later: all forwards are done after $(m + p - 1)\, t_F$. The backwards do the same on the way up. So
#
# $$T_{\text{GPipe}} = (m + p - 1)\,(t_F + t_B)$$
#
# The product $m \cdot p$ has become a sum.
#
# ### Now for real
#
# The same four stages, the same pace, your new order. The prediction is again made from the declared pace, in seconds.

# %%
measured_gpipe = ps.run(gpipe, stages, [(inputs, targets)], loss=loss, pace=pace)
gain = measured_naive.trace.makespan / measured_gpipe.trace.makespan
print(f"{gain:.2f} times as fast as the naive order, measured")
lateness.tell(
    {
        "naive": (ps.simulate(naive, ps.Cost(*pace)), measured_naive.trace),
        "gpipe": (ps.simulate(gpipe, ps.Cost(*pace)), measured_gpipe.trace),
    }
)
ps.draw.compare(ps.simulate(gpipe, ps.Cost(*pace)), measured_gpipe.trace)

# %% [markdown]
# Two runs can be compared if the machine disturbed neither. Their lines say so.
#
# Fast is easy if the result may be wrong. So: are the gradients those of one process without any pipeline? `pipeschool.runtime.reference` goes through all stages in this notebook's own process, without a pipeline. The next cell does that twice, with the same eight microbatches one after the other, and with the whole batch at once, and subtracts.

# %%
from pipeschool.runtime import reference

cut_up = reference.gradients(stages, [(inputs, targets)], m=8, loss=loss)
at_once = reference.gradients(stages, [(inputs, targets)], m=1, loss=loss)


def largest(gradients, others=None):
    """The largest number in a stage's gradients, or in their difference from others."""
    pairs = ((g, others[name] if others else 0) for name, g in gradients.items())
    return max((g - other).abs().max().item() for g, other in pairs)


print("          largest     largest difference from one process")
print("         gradient   8 microbatches   whole batch")
for stage, ours in enumerate(measured_gpipe.gradients):
    print(f"stage {stage}  {largest(ours):.1e}", end="")
    print(f"{largest(ours, cut_up[stage]):>17.1e}{largest(ours, at_once[stage]):>14.1e}")

# %% [markdown]
# Up to rounding, all three are the same gradient. The pipeline changed *when* things are computed, not *what*. A synchronous pipeline needs no new learning rate.
#
# (Rounding depends on the order in which floats are added. The whole batch is added up in another order than eight parts, so the last column is tiny and not 0. The middle column is 0 if your backwards run in the order of the reference. Did you let them run in reverse?)
#
# And without a pace? Here are four larger stages at full speed. The prediction comes from `ps.profile`, which runs the stages one after the other in this notebook's process, and takes the time.

# %%
heavy = [
    nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(4)
]
large = (torch.randn(2048, 512), torch.randn(2048, 512))
alone = ps.profile(heavy, large, m=8)
full_speed = ps.run(gpipe, heavy, [large])
print(f"4 workers on a machine with {os.cpu_count()} cores")
ps.draw.compare(ps.simulate(gpipe, alone), full_speed.trace)

# %% [markdown]
# With fewer cores than workers, the workers take turns on them: the line says that they are *sharing* cores, and running it again will not help. With enough cores they still share the machine's memory, so *actions* take longer than alone. A paced worker mostly sleeps, and nearly always finds a core when it needs one. So the paced run shows the bubble of four devices, and this one shows your machine.

# %% [markdown]
# ## 4. When does each action start?
#
# So far the simulator was a black box. You can build it from two rules.
#
# 1. A worker does one thing at a time, in the order of its row.
# 2. An action starts when its worker is free *and* everything it needs has ended.
#
# ### Exercise 5: what an action needs (2 points)
#
# A forward needs the activations from the stage before it. A backward needs what its own forward kept, and the gradient from the stage after it. At the ends of the line one of the two is missing: stage 0 reads the data, the last stage computes the loss itself.


# %%
def needs(action: ps.Action, p: int) -> list[ps.Action]:
    """The actions that must have ended before `action` can start.

    action: has .kind ("F" or "B"), .stage (0 to p - 1) and .microbatch.
    p: the number of stages.

    Example: needs(ps.F(0, 5), p=4) is [], for stage 0 has its data.
    """
    ### BEGIN SOLUTION
    kind, stage, k = action
    if kind == "F":
        return [ps.F(stage - 1, k)] if stage > 0 else []
    own_forward = ps.F(stage, k)
    return [own_forward, ps.B(stage + 1, k)] if stage < p - 1 else [own_forward]
    ### END SOLUTION


# %%
grade.check(needs, points=2)
### BEGIN HIDDEN TESTS
grade.check(needs, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 6: your own simulator (5 points)
#
# Now the clock. It is the longest exercise of the unit, and you will use it from here on.
#
# A way that works: remember for every worker when it is free, and for every action when it ended. Go round the workers. Whoever's next action has all it needs may do it. Stop when all rows are done. The stages may take different times.


# %%
def start_times(order, p: int, m: int, forward: list[float], backward: list[float]) -> dict:
    """When each action starts, in seconds from the start of the batch.

    order: a function like yours; order(worker, p, m) is the list of that worker's actions.
    forward, backward: the seconds of one forward and one backward, one number per stage.
    Returns {action: start} with every action of every worker.

    Example: start_times(naive_order, p=2, m=1, forward=[1, 1], backward=[2, 2]) is
    {ps.F(0, 0): 0, ps.F(1, 0): 1, ps.B(1, 0): 2, ps.B(0, 0): 4}.
    """
    ### BEGIN SOLUTION
    rows = [list(order(worker, p, m)) for worker in range(p)]
    free = [0.0] * p  # when each worker is free
    starts, ends = {}, {}
    while any(rows):
        for worker, row in enumerate(rows):
            while row and all(need in ends for need in needs(row[0], p)):
                action = row.pop(0)
                arrived = max((ends[need] for need in needs(action, p)), default=0.0)
                starts[action] = max(free[worker], arrived)
                seconds = forward if action.kind == "F" else backward
                ends[action] = free[worker] = starts[action] + seconds[action.stage]
    return starts
    ### END SOLUTION


# %%
grade.check(start_times, points=5)
### BEGIN HIDDEN TESTS
grade.check(start_times, points=5, seed=grade.seed())
### END HIDDEN TESTS


# %% [markdown]
# From start times to a chart is one step. The next cell makes a trace out of *your* numbers. It also makes the line uneven: adding the toppings (stage 2) now takes twice as long.
#
# **Predict.** Worker 2 has work for 8 cups, and each now takes $0.04 + 0.08$ seconds there, half of that elsewhere. Which share of the makespan will worker 2 be busy, and which share worker 0? A number between 0 and 1, or a sentence in quotes.

# %%
guess_busy_2 = None  # share of the makespan
guess_busy_0 = None

# %% [markdown]
# Run it, and look at where the gaps are.


# %%
def my_simulation(order, p, m, forward, backward):
    """A chartable trace out of start_times."""
    starts = grade.yours(start_times)(order, p, m, forward, backward)
    seconds = {"F": forward, "B": backward}
    spans = [ps.Span(a.stage, a, t, t + seconds[a.kind][a.stage]) for a, t in starts.items()]
    return ps.Trace("gpipe, slow stage 2", p, m, 1, tuple(spans), label="predicted by start_times")


forward, backward = [0.02, 0.02, 0.04, 0.02], [0.04, 0.04, 0.08, 0.04]
predicted_slow = my_simulation(grade.yours(gpipe_order), 4, 8, forward, backward)

measured_slow = ps.run(gpipe, stages, [(inputs, targets)], loss=loss, pace=(forward, backward))
print("busy share of the makespan")
for worker, guess in ((2, guess_busy_2), (0, guess_busy_0)):
    busy = predicted_slow.busy[worker]
    grade.reveal(guess, round(busy / predicted_slow.makespan, 3), f"of it, worker {worker}")
shares = [f"{busy / measured_slow.trace.makespan:.0%}" for busy in measured_slow.trace.busy]
print("Measured, workers 0 to 3:", ", ".join(shares))
print(ps.why_late(ps.simulate(gpipe, ps.Cost(forward, backward)), measured_slow.trace))
ps.draw.compare(predicted_slow, measured_slow.trace)

# %% [markdown]
# Worker 2 has twice the work of the others, so it is busy for twice their share of the makespan. Once the first cup is there it goes from cup to cup, with one short gap, between its last forward and its first backward.
#
# Where do they wait? *Behind* the slow station there is a gap after every cup: worker 3 in the forwards, workers 1 and 0 in the backwards, because they get a cup only every 40 or 80 ms. *In front of* it there is none: workers 0 and 1 do all their forwards in one go, and worker 3 all its backwards. The cups pile up before worker 2, and the wait comes in one piece. The whole batch goes at the pace of one slow station. We come back to that in the claims.
#
# **Here is a good place to stop.** The second sitting begins with the bubble, and takes about 45 minutes again. When you come back, run the cells from the top: it takes a minute.

# %% [markdown]
# ## 5. The bubble
#
# Go back to the even line. The time in which a worker waits is the *bubble*.
#
# **Predict.** Let $t_F = 1$ and $t_B = 2$, four workers, GPipe. How many seconds does *one* worker wait in all, with 4 microbatches, and with 32?

# %%
guess_idle_m4 = None  # seconds
guess_idle_m32 = None  # seconds

# %%
few, many = (ps.simulate(ps.gpipe(p=4, m=m), cost) for m in (4, 32))
for trace, guess in ((few, guess_idle_m4), (many, guess_idle_m32)):
    print(f"m = {trace.m}, makespan {trace.makespan:g} s, and one worker waits:")
    grade.reveal(guess, trace.makespan - trace.busy[0], "seconds")
ps.draw.gantt(few, many)

# %% [markdown]
# The grey triangles in the upper chart are the same as those in the lower one. Only the work between them got longer.
#
# Why? Look at the corners: worker $s$ waits for $s$ forwards until its first microbatch arrives, then after its last forward for the first backward to come back up, and at the end for the others to finish. Every worker works $m\,(t_F + t_B)$ seconds, out of a makespan of $(m + p - 1)(t_F + t_B)$. What is left over is the same for every worker:
#
# $$\text{bubble} = (p - 1)\,(t_F + t_B)$$
#
# There is no $m$ in it! The triangles are as large for 8 microbatches as for 80.
#
# **Try it.** Move the sliders, and watch the first four lines of the table. Which of them change as `m` grows, and which one stays? And as `p` grows?

# %%
ps.widgets.explore("gpipe")

# %% [markdown]
# With every microbatch the makespan grows by $t_F + t_B$, and both bubbles shrink, while the waiting of each worker stays $(p - 1)(t_F + t_B)$. It grows only with `p`, and with the times themselves. So what do microbatches buy? More useful work between the same triangles.
#
# (In the sliders one microbatch always takes the same time. With a fixed batch, more microbatches are smaller ones: then the useful part stays, and the triangles shrink. The *share* of waiting is the same in both views.)
#
# To say how bad a bubble is, divide. But by what? The papers differ, and the numbers get mixed up all the time:
#
# - **bubble of total** = waiting / makespan. Which share of the time that you pay for is wasted? (GPipe)
# - **bubble of ideal** = waiting / useful time $m(t_F + t_B)$. How much longer does it take than without any bubble? (Megatron-LM)
#
# ### Exercises 7 and 8: two bubbles (1 point each)
#
# Both for GPipe, with all stages equal. The seconds cancel, so `p` and `m` are enough.


# %%
def bubble_of_total(p: int, m: int) -> float:
    """GPipe's bubble as a share of the makespan.

    Example: bubble_of_total(p=2, m=1) is 0.5.
    """
    ### BEGIN SOLUTION
    return (p - 1) / (m + p - 1)
    ### END SOLUTION


# %%
grade.check(bubble_of_total, points=1)
### BEGIN HIDDEN TESTS
grade.check(bubble_of_total, points=1, seed=grade.seed())
### END HIDDEN TESTS


# %%
def bubble_of_ideal(p: int, m: int) -> float:
    """GPipe's bubble as a share of the useful time.

    Example: bubble_of_ideal(p=2, m=1) is 1.0.
    """
    ### BEGIN SOLUTION
    return (p - 1) / m
    ### END SOLUTION


# %%
grade.check(bubble_of_ideal, points=1)
### BEGIN HIDDEN TESTS
grade.check(bubble_of_ideal, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Your formulas against three witnesses: the simulator, the four processes from section 3, and the naive schedule, which has the same work and a far larger bubble.

# %%
of_total, of_ideal = grade.yours(bubble_of_total), grade.yours(bubble_of_ideal)
print(f"\n{'p = 4, m = 8':<28}{'of total':>10}{'of ideal':>10}")
print(f"{'your formulas':<28}{of_total(4, 8):>10.4f}{of_ideal(4, 8):>10.4f}")
for name, trace in (
    ("simulated", predicted_gpipe),
    ("measured, paced", measured_gpipe.trace),
    ("naive, simulated", predicted_naive),
):
    print(f"{name:<28}{trace.bubble_of_total:>10.4f}{trace.bubble_of_ideal:>10.4f}")
print(ps.why_late(ps.simulate(gpipe, ps.Cost(*pace)), measured_gpipe.trace))

# %% [markdown]
# The measured bubbles are a little larger than your formulas say: whatever the last line names besides actions is time in which nobody works, too.
#
# A third denominator goes around. The zero-bubble papers take the longest time any *one* worker has between its first action and its last, and ask which share of it that worker's own work leaves empty. For GPipe, worker 0 begins first and ends last, so this *zero-bubble rate* equals the bubble of total. For the schedules of unit 07 it does not. So always say which one you mean; pipeschool always prints the label.

# %% [markdown]
# ## 6. The price: a full counter
#
# Why not take $m = 1000$? In the shop, cups that have gone down the line stand on the counter until they come back. In training, a forward leaves *activations* in memory, which its backward needs. They can go only when that backward is done.
#
# Call what one worker keeps for one microbatch $A$.
#
# **Predict.** How many $A$ does worker 0 hold at most, with $p = 4$ and $m = 8$, under the naive order? Under GPipe?

# %%
guess_peak_naive = None
guess_peak_gpipe = None


# %% [markdown]
# ### Exercise 9: peak activations (2 points)


# %%
def peak_activations(actions: list[ps.Action]) -> int:
    """The most microbatches whose activations one worker holds at the same time.

    actions: what the worker does, in order. An F begins to hold, and the B of the same
        microbatch lets go when it is done. Other kinds, such as the update U, change nothing.

    Example: peak_activations([ps.F(0, 0), ps.B(0, 0)]) is 1.
    """
    ### BEGIN SOLUTION
    held = peak = 0
    for action in actions:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind == "B":
            held -= 1
    return peak
    ### END SOLUTION


# %%
grade.check(peak_activations, points=2)
### BEGIN HIDDEN TESTS
grade.check(peak_activations, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
peak = grade.yours(peak_activations)
grade.reveal(guess_peak_naive, peak(list(naive.workers[0])), "A under the naive order")
grade.reveal(guess_peak_gpipe, peak(list(gpipe.workers[0])), "A under GPipe")
ps.draw.memory(predicted_gpipe)

# %% [markdown]
# GPipe holds $m$ of them on *every* worker. (With a fixed batch each is smaller when there are more. So GPipe holds the activations of the whole batch, however you cut it. The naive order needs only those of one microbatch.) Unit 04 shows a schedule with the same bubble and a nearly empty counter.

# %% [markdown]
# ## 7. How many are enough?
#
# ### Exercise 10: the smallest m for a target (3 points)
#
# Your boss says that at most a fifth of the time you pay for may be wasted. More microbatches than needed only fill the counter. So find the smallest number that will do.
#
# (Floats are rounded. In Python `0.1 + 0.2` is 0.30000000000000004, and a `ceil` of such a number is one too high. The checks try targets that are met exactly.)


# %%
def smallest_m(p: int, target: float) -> int:
    """The smallest number of microbatches whose GPipe bubble of total is at most `target`.

    p: the number of stages, 1 or more.
    target: between 0 and 1, both excluded.

    Example: smallest_m(p=3, target=0.5) is 2.
    """
    ### BEGIN SOLUTION
    m = 1
    while (p - 1) / (m + p - 1) > target:
        m += 1
    return m
    ### END SOLUTION


# %%
grade.check(smallest_m, points=3)
### BEGIN HIDDEN TESTS
grade.check(smallest_m, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
enough = grade.yours(smallest_m)
print(f"\n{'p':>3}{'smallest m for a fifth':>26}{'as a multiple of p':>22}")
for p in (2, 4, 8, 16, 32):
    print(f"{p:>3}{enough(p, 0.2):>26}{enough(p, 0.2) / p:>22.2f}")

# %% [markdown]
# Look at the last column: it creeps up to 4 from below. So the rule of thumb "start with $m = 4p$" is a fair one: it always meets a fifth. In practice very small microbatches also use a device badly, and every message costs time. Unit 05 measures that.

# %% [markdown]
# ## 8. The claims lab
#
# Here are things that people write about synchronous pipelines. For each one: decide first, and write `"right"`, `"wrong"` or `"half"` (right in part, or only under a condition that the claim leaves out) in place of the `"?"`. Then run the cell, which computes and does not quote. Only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > A synchronous pipeline takes $m \cdot p \cdot (t_F + t_B)$: 128 seconds for $p = 4$, $m = 8$, $t_F = t_B = 2$.

# %%
verdicts[1] = "?"

twos = ps.Cost(forward=2, backward=2)
for schedule in (ps.naive(4, 8), ps.gpipe(4, 8)):
    print(f"{schedule.name:<6} {ps.simulate(schedule, twos).makespan:g} s")
print("\nWhich of the two lines is a synchronous pipeline?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** The formula belongs to one cup at a time, which is no pipeline at all. GPipe is synchronous, and its time has the sum $m + p - 1$ in it instead of the product. A comparison with that formula makes any schedule look good.
# </details>
#
# ### Claim 2
#
# > GPipe's bubble is $(P - 1) / (M + P - 1)$.

# %%
verdicts[2] = "?"

off = max(
    abs(ps.simulate(ps.gpipe(p, m)).bubble_of_total - (p - 1) / (m + p - 1))
    for p in range(1, 9)
    for m in range(1, 25)
)
print(f"for all p up to 8 and m up to 24, the formula is off by {off:.1e} at most")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, of total, for equal stages and free messages. Over the ideal time it is $(P - 1) / M$. A bubble without its denominator is half a number.
# </details>
#
# ### Claim 3
#
# > A model of 72 layers on 8 stages wastes almost half of the time with 4 microbatches, and about 18% with 32.

# %%
verdicts[3] = "?"

layers_per_stage = 72 / 8
for m in (4, 32):
    trace = ps.simulate(ps.gpipe(p=8, m=m), ps.Cost(layers_per_stage, 2 * layers_per_stage))
    print(f"m = {m:<3} {trace.bubble_of_total:.1%} of total, {trace.bubble_of_ideal:.1%} of ideal")
print("\nDoes either column give both numbers of the claim?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** The number for 32 is right, of total. The one for 4 is not "almost half" by any denominator: with fewer microbatches than stages the line never fills up, and most of the time is lost. The number of layers plays no part in it, as long as all stages are equal.
# </details>
#
# ### Claim 4
#
# > The bubble is in essence load imbalance: some stages are slower than others.

# %%
verdicts[4] = "?"

for name, times in (("balanced", [1, 1, 1, 1]), ("stage 2 twice as slow", [1, 1, 2, 1])):
    slow = ps.Cost(forward=times, backward=[2 * t for t in times])
    for m in (8, 800):
        share = ps.simulate(ps.gpipe(p=4, m=m), slow).bubble_of_total
        print(f"{name:<24} m = {m:<4} {share:.1%} of total")
print("\nWhich bubble goes away with more microbatches?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** A perfectly balanced pipeline still has to fill and drain, and that is a bubble too. Imbalance comes on top of it. The two behave differently: more microbatches make filling and draining negligible, but the fast workers wait for the slow one however many there are.
# </details>
#
# ### Claim 5
#
# > Microbatches that are too large make the bubble larger.

# %%
verdicts[5] = "?"

print("one batch of 64 samples               microbatches of a fixed count, m = 8")
for size in (1, 2, 4, 8, 16):
    per_sample = ps.Cost(forward=size, backward=2 * size)
    fixed_batch = ps.simulate(ps.gpipe(p=4, m=64 // size), per_sample).bubble_of_total
    fixed_count = ps.simulate(ps.gpipe(p=4, m=8), per_sample).bubble_of_total
    print(f"size {size:<3} m = {64 // size:<3} {fixed_batch:>6.1%} of total", end="    ")
    print(f"size {size:<3} batch of {8 * size:<4} {fixed_count:>6.1%} of total")
print("\nWhat is held fixed on the left, and what on the right?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** It is true for a fixed batch, and only because of the count: larger microbatches are then fewer. At a fixed count the size does not matter to the bubble at all.
# </details>
#
# ### Claim 6
#
# > Synchronous pipelines communicate with all-gather, so everybody waits for everybody. Only asynchronous ones send from neighbour to neighbour.

# %%
verdicts[6] = "?"

lowered = ps.lower(gpipe)  # your schedule with its sends and receives, as the workers ran it
print("worker 1:", " ".join(map(str, lowered.workers[1][:9])), "...")

# Which receive belongs to which send? Ask the clocks of the real run. Of all messages of one kind
# and one microbatch, the first send goes with the first receive, the second with the second, ...
pairs = []
for kind in "FB":  # activations, gradients
    for k in range(8):
        spans = [s for s in measured_gpipe.trace.messages if s.action.microbatch == k]
        sends = sorted((s.start, s.worker) for s in spans if s.action.kind == f"SEND_{kind}")
        receives = sorted((s.end, s.worker) for s in spans if s.action.kind == f"RECV_{kind}")
        pairs += [(a, b) for (_, a), (_, b) in zip(sends, receives, strict=True)]
print(f"{len(pairs)} messages in the real run:")
for sender, receiver in sorted(set(pairs)):
    print(f"  {pairs.count((sender, receiver))} from worker {sender} to worker {receiver}")
print("\nIs there a message that is not between neighbours, or one that goes to everybody?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** GPipe sends activations to the next worker and gradients to the one before, point to point. What makes it synchronous is the flush: the *updates* wait until the batch is through.
# </details>
#
# ### Claim 7
#
# > Without microbatches ($M = 1$), eight stages are less than half again as fast as two. With 32 microbatches, eight stages are more than three times as fast as two.
#
# This one comes with measurements. Table 2 of the GPipe paper gives the speed of a Transformer on $K$ accelerators with $M$ microbatches, relative to $K = 2$, $M = 1$. Our simulator knows nothing of their machines, so compare the shape and not the digits. The batch and the model stay the same: with $K$ stages each has $1/K$ of the work, with $M$ microbatches each has $1/M$ of it.

# %%
verdicts[7] = "?"

paper = {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}  # M: speed at K = 2, 4, 8


def seconds(K, M):
    return ps.simulate(ps.gpipe(p=K, m=M), ps.Cost(1 / (K * M), 2 / (K * M))).makespan


print("            K = 2          K = 4          K = 8      K = 8 over K = 2")
for M, measured in paper.items():
    ours = [seconds(2, 1) / seconds(K, M) for K in (2, 4, 8)]
    cells = [f"{a:.2f} ({b:.2f})" for a, b in zip(ours, measured, strict=True)]
    print(f"M = {M:<4}" + "".join(f"{cell:>15}" for cell in cells), end="")
    print(f"{ours[2] / ours[0]:>12.2f} ({measured[2] / measured[0]:.2f})")
print("simulated, and the paper's own in brackets")
print("\nIs the last column below 1.5 in the first row, and above 3 in the last one?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, in the simulation and in the paper. Without microbatches the stages work one after the other, so more of them gain next to nothing; only cut up can they work at the same time. The pattern down the last column is the same in both, though the paper's numbers in the middle row are higher than fill and drain can explain: a real machine also changes in other ways when a stage gets smaller.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit01.CLAIMS)

# %% [markdown]
# ## Summary
#
# - Naive model parallelism takes $m\,p\,(t_F + t_B)$. One worker works, the others wait.
# - Microbatches do not need each other, so they can follow one another down the line. GPipe takes $(m + p - 1)(t_F + t_B)$.
# - Weigh each microbatch's mean loss by its share of the samples. Then the pipeline's gradient is the gradient of the batch, however you cut it.
# - The bubble of a worker is $(p - 1)(t_F + t_B)$, whatever $m$ is. More microbatches make its *share* smaller: $(p-1)/(m+p-1)$ of total, $(p-1)/m$ of ideal.
# - The price is memory: GPipe keeps the activations of all $m$ microbatches on every worker.
# - Imbalance is another loss, and more microbatches do not cure it.
#
# ## Check yourself
#
# 1. A colleague reports a bubble of 60%, another one a bubble of 37.5%, for the same run. Can both be right?
# 2. You double $m$ and keep the batch. What happens to the size of a microbatch, to the share of the bubble, and to GPipe's memory for activations?
# 3. Your four-stage pipeline gets a learning rate that was tuned on one device, with the same batch. Do you have to tune it again?
#
# <details>
# <summary>Answers</summary>
#
# 1. Yes. A bubble that is 60% of the ideal time is 0.6 / 1.6, that is 37.5%, of the total. They used different denominators.
# 2. The size halves. The share of the bubble falls, to a little more than half if $m$ was already much larger than $p$. The memory stays the same: twice as many microbatches, each half as large.
# 3. No. A synchronous pipeline computes the same gradient, up to rounding, and updates at the same points. Layers that look at a whole batch, such as BatchNorm, are the exception: they see microbatches.
# </details>
#
# Next: [asynchronous execution](../02_asynchronous_execution/asynchronous_execution.ipynb). What if nobody waits for the batch to end?
