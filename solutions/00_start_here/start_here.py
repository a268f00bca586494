# %% [markdown]
# # Start here
#
# In ten minutes you will have
#
# - started four real worker processes that train one model together,
# - seen in a chart who worked when,
# - checked that everything the course needs works on this machine.
#
# **You need** nothing but this notebook. No GPU, no cloud account, no download. Run a cell with Shift+Enter, from top to bottom.

# %% [markdown]
# ## The shop
#
# A tea shop has a line of four stations: take the order, brew the tea, add the toppings, seal the lid. A cup of tea moves down the line from station to station.
#
# A model that is too large for one device is cut up in the same way. Its layers become four *stages*, and each stage lives on a *worker* of its own. A small part of the training data, a *microbatch*, moves down the line like a cup. That is the *forward*. Then it has to come back up the line, from the last station to the first, and tell each one how to adjust its recipe. That is the *backward*.
#
# | in the shop | in training |
# |---|---|
# | station | stage, on a worker |
# | cup | microbatch |
# | down the line | forward |
# | back up the line | backward |
# | recipe card | weights |
# | cups standing on the counter | activations kept in memory |
#
# Here is the model: four stages, each a small layer. Every stage says once in which process it works.

# %%
import os

import pipeschool as ps
import torch
from torch import nn


class Station(nn.Module):
    """One stage of the model: a linear layer that says where it works."""

    def __init__(self, job: str):
        super().__init__()
        self.job = job
        self.layer = nn.Linear(16, 16)
        self.greeted = False

    def forward(self, cup: torch.Tensor) -> torch.Tensor:
        if not self.greeted:
            print(f"I {self.job}, in process {os.getpid()}")
            self.greeted = True
        return torch.tanh(self.layer(cup))


torch.manual_seed(0)
jobs = ["take the order", "brew the tea", "add the toppings", "seal the lid"]
stages = [Station(job) for job in jobs]
batch = (torch.randn(64, 16), torch.randn(64, 16))  # 64 samples: inputs and targets

print(f"this notebook is process {os.getpid()}")

# %% [markdown]
# ## Four workers, one batch
#
# The next cell starts four processes. They get one stage each, and train on one batch of 64 samples, cut into 8 microbatches of 8. In which order does each worker do its forwards and backwards? That is called a *schedule*. This one is GPipe: first all forwards, then all backwards.
#
# Your machine may have fewer than four cores. So the stages are *paced*. Each really computes and really sends its result to its neighbour. But it begins a forward when it has its input in hand, and waits until 20 milliseconds are over before it hands on the result; for a backward 40. A worker that waits needs no core. That way you see the gaps that four devices would have. A paced chart always says so.
#
# Every time that you will see was read from a clock. So whatever comes on top is in it too: messages, updates, an operating system that wakes a worker late. What a paced run cannot show is how fast *this* machine is. Four stages that compute at full speed on two cores have to share them. The section before the summary lets you see that.
#
# **Predict first.** A forward takes 20 ms and a backward 40 ms, and each worker does 8 of both. That is 480 ms of work per worker. Will the four of them be done after 480 ms?

# %%
schedule = ps.gpipe(p=4, m=8)  # p stages, m microbatches
pace = (0.02, 0.04)  # seconds of a forward, of a backward

result = ps.run(
    schedule,
    stages,
    [batch],
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    pace=pace,
)

work = schedule.m * sum(pace)
late = result.trace.makespan - work
print(f"work of one worker: {work * 1000:.0f} ms")
print(f"done after:         {result.trace.makespan * 1000:.0f} ms, {late * 1000:.0f} ms later")
print(f"unit 01 will say:   {(schedule.p - 1) * sum(pace) * 1000:.0f} ms later")

# Microbatches may differ in size by one sample, so each loss counts as often as it has samples.
sizes = [len(part) for part in batch[0].tensor_split(schedule.m)]
total = sum(size * loss for size, loss in zip(sizes, result.losses, strict=True))
print(f"loss of the batch:  {total / sum(sizes):.3f}")

# %% [markdown]
# Four lines came from four processes, and each has a number of its own. What a worker prints always reaches the cell that started it.
#
# And no, the work of one worker was not all: everybody also had to wait. How long stands at the end of the second line. In unit 01 you will work it out beforehand, as $(p - 1) \cdot (20 + 40)$ ms for $p$ stages: that is the third line. What you measured is a little more. Messages take time, a worker needs a moment between two actions, and it may be woken late. The comparison below says how much of each there was.
#
# Now the chart of what they did. Each row is a worker, each box an action, and the number in the box is the microbatch.

# %%
ps.draw.gantt(result.trace)

# %% [markdown]
# Look at the picture for a minute and answer for yourself:
#
# - Worker 3 starts late. What is it waiting for?
# - Worker 0 has a long gap in the middle. What is it waiting for?
# - The thin black line at the end of each row is the update of the weights. Why does it come last?
#
# <details>
# <summary>Answers</summary>
#
# Worker 3 waits until the first microbatch has come through the three stages before it. Worker 0 is done with its forwards, and waits until the first microbatch has gone all the way down and come back. The update comes last because it needs the gradients of all eight microbatches.
# </details>
#
# The grey gaps are the *bubble*. Everything in this course is about the bubble, and about what it costs to make it smaller.

# %% [markdown]
# ## Prediction against measurement
#
# A schedule is plain data, so it can also be simulated. The next cell predicts the chart from the schedule and the declared pace, without running anything, and puts the measured one below it.

# %%
predicted = ps.simulate(schedule, ps.Cost(*pace))  # the pace is declared, so it is known before
ps.draw.compare(predicted, result.trace)

# %% [markdown]
# They should agree to within a few percent. The line below the charts says by how much the run was longer, and why: *actions* that took longer than declared, *messages* on their way, and the time *between actions*. If it speaks of *a worker that the machine kept waiting*, something else was running on your machine: go back and run the cell that calls `ps.run` again.
#
# You will write such a simulator yourself in unit 01. There you will also predict, before anything runs, how long the gaps are.
#
# **Try it.** Change `m=8` to `m=2` at the top of the cell that calls `ps.run`. Then run three cells again: that one, the chart below it, and this section's comparison. Which part of the time is grey now? How many milliseconds does a worker wait, and how many did it wait before?
#
# <details>
# <summary>Answer</summary>
#
# More than half of the time is grey. Yet the waiting at the end of the second line is about what it was, and the third line did not change at all: only the work between the gaps has become less. (The pace is per microbatch, so two microbatches are also less work than eight. A real microbatch of 32 samples would take longer than one of 8.)
# </details>

# %% [markdown]
# ## Check your installation
#
# Each line below is `ok`, or it says what is wrong and how to mend it.

# %%
from pipeschool import grade

grade.self_check()

# %% [markdown]
# ## If you like: at full speed
#
# Two larger stages, and no pace. Now the prediction comes from a stop-watch: `ps.profile` runs one stage after the other in this notebook's own process, and notes the seconds of each.

# %%
heavy = [
    nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(2)
]
large = (torch.randn(2048, 512), torch.randn(2048, 512))
line = ps.gpipe(p=2, m=8)

cost = ps.profile(heavy, large, m=8)  # seconds of a forward and a backward of each stage, alone
full_speed = ps.run(line, heavy, [large])  # mse_loss, where no loss is given
print(f"{line.p} workers on a machine with {os.cpu_count()} cores")
ps.draw.compare(ps.simulate(line, cost), full_speed.trace)

# %% [markdown]
# Most likely the run took longer than the prediction, by more than a paced one. The stop-watch timed each stage alone; here two work at the same time and share the memory of the machine, so their *actions* take longer. And *a worker that the machine kept waiting* had no core, because another program had it: run the cell again. If the line says that *workers share* a core, there are fewer cores than workers: then that does not help, and more devices would.

# %% [markdown]
# ## Summary
#
# - A *stage* is a part of the model, a *worker* a process that holds one, a *microbatch* a part of the batch.
# - A *schedule* says who does what in which order. The same schedule can be simulated, drawn, and run on real processes.
# - The idle gaps in the chart are the *bubble*.
#
# ## Check yourself
#
# 1. Which of these moves between two workers in the forward: weights, activations, or gradients?
# 2. Why are the stages in this notebook paced?
# 3. What does a worker do during the bubble?
#
# <details>
# <summary>Answers</summary>
#
# 1. Activations: what one stage returns is what the next one gets. Gradients travel the other way, in the backward. Weights stay where they are.
# 2. So that a machine with few cores shows the gaps that one device per stage would have. The work and the messages are real, and so are the times on the clock. Declared is only how long an action lasts at least.
# 3. Nothing. It waits for a message from its neighbour.
# </details>
#
# Next: [the synchronous bubble](../01_synchronous_bubble/synchronous_bubble.ipynb). Why are three of four workers idle, and what do microbatches buy?
