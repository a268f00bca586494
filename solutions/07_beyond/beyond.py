# %% [markdown]
# # Beyond
#
# Can the bubble vanish without going stale?
#
# **After this unit you can**
#
# - write interleaved 1F1B and a zero-bubble order, and run both on real workers,
# - split the backward of a layer in two by hand, and say what the letters B and W mean in which paper,
# - tell three measures of the bubble apart, and say what each of them leaves out,
# - read a schedule off a figure in a paper: its bubble, its memory, and what it pays with,
# - write a scheduling rule, measure it against the best there is, and run the result on PyTorch's engine.
#
# **It takes** two sittings of about 60 minutes, with a place to stop after section 4. **You need** [unit 04](../04_one_forward_one_backward/one_forward_one_backward.ipynb): 1F1B, its warm-up, and what is in flight.
#
# Ten exercises earn points. As before, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
import pipeschool as ps
import torch
from pipeschool import course_data, grade
from pipeschool.grade.unit07_reading import figure
from pipeschool.runtime import reference
from pipeschool.runtime.stages.split_backward import SplitBackward
from pipeschool.schedules.pieces import take_turns
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)
(inputs, targets), _ = course_data.digits()  # 1437 handwritten digits, 64 pixels each
batch = (inputs[:1024], targets[:1024])

torch.manual_seed(0)
sizes = [64, *[128] * 7]
layers = [nn.Sequential(nn.Linear(n, 128), nn.Tanh()) for n in sizes[:-1]] + [nn.Linear(128, 10)]
stages = [nn.Sequential(*layers[i : i + 2]) for i in range(0, 8, 2)]  # two layers each
loss = nn.functional.cross_entropy
one_process = reference.gradients(layers, [batch], m=8, loss=loss)

print(f"{len(layers)} layers, which make {len(stages)} stages of two")

# %% [markdown]
# ## 1. Where the triangle comes from, once more
#
# This time *you* are the manager of the shop. You know what the others tried. One batch at a time leaves people idle. Letting nobody wait leaves nobody idle, but then gradients come late (unit 03). 1F1B keeps the counter clear, and waits exactly as long as GPipe.
#
# How long is that? Look at the last worker below. It waits for the first cup, which has to go through $p - 1$ stations. And once the last cup has left it, the cup has to go back through $p - 1$ stations.

# %%
cost = ps.Cost(forward=1, backward=2)
line = ps.simulate(ps.one_f_one_b(p=4, m=8), cost)
ps.draw.gantt(line)

# %% [markdown]
# Every worker waits
#
# $$(p - 1)\,(t_F + t_B)$$
#
# where $p$ is the number of workers, and $t_F$ and $t_B$ are the seconds of a forward and a backward of one microbatch on one worker. The number of microbatches $m$ is not in it. So more cups make the waiting a smaller *share*. They do not make it shorter.
#
# To make it shorter, there are three ideas, and this unit tries all of them:
#
# 1. **Shorter steps.** The first cup passes a worker sooner if the worker does only part of its work on it.
# 2. **Work that can wait.** If part of the work is in no hurry, do it in the gaps.
# 3. **A folded line.** If the line ends where it begins, the first cup is back sooner.
#
# None of them touches the rule of synchronous training: the weights change when the whole batch is done. So none of them can make a gradient stale.

# %% [markdown]
# ## 2. Shorter steps: interleaving
#
# Cut every station in two halves, and lay the line twice around the shop. You do the first half of your work on a cup and hand it on. Later the cup comes round again, and you do your second half.
#
# Each worker now holds $v$ *chunks* of the model (here $v = 2$), each a stage of its own. There are $vp$ stages, and stage $s$ is on worker $s \bmod p$. A forward on one chunk takes only $t_F / v$.
#
# **Predict.** In the chart above every worker waits 9 units. How many will it be with two chunks per worker?

# %%
guess_two_chunks = None  # units of cost

# %% [markdown]
# ### Exercise 1: the longer warm-up (2 points)
#
# Cups go round in groups of $p$: cups 0 to $p - 1$ through a worker's first chunk, then the same cups through its second chunk, and so on. When they have been through all chunks, the next $p$ cups follow.
#
# The *last* worker takes its first cup back when that cup has come through its *last* chunk. Until then it has done all forwards of the other $v - 1$ chunks, for $p$ cups each. (As in unit 04, the forward of the first turn does not count.)
#
# Every other worker does *two* forwards more than the next worker down the line, because a cup needs one step down and one step back. (You will see in a moment what happens with only one.)


# %%
def interleaved_warm_up(worker: int, p: int, v: int) -> int:
    """How many forwards, of one chunk each, a worker does before it takes turns.

    worker: from 0 to p - 1. v: chunks per worker, 2 or more. There are plenty of microbatches.

    Example: interleaved_warm_up(worker=5, p=8, v=2) is 12.
    """
    ### BEGIN SOLUTION
    return (v - 1) * p + 2 * (p - 1 - worker)
    ### END SOLUTION


# %%
grade.check(interleaved_warm_up, points=2)
### BEGIN HIDDEN TESTS
grade.check(interleaved_warm_up, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 2: the order (5 points)
#
# Write one worker's row. First make two lists: all its forwards in order, and all its backwards in order. Backwards come in the same groups of $p$ cups, but through the worker's *last* chunk first. Then warm-up, turns, drain, as in 1F1B.
#
# Watch out where $m = p$: a worker cannot do more forwards in its warm-up than it has.


# %%
def interleaved_order(worker: int, p: int, m: int, v: int) -> list[ps.Action]:
    """All forwards and backwards of `worker`, in order, under interleaved 1F1B.

    The worker holds the stages worker, worker + p, ..., v of them. m is a multiple of p.

    Example: interleaved_order(worker=1, p=2, m=2, v=2) is [ps.F(1, 0), ps.F(1, 1),
    ps.F(3, 0), ps.B(3, 0), ps.F(3, 1), ps.B(3, 1), ps.B(1, 0), ps.B(1, 1)].
    """
    ### BEGIN SOLUTION
    own = range(worker, v * p, p)
    groups = [range(first, first + p) for first in range(0, m, p)]
    forwards = [ps.F(stage, k) for group in groups for stage in own for k in group]
    backwards = [ps.B(stage, k) for group in groups for stage in reversed(own) for k in group]
    first = min((v - 1) * p + 2 * (p - 1 - worker), v * m)
    order = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[v * m - first :]
    ### END SOLUTION


# %%
grade.check(interleaved_order, points=5)
### BEGIN HIDDEN TESTS
grade.check(interleaved_order, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_interleaved = grade.yours(interleaved_order)


def interleaved(p, m, v):
    """A schedule out of your rows."""

    def order(worker, p, m):
        return my_interleaved(worker, p, m, v)

    return ps.Schedule.from_workers(order, p, m, name=f"my interleaved, v={v}")


halves = ps.Cost(forward=1 / 2, backward=2 / 2)  # of one chunk
twice_round = ps.simulate(interleaved(4, 8, 2), halves)
grade.reveal(guess_two_chunks, twice_round.makespan - max(twice_round.busy), "units of waiting")
ps.draw.gantt(line, twice_round)

# %% [markdown]
# A box with a bar at its foot is a worker's second chunk. The triangle has the same shape as before, with steps of half the length. In general the waiting is
#
# $$(p - 1)\,\frac{t_F + t_B}{v}, \qquad \text{or} \quad \frac{p - 1}{v\,m} \;\text{ of ideal}$$
#
# (Narayanan et al., SC 2021; their system is Megatron-LM). Ideal is $m(t_F + t_B)$, the time without any waiting.
#
# Now on four real workers. Each worker holds two of the eight layers, and the gradient must be that of one process.

# %%
pace = (0.02, 0.04)  # seconds of a forward, of a backward, on a whole stage
half_pace = (0.01, 0.02)

ran = ps.run(interleaved(4, 8, 2), layers, [batch], loss=loss, pace=half_pace)
print("largest difference from one process:", reference.max_error(ran.gradients, one_process))
ps.draw.compare(ps.simulate(interleaved(4, 8, 2), ps.Cost(*half_pace)), ran.trace)

# %% [markdown]
# ### What do more chunks cost?
#
# If the bubble shrinks with $v$, why not cut the model into a hundred chunks per worker?
#
# ### Exercise 3: messages (2 points)
#
# Count what travels between workers in one batch.


# %%
def messages_per_batch(p: int, m: int, v: int) -> int:
    """Messages between workers in one batch, activations and gradients together.

    p: workers, 2 or more. v: chunks per worker; stage s is on worker s % p.

    Example: messages_per_batch(p=2, m=4, v=1) is 8.
    """
    ### BEGIN SOLUTION
    return 2 * m * (v * p - 1)
    ### END SOLUTION


# %%
grade.check(messages_per_batch, points=2)
### BEGIN HIDDEN TESTS
grade.check(messages_per_batch, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Say each message is on its way for a moment (its *latency*). It is small: a tenth of a forward.
#
# **Predict.** Which number of chunks per worker is the fastest: 1, 2, 4 or 8?

# %%
guess_best_v = None

# %%
my_messages = grade.yours(messages_per_batch)
latency = 0.1  # try others


def sent(schedule):
    """Sends in the schedule, once its messages are written out."""
    return sum(a.kind.startswith("SEND") for row in ps.lower(schedule).workers for a in row)


times = {}
print("chunks   messages: counted, yours   no latency   with latency   in flight on worker 0")
for v in (1, 2, 4, 8):
    schedule = interleaved(4, 8, v) if v > 1 else ps.one_f_one_b(4, 8)
    free = ps.simulate(schedule, ps.Cost(1 / v, 2 / v))
    late = ps.simulate(schedule, ps.Cost(1 / v, 2 / v, latency=latency))
    times[v] = late.makespan
    print(
        f"{v:>6}{sent(schedule):>19}{my_messages(4, 8, v):>7}{free.makespan:>13g}"
        f"{late.makespan:>15.2f}{free.peak_activations[0]:>17g} A"
    )
grade.reveal(guess_best_v, min(times, key=times.get), "chunks per worker")

# %% [markdown]
# More chunks are not free. There are about $v$ times as many messages, and each of them is waited for somewhere in the warm-up and the drain. The activations in flight on worker 0 are $1 + \frac{p - 1}{p v}$ times those of 1F1B.
#
# **Try it.** Make `latency` 0, 0.05 and 0.3, and see the best $v$ move.
#
# And the *two* forwards per worker further down? The next cell warms up with only one.

# %%
two_per_worker = grade.yours(interleaved_warm_up)


def with_warm_up(length):
    """Your order for p=4, m=8, v=2, with a warm-up of another length."""

    def order(worker, p, m):
        row = my_interleaved(worker, p, m, 2)
        forwards = [action for action in row if action.kind == "F"]
        backwards = [action for action in row if action.kind == "B"]
        return take_turns(forwards, backwards, length(worker))

    return ps.Schedule.from_workers(order, 4, 8)


for name, length in (
    ("two per worker", lambda worker: two_per_worker(worker, 4, 2)),
    ("one per worker", lambda worker: two_per_worker(worker, 4, 2) - (3 - worker)),
):
    schedule = with_warm_up(length)
    seconds = [ps.simulate(schedule, ps.Cost(0.5, 1, latency=x)).makespan for x in (0, 0.1, 0.3)]
    peak = ps.simulate(schedule).peak_activations[0]
    listed = ", ".join(f"{makespan:.1f}" for makespan in seconds)
    print(f"{name}: {peak:g} A on worker 0; makespan with latency 0, 0.1, 0.3: {listed}")

# %% [markdown]
# With free messages one per worker is just as fast, and keeps less. With slow messages two are better: while a message travels, there is another forward to do. It is the trade of eager 1F1B (unit 04, section 8) once more: memory for hidden messages.

# %% [markdown]
# ## 3. Work that can wait: split the backward
#
# A cup that comes back brings *two* jobs. Tell the station before what should have been different in what it handed over: that station is waiting for it. And correct your own recipe card: for that nobody waits, as long as it is done by closing time.
#
# A linear layer shows it best. For samples $X$ (one per row) it computes $Y = X W^\top + b$. From the next stage comes $dY$, the gradient of the loss by $Y$. The backward computes three things:
#
# | half | what | from what | who waits for it |
# |---|---|---|---|
# | input half, I | $dX = dY\, W$ | $dY$ and the weights $W$ | the stage before |
# | weight half, W | $dW = dY^\top X$ | $dY$ and the activations $X$ | nobody, until the update |
# | weight half, W | $db$, the sum of the rows of $dY$ | $dY$ | nobody, until the update |
#
# ### Exercise 4: the input half (2 points)


# %%
def input_half(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dX, the gradient that goes back to the stage before.

    gradient: dY, samples x outputs. weight: W, outputs x features.
    Returns dX, samples x features.

    Example: input_half(torch.tensor([[1.0]]), torch.tensor([[2.0, 3.0]])) is tensor([[2., 3.]]).
    """
    ### BEGIN SOLUTION
    return gradient @ weight
    ### END SOLUTION


# %%
grade.check(input_half, points=2)
### BEGIN HIDDEN TESTS
grade.check(input_half, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 5: the weight half (3 points)
#
# In a Transformer an input has three dimensions: samples, words, features. Then every *word* counts as a sample.


# %%
def weight_half(gradient: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dW, db), the gradients of the weights and of the bias.

    gradient: dY, ... x outputs. inputs: X, ... x features, where ... is the same in both:
        samples, or samples x words.
    Returns dW, outputs x features, and db, with one number per output.

    Example: weight_half(torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0], [3.0]])) is
    (tensor([[5.]]), tensor([3.])).
    """
    ### BEGIN SOLUTION
    rows, features = gradient.flatten(0, -2), inputs.flatten(0, -2)
    return rows.T @ features, rows.sum(0)
    ### END SOLUTION


# %%
grade.check(weight_half, points=3)
### BEGIN HIDDEN TESTS
grade.check(weight_half, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Does autograd agree? The next cell asks it about a layer of our model. (One should never compare floats for equality without need. Here it prints the largest difference.)

# %%
my_input_half, my_weight_half = grade.yours(input_half), grade.yours(weight_half)

layer = nn.Linear(128, 128)
x = torch.randn(32, 128, requires_grad=True)
y = layer(x)
dY = torch.randn_like(y)
y.backward(dY)

dX = my_input_half(dY, layer.weight.detach())
dW, db = my_weight_half(dY, x.detach())
for name, ours, theirs in (
    ("dX", dX, x.grad),
    ("dW", dW, layer.weight.grad),
    ("db", db, layer.bias.grad),
):
    print(f"{name}: largest difference from autograd {(ours - theirs).abs().max():.1e}")

# %% [markdown]
# ### How to split a whole stage
#
# Nobody writes these formulas for every layer of a model. Autograd has them. So why not ask it twice: `torch.autograd.grad` for the inputs, and later for the weights?
#
# **Predict.** A stage of four equal linear layers. Asked once, the backward needs two matrix products per layer, eight in all. How many are needed if you ask twice?

# %%
guess_products = None


# %%
def products(work):
    """Matrix products of 64 x 256 x 256 that `work` does; PyTorch counts them for us."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() // (2 * 64 * 256 * 256)


net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
weights = list(net.parameters())
x = torch.randn(64, 256, requires_grad=True)
gradient = torch.ones(64, 256)

y = net(x)
whole = products(lambda: y.backward(gradient))
y = net(x)
first = products(lambda: torch.autograd.grad(y, [x], gradient, retain_graph=True))
second = products(lambda: torch.autograd.grad(y, weights, gradient))
y = net(x)
split = []
half_I = products(lambda: split.append(SplitBackward([y], [gradient], [x], weights)))
half_W = products(lambda: split[0].weight_half())

grade.reveal(guess_products, first + second, "products")
print(f"whole backward           {whole}")
print(f"autograd asked twice     {first} + {second}")
print(f"split as pipeschool does {half_I} + {half_W}")

# %% [markdown]
# Asking twice is no split. To get to the weights of the first layer, the second call has to walk the way back through all layers again. A real split *notes* the gradients that come by at each layer during the input half, and starts the weight half from these notes. `lib/pipeschool/run/split.py` does that, and PyTorch's own pipelines do something similar.
#
# One thing to remember for later: the weight half needs $X$ and $dY$. **The activations stay in memory until the weight half is done.**
#
# How long do the halves take? `ps.profile` runs stages of two larger layers in this notebook's process, and measures.

# %%
big = [
    nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(3)
]
data = torch.randn(1024, 512)
measured = ps.profile(big, (data, data), m=4)
for name in ("forward", "backward", "input_backward", "weight_backward"):
    print(f"{name:<16}{getattr(measured, name)[1] * 1000:6.2f} ms")

# %% [markdown]
# Three jobs with one matrix product per layer each: forward, input half, weight half. So as a first guess they take the same time, $t_F = t_I = t_W$, and a whole backward takes $t_B = t_I + t_W$. (The two halves together may take a little more than the whole: the notes have to be kept.)
#
# ### A warning about letters
#
# Before you read a paper, find out what its *B* is. This has confused many people.
#
# | | pipeschool, PyTorch's schedule files | Zero Bubble paper (Qi et al., ICLR 2024) | DualPipe (DeepSeek-AI) |
# |---|---|---|---|
# | forward | F | F | F |
# | whole backward | B | (its two halves, B and W) | B |
# | input half | I | B | (B without W) |
# | weight half | W | W | W |

# %% [markdown]
# ## 4. ZB-H1: the triangle, eaten from one side
#
# Now place the weight halves. Two habits change in your shop:
#
# - a cup that comes back gets its *input half* at once, so that the station before can go on,
# - the weight half comes later, when the worker would otherwise have to wait.
#
# How much later? The longer you hold weight halves back, the more cups stay on the counter. In 1F1B worker $s$ holds only $p - s$ cups, while worker 0 holds $p$. So the later workers have room: worker $s$ can hold $s$ more. That is the rule of *ZB-H1* (Qi et al., ICLR 2024): **worker $s$ is $s$ weight halves behind.**
#
# **Predict.** $t_F = t_I = t_W = 1$, four workers, eight cups. Under 1F1B everybody waits 9 units. And under ZB-H1?

# %%
guess_h1 = None  # units of waiting

# %% [markdown]
# ### Exercise 6: a zero-bubble order (5 points)
#
# - Forwards and input halves come in the order of 1F1B: `ps.I` stands where `ps.B` stood. (You may call your function from unit 04. Copy it into this cell.)
# - Worker $s$ does the weight half of cup $k - s$ right after the input half of cup $k$, as soon as there is such a cup.
# - At the end it does the weight halves that are left.


# %%
def zb_h1_order(worker: int, p: int, m: int) -> list[ps.Action]:
    """All actions of `worker` under ZB-H1: ps.F, ps.I and ps.W, without updates.

    worker: from 0 to p - 1; it holds stage number `worker`. m may be smaller than p.

    Example: zb_h1_order(worker=1, p=2, m=2) is
    [ps.F(1, 0), ps.I(1, 0), ps.F(1, 1), ps.I(1, 1), ps.W(1, 0), ps.W(1, 1)].
    """
    ### BEGIN SOLUTION
    first = min(p - 1 - worker, m)
    order = [ps.F(worker, k) for k in range(first)]
    for k in range(m):
        if first + k < m:
            order.append(ps.F(worker, first + k))
        order.append(ps.I(worker, k))
        if k >= worker:
            order.append(ps.W(worker, k - worker))
    return order + [ps.W(worker, k) for k in range(max(m - worker, 0), m)]
    ### END SOLUTION


# %%
grade.check(zb_h1_order, points=5)
### BEGIN HIDDEN TESTS
grade.check(zb_h1_order, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_zb = grade.yours(zb_h1_order)
mine = ps.Schedule.from_workers(my_zb, p=4, m=8, name="my zb_h1")
h1 = ps.simulate(mine, cost)  # a backward of 2: one for each half
grade.reveal(guess_h1, h1.makespan - max(h1.busy), "units of waiting")
ps.draw.gantt(line, h1)

# %% [markdown]
# In the lower chart a brown box is an input half, and a green one a weight half. The green boxes have moved into the gaps at the end, and the cups come home sooner. Each worker waits
#
# $$(p - 1)\,(t_F + t_I - t_W) \qquad \text{instead of} \qquad (p - 1)\,(t_F + t_I + t_W)$$
#
# as long as $t_W$ is at most $t_F$ and $t_I$. With three equal times that is a third, $\frac{p - 1}{3m}$ of ideal. And the memory?

# %%
print("in flight under 1F1B:  ", line.peak_activations)
print("in flight under ZB-H1: ", h1.peak_activations)

# %% [markdown]
# No worker holds more than worker 0 held before. So if 1F1B fits on your devices, ZB-H1 does too (where all devices are equal).
#
# ### For real
#
# Four workers, your order, real split backwards. **Predict.** The weight halves are done late and in another order than the input halves. Will the gradients still be those of one process?

# %%
guess_same = None  # "the same", "up to rounding" or "different"

# %%
ran_zb = ps.run(mine, stages, [batch], loss=loss, pace=pace)
stage_gradients = reference.gradients(stages, [batch], m=8, loss=loss)
print(
    "largest difference from one process:", reference.max_error(ran_zb.gradients, stage_gradients)
)
print("you predicted:", guess_same)
ps.draw.compare(ps.simulate(mine, ps.Cost(*pace)), ran_zb.trace)

# %% [markdown]
# Bit for bit the same. A weight half is late within its batch, but the update still waits for all of them. *Late* is not *stale*: stale is a gradient that meets newer weights.
#
# **Try it.** A backward counts as two equal halves here. Which slider changes what is left of the waiting under `zb_h1`: forward or backward? Can you find the reason in the formula? And where does the formula stop being true? (The sliders set the time of one *stage*. Schedules with two chunks per worker have twice as many stages, so halve the times for them.)

# %%
ps.widgets.explore(("one_f_one_b", "zb_h1"))

# %% [markdown]
# **A good place to stop.** Everything above is saved with the notebook. When you come back, run the cells from the top once.

# %% [markdown]
# ## 5. ZB-H2: no gap at all, and three ways to count
#
# What if the counter may be twice as full? *ZB-H2* lets every worker take in about twice as many cups before the first one is back, and holds back twice as many weight halves.

# %%
h2 = ps.simulate(ps.zb_h2(p=4, m=8), cost)
ps.draw.gantt(h1, h2)

# %% [markdown]
# Every worker of ZB-H2 works without a gap from its first action to its last. The triangle at the beginning has become a slope, and the slope at the end is parallel to it. But the makespan is that of ZB-H1! So is there a bubble or not?
#
# It depends on how one counts. There are three measures in use, and papers do not always say which is theirs:
#
# - **bubble of total** (GPipe): idle time, over all time of all workers until the last one is done,
# - **bubble of ideal** (Megatron-LM): the same idle time, over the time of work,
# - **zero-bubble rate** (Zero Bubble): every worker gets a clock of its own. $\frac{c - w}{c}$, where $w = m(t_F + t_I + t_W)$ is the work of a worker, and the *cost* $c$ is the longest time that any worker needs from *its own* first start to *its own* last end.
#
# ### Exercise 7: the zero-bubble rate (2 points)
#
# All workers have the same work here. `trace.rows[w]` lists the spans of worker $w$. A span has `.action`, `.start` and `.end`; skip the updates, `span.action.kind == "U"`. `trace.busy[w]` is the work of a worker, without updates.


# %%
def zero_bubble_rate(trace: ps.Trace) -> float:
    """(cost - work) / cost, with the cost of the worker that takes longest, by its own clock.

    A trace may begin at any time, and workers begin at different times.

    Example: zero_bubble_rate(ps.simulate(ps.gpipe(p=1, m=3))) is 0.0.
    """
    ### BEGIN SOLUTION
    rows = [[span for span in row if span.action.kind != "U"] for row in trace.rows]
    longest = max(max(s.end for s in row) - min(s.start for s in row) for row in rows)
    return (longest - trace.busy[0]) / longest
    ### END SOLUTION


# %%
grade.check(zero_bubble_rate, points=2)
### BEGIN HIDDEN TESTS
grade.check(zero_bubble_rate, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_rate = grade.yours(zero_bubble_rate)
print(f"{'':<14}of total   of ideal   zero-bubble rate   in flight at most")
for trace in (line, h1, h2):
    print(
        f"{trace.name:<14}{trace.bubble_of_total:8.4f}{trace.bubble_of_ideal:11.4f}"
        f"{my_rate(trace):19.4f}{max(trace.peak_activations):18g}"
    )

# %% [markdown]
# Is the third measure a trick? Think of the *next* batch. When worker 0 has done its last weight half, it has all gradients of its own stage. It can update and begin the next batch at once, while worker 3 still finishes this one.
#
# **Predict.** One batch of ZB-H2 takes as long as one of ZB-H1 (see the charts). How long do four batches take?

# %%
guess_four = None  # units of cost

# %%
for batches in (1, 2, 4):
    times = [
        ps.simulate(build(p=4, m=8, batches=batches), cost).makespan
        for build in (ps.one_f_one_b, ps.zb_h1, ps.zb_h2)
    ]
    print(f"batches: {batches}   1F1B {times[0]:g}, ZB-H1 {times[1]:g}, ZB-H2 {times[2]:g}")
grade.reveal(guess_four, times[2], "units for ZB-H2")
ps.draw.gantt(ps.simulate(ps.zb_h2(p=4, m=8, batches=2), cost))

# %% [markdown]
# Parallel slopes fit into each other. The slope is paid once, at the very beginning, and never again. That is what the zero-bubble rate measures: the bubble *per batch in a long training*. The gap of the other two schedules lies inside the batch, and comes back every time.
#
# And nothing is stale here. Each stage updates when all gradients of its batch are in, and every cup of the next batch meets the new weights.
#
# (One caution. If gradients are clipped by the norm of *all* stages, or a step is skipped when any of them overflows, a stage must hear from all others before it may update. Then the slopes no longer fit. The authors update first, check afterwards, and take back what was wrong.)
#
# **Try it.** ZB-H2 was made for three equal times. Here are other ones. When is something left?

# %%
for i, w in ((1, 1), (1, 0.5), (1.5, 1), (1, 1.5)):
    other = ps.Cost(forward=1, backward=i + w, input_backward=i, weight_backward=w)
    rates = [my_rate(ps.simulate(build(4, 8), other)) for build in (ps.zb_h1, ps.zb_h2)]
    print(f"tF = 1, tI = {i:<4} tW = {w:<4} rate of ZB-H1 {rates[0]:.3f}, of ZB-H2 {rates[1]:.3f}")

# %% [markdown]
# ## 6. The folded line: a V
#
# ZB-H2 pays with memory: $2p - 1$ cups in flight instead of $p$. The third idea gets the same for less.
#
# Lay the line down the shop *and back up*. You are the first station and the last. A cup that comes in at your end is finished at your end. So its way back begins with you, at once.
#
# Each worker holds two chunks again, but placed in a V instead of a loop.
#
# ### Exercise 8: the V (1 point)


# %%
def v_placement(stage: int, p: int) -> int:
    """The worker of a stage, where 2p stages go down p workers and back up.

    stage: from 0 to 2p - 1.

    Example: v_placement(stage=5, p=4) is 2.
    """
    ### BEGIN SOLUTION
    return stage if stage < p else 2 * p - 1 - stage
    ### END SOLUTION


# %%
grade.check(v_placement, points=1)
### BEGIN HIDDEN TESTS
grade.check(v_placement, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_place = grade.yours(v_placement)
print("\nstage         " + "".join(f"{s:>4}" for s in range(8)))
print("loop: worker  " + "".join(f"{s % 4:>4}" for s in range(8)))
print("V:    worker  " + "".join(f"{my_place(s, 4):>4}" for s in range(8)))

# %% [markdown]
# **Predict.** Under 1F1B, workers 0 to 3 hold 4, 3, 2 and 1 cups. *ZB-V* is the zero-bubble schedule for this placement. What will its workers 0 and 3 hold?

# %%
guess_v_first = None  # A, where a chunk keeps half an A for each cup
guess_v_last = None

# %%
zb_v = ps.simulate(ps.zb_v(p=4, m=8), halves)
grade.reveal(guess_v_first, zb_v.peak_activations[0], "A on worker 0")
grade.reveal(guess_v_last, zb_v.peak_activations[3], "A on worker 3")
print(f"zero-bubble rate {my_rate(zb_v):g}, of ideal {zb_v.bubble_of_ideal:g}")
ps.draw.gantt(zb_v)

# %%
ps.draw.memory(zb_v)

# %% [markdown]
# No gap, $p$ cups at most, and *every* worker holds the same. Why is it balanced? Follow cup 0.

# %%
for worker in (0, 3):
    spans = {span.action: span for span in zb_v.rows[worker]}
    stays = [spans[ps.W(s, 0)].end - spans[ps.F(s, 0)].start for s in (worker, 7 - worker)]
    print(f"worker {worker}: cup 0 is on the counter for {stays[0]:g} at the first chunk,", end=" ")
    print(f"for {stays[1]:g} at the second, {sum(stays):g} in all")

# %% [markdown]
# On worker 0 it stays long at the first chunk (all the way down, up and back), and only for a moment at the last. On worker 3 it stays for a middling time at both. The sums are about the same. In a line, worker 0 has the long stay alone, and worker 3 the moment.
#
# The V has a present for language models, too. Often the embedding (the first layer) and the output layer (the last) share their weights. In a line their gradients must be added up across the whole shop. In a V both lie on worker 0.
#
# The price: two chunks, so about twice the messages of a line. The two stages in the middle are on one worker and need none.
#
# For real, on the eight layers:

# %%
ran_v = ps.run(ps.zb_v(p=4, m=8), layers, [batch], loss=loss, pace=half_pace)
print("largest difference from one process:", reference.max_error(ran_v.gradients, one_process))
print(f"measured: zero-bubble rate {my_rate(ran_v.trace):.3f}, of ideal", end=" ")
print(f"{ran_v.trace.bubble_of_ideal:.3f} (1F1B: {line.bubble_of_ideal:g} predicted)")
print(ps.why_late(ps.simulate(ps.zb_v(p=4, m=8), ps.Cost(*half_pace)), ran_v.trace))

# %% [markdown]
# What remains in the measured rate is what a drawing leaves out, and the last line names it: actions that end a little late, messages, and the time between actions. If it says *run it again*, the machine had other things to do, and the rate is theirs.

# %% [markdown]
# ## 7. Read any schedule in a paper
#
# A new schedule appears every few months, mostly as a figure: a row for each worker, a column for each unit of time, boxes with letters and numbers. You need three questions to place it:
#
# 1. **How large is the bubble?** Count the empty cells.
# 2. **How much is in flight?** Go along a row. A forward takes one; whatever ends its backward gives it back.
# 3. **What does it pay with?** Activations, messages, or several copies of the weights.
#
# ### Exercise 9: read a figure (3 points)
#
# Here a figure is a list of rows. A cell is an action such as `"2F5"` (stage 2, forward, microbatch 5), or `""` where the worker is idle. An action that takes several units fills several cells with the same text. This is ZB-H1 for two workers:

# %%
print("\n".join(" ".join(f"{cell or '.':>3}" for cell in row) for row in figure(ps.zb_h1(2, 3))))


# %%
def read_figure(rows: list[list[str]], v: int) -> tuple[float, list[float]]:
    """(bubble of total, peak activations of each worker in A) of a figure.

    rows: one list of cells per worker, all equally long.
    v: chunks per worker; a chunk keeps 1/v of A for each microbatch.
    ps.Action.parse("2F5") gives an action with .kind, .stage and .microbatch.

    Example: read_figure([["0F0", "0F0", "0B0", ""]], v=1) is (0.25, [1.0]).
    """
    ### BEGIN SOLUTION
    empty = sum(cell == "" for row in rows for cell in row)
    peaks = []
    for row in rows:
        held = peak = 0
        for before, cell in zip(["", *row], row, strict=False):
            if cell in ("", before):  # idle, or the same action goes on
                continue
            kind = ps.Action.parse(cell).kind
            held += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            peak = max(peak, held)
        peaks.append(peak / v)
    return empty / (len(rows) * len(rows[0])), peaks
    ### END SOLUTION


# %%
grade.check(read_figure, points=3)
### BEGIN HIDDEN TESTS
grade.check(read_figure, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Two schedules to practise on. First the charts, without a word about what they are for. Each box counts as in the charts above; worker 0 of both holds two stages.

# %%
dual, chimera = ps.dualpipe_v(p=4, m=8), ps.chimera(p=4, m=8)
ps.draw.gantt(ps.simulate(dual, halves), ps.simulate(chimera, cost))

# %% [markdown]
# **Predict**, from the charts alone. What does each of them pay with: more `"activations"` than 1F1B, more `"messages"`, or more `"weights"`? (Look at which worker begins with what, and what each cup goes through.)

# %%
guess_dualpipe = None  # one of the three words, or several in a list
guess_chimera = None

# %%
my_reading = grade.yours(read_figure)


def copies(schedule):
    """How many workers hold the same stage; `owners` lists the workers of each."""
    return max(map(len, schedule.owners))


def card(schedule):
    """What a figure of the schedule tells, by your own reading, and the rest of its bill."""
    rows = figure(schedule)
    bubble, peaks = my_reading(rows, schedule.v)
    return (
        f"{schedule.name:<12}{bubble:6.3f} of total, {min(peaks):g} to {max(peaks):g} A in flight, "
        f"{sent(schedule)} messages, weights in memory: {copies(schedule)} x"
    )


print()
for schedule in (ps.one_f_one_b(4, 8), dual, chimera):
    print(card(schedule))
print("you predicted", guess_dualpipe, "and", guess_chimera)

# %% [markdown]
# <details>
# <summary>Our reading</summary>
#
# - **DualPipeV** pays with messages (two chunks, a V) and with half an A more than worker 0 of 1F1B holds, on *every* worker. Look at the middle of its rows: forwards and backwards alternate. On real devices each such pair is run as *one*, so that the messages of one travel while the other computes. Our workers do them one after the other, so the chart shows its bubble and not this, its main purpose. (It is the folded half of DualPipe, from DeepSeek-V3, which needs two copies of the weights.)
# - **Chimera** (Li and Hoefler, SC 2021) pays with weights. Worker 3 begins at time 0 with cup 1: it holds a first stage, too. There are *two copies* of the model, one in each direction, and they fill each other's gaps. At the end of the batch the copies of a stage add up their gradients. (The messages above do not include that.) For a large model that doubles the memory of weights, gradients and optimizer.
#
# Nobody gets a small bubble for nothing.
# </details>
#
# ### A figure can be wrong
#
# Published figures have been wrong, with a box drawn before what it needs was done. Here is an "improved" ZB-H1 for three workers: workers 0 and 1 are done one unit sooner. **Find the first box that cannot be where it is**, before you run the cell after it.

# %%
improved = figure(ps.zb_h1(3, 4))
for row in improved[:2]:
    row.append(row.pop(3))  # an empty cell goes to the end
print("\n".join(" ".join(f"{cell or '.':>3}" for cell in row) for row in improved))

# %%
guess_box = None  # such as "1F2"

# %%
csv = "\n".join(",".join(filter(None, row)) for row in improved)  # the order of the boxes
starts = {s.action: s.start for s in ps.simulate(ps.formats.from_csv(csv)).spans}
too_early = [
    (starts[action], str(action), column)
    for row in improved
    for column, cell in enumerate(row)
    if cell and starts[action := ps.Action.parse(cell)] > column
]
start, box, column = min(too_early)
print(f"{box} is drawn at {column}, and can start at {start:g}; you predicted {guess_box}")

# %% [markdown]
# ## 8. Rules, and par
#
# Until now people made the schedules. Could a *rule* make one? Whenever a worker is free, it looks at what it could do now, and takes what the rule puts first. This is called list scheduling, and `ps.greedy` does it. A rule can be as short as `"BFW"`: backwards first (here their input halves), then forwards, then weight halves.

# %%
ready_made = {
    kinds: ps.greedy(p=4, m=8, split=True, memory_cap=4, priority=kinds, name=kinds)
    for kinds in ("BFW", "BWF", "FBW", "FWB", "WBF", "WFB")
}
for kinds, schedule in ready_made.items():
    print(f"{kinds} takes {ps.simulate(schedule, cost).makespan:g}")
print(f"your ZB-H1 takes {h1.makespan:g}")
ps.draw.gantt(ps.simulate(ready_made["BFW"], cost), h1)

# %% [markdown]
# `memory_cap=4` allows 4 cups in flight per worker, as many as ZB-H1 needs. A forward beyond it has to wait. The best of these rules is better than 1F1B, and worse than ZB-H1.
#
# ### Exercise 10: a better rule (3 points)
#
# A rule may also look at the moment: who chooses (`moment.worker`), how many cups that worker holds now (`moment.held`), and `moment.p`, `moment.m`. Find the first moment at which worker 0 does something else under BFW than under ZB-H1. What did the line need more at that moment? And how many cups would 1F1B let a worker hold?
#
# For three workers the checks want **par**, the best time there is. For four workers they allow one unit more.


# %%
def priority(action: ps.Action, moment) -> tuple:
    """A key for an action that moment.worker could start now. The smallest key goes first.

    action.kind is "F", "I" or "W". moment has .worker, .held (cups of this worker between their
    forward and the end of their weight half), .p, .m and .time.

    Example: "BFW" is the rule ("IFW".index(action.kind), action.microbatch), so that for
    ps.F(2, 5) it gives (1, 5).
    """
    ### BEGIN SOLUTION
    filling = moment.held < moment.p - moment.worker  # 1F1B would take another forward
    kinds = "FIW" if filling else "IFW"
    return kinds.index(action.kind), action.microbatch
    ### END SOLUTION


# %%
grade.check(priority, points=3)
### BEGIN HIDDEN TESTS
grade.check(priority, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# How good is your rule? And how do we know that there is nothing better than "par"? From a *solver*: `ps.par` describes the problem to OR-tools, a library for optimisation. The solver does not stop at a good schedule. It goes on until it has proved that no other is faster, or until its time is up.
#
# **Predict.** Take away a place on every counter: room for 3 cups instead of 4. How long does the best schedule take now?

# %%
guess_par_3 = None  # units of cost, for p = 4, m = 8

# %%
my_rule = grade.yours(priority)
print("\ncups per worker   BFW   your rule   par")
for cap in (2, 3, 4, 5):
    options = dict(p=4, m=8, split=True, memory_cap=cap)
    ours = [ps.simulate(ps.greedy(**options, priority=rule), cost) for rule in ("BFW", my_rule)]
    best = ps.par(**options, seconds=10)
    time = ps.simulate(best.schedule, cost).makespan
    print(
        f"{cap:>15}{ours[0].makespan:>6g}{ours[1].makespan:>12g}{time:>6g}"
        f"   {'proved' if best.proven else f'nothing below {best.bound:g}'}"
    )
    if cap == 3:
        par_3 = time
grade.reveal(guess_par_3, par_3, "units with room for 3 cups")

# %% [markdown]
# For 4 cups par is the time of ZB-H1: with one stage per worker, in this memory and for these times, nobody will ever find a faster one. Below $p$ cups everybody gets slower, and there is no closed formula to look up. There a solver, or a better rule, earns its money. The solver's price: its time grows quickly with the size of the problem. A rule takes milliseconds for hundreds of workers.
#
# **A challenge, without points.** Can a rule reach par for four workers? (One can, in a single line. You have written all that it needs in this unit.)

# %% [markdown]
# ## 9. Your schedule on PyTorch's engine
#
# What you have written is not bound to this course. PyTorch has a pipeline engine of its own, `torch.distributed.pipelining`, which reads a schedule from a CSV file: one line per worker, one action per cell.

# %%
print(ps.formats.to_csv(mine))

# %% [markdown]
# `engine="torch"` hands just that to PyTorch, on four real processes, with our stages. **Predict.** Which of the two gradients below will differ from that of one process?

# %%
guess_engine = None  # "none", "zb_h1", "zb_v" or "both"

# %%
on_torch = ps.run(mine, stages, [batch], loss=loss, engine="torch")
v_on_torch = ps.run(ps.zb_v(p=4, m=8), layers, [batch], loss=loss, engine="torch")
for name, run, right in (
    ("my zb_h1", on_torch, stage_gradients),
    ("zb_v", v_on_torch, one_process),
):
    error = reference.max_error(run.gradients, right)
    print(f"{name} on PyTorch's engine: largest difference from one process {error:.1e}")
print("you predicted:", guess_engine)

# %% [markdown]
# The same rows, the same gradients, another engine. A schedule is data.

# %% [markdown]
# ## 10. All schedules on one page
#
# Everything in this table comes from the simulator, for four workers and eight microbatches, with $t_F = t_I = t_W = 1$ on a worker's whole share. Where a worker has $v$ chunks, each of them takes $1/v$ of that. In Chimera every microbatch goes through one of two copies.
#
# **Before you run it**: which schedule has the smallest bubble? And which of those with the least activations?

# %%
print(f"{'':<18}makespan  of ideal  zb rate   in flight, first and last   messages  copies")
for schedule in (
    ps.naive(4, 8),
    ps.gpipe(4, 8),
    ps.one_f_one_b(4, 8),
    ps.interleaved_1f1b(4, 8, v=2),
    ps.interleaved_1f1b(4, 8, v=4),
    ps.looped_bfs(4, 8, v=2),
    ps.zb_h1(4, 8),
    ps.zb_h2(4, 8),
    ps.zb_v(4, 8),
    ps.dualpipe_v(4, 8),
    ps.chimera(4, 8),
):
    trace = ps.simulate(schedule, ps.Cost(1 / schedule.v, 2 / schedule.v))
    peaks = trace.peak_activations
    name = schedule.name + (f", v={schedule.v}" if "interleaved" in schedule.name else "")
    print(
        f"{name:<22}{trace.makespan:>4g}{trace.bubble_of_ideal:>10.4f}{my_rate(trace):>9.4f}"
        f"{peaks[0]:>14g} A{peaks[-1]:>8g} A{sent(schedule):>15}{copies(schedule):>8}"
    )

# %% [markdown]
# Read it column by column, then row by row. Each row that is better than 1F1B in one column is worse in another. Which row to choose depends on what your machines have plenty of: memory, fast links, or microbatches. Unit 06 is about that choice.

# %% [markdown]
# ## 11. The claims lab
#
# As before: decide first, write `"right"`, `"wrong"` or `"half"` (right in part, or only under a condition that the claim leaves out) in place of the `"?"`, run the cell, and only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > On 64 GPUs the bubble is 35%. With 4 chunks per worker ("virtual stages") it is 12%, for 3 times more communication.

# %%
verdicts[1] = "?"

p = 64
m = min(range(1, 1000), key=lambda m: abs((p - 1) / (m + p - 1) - 0.35))
print(f"a bubble of 35% of total on {p} workers means m = {m}")
print(f"with 4 chunks: {(p - 1) / (4 * m + p - 1):.1%} of total")
ratio = my_messages(p, m, 4) / my_messages(p, m, 1)
print(f"messages: {ratio:.2f} times as many, which is {ratio - 1:.2f} times *more*")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, if you read it closely. The bubble is of *total*. Four times as many messages are three times *more*. (Microbatches are 117 here, which is no multiple of 64. Megatron-LM would ask for 64 or 128. The claim is about the formula.)
# </details>
#
# ### Claim 2
#
# > More chunks per worker are free: the same work, only in smaller pieces.

# %%
verdicts[2] = "?"

for v in (1, 2, 4, 8):
    schedule = ps.interleaved_1f1b(p=4, m=8, v=v)
    row = [ps.simulate(schedule, ps.Cost(1 / v, 2 / v, latency=x)).makespan for x in (0, 0.1, 0.5)]
    print(f"v = {v}: with latency 0, 0.1, 0.5: {', '.join(f'{x:.1f}' for x in row)}", end="")
    print(f"; {sent(schedule)} messages")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** Messages, and (for small $v$) activations on the first workers. With slow messages more chunks make the batch *longer*. Besides, small pieces use a device less well than large ones.
# </details>
#
# ### Claim 3
#
# > To split a backward, ask `torch.autograd.grad` for the inputs first, and later for the weights.

# %%
verdicts[3] = "?"


def asked_twice(depth):
    """Matrix products of both calls, for so many equal layers."""
    deep = nn.Sequential(*[nn.Linear(256, 256) for _ in range(depth)])
    y = deep(x)
    one = products(lambda: torch.autograd.grad(y, [x], gradient, retain_graph=True))
    return one, products(lambda: torch.autograd.grad(y, list(deep.parameters()), gradient))


for depth in (2, 4, 16):
    one, two = asked_twice(depth)
    print(
        f"{depth:>2} layers: whole backward {2 * depth} matrix products, asked twice {one} + {two}"
    )

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** The gradients are right, but nothing is gained: the second call walks the way of the first one again. What you call "weight half" is then nearly a whole backward, and takes as long.
# </details>
#
# ### Claim 4
#
# > ZB-V has no bubble.

# %%
verdicts[4] = "?"

for batches in (1, 4):
    trace = ps.simulate(ps.zb_v(p=4, m=8, batches=batches), halves)
    print(f"batches: {batches}   {trace.bubble_of_total:.4f} of total")
print(f"zero-bubble rate of one batch: {my_rate(zb_v):g}")
unequal = ps.Cost(0.5, 1, input_backward=0.6, weight_backward=0.4)
print(f"with tI = 0.6 and tW = 0.4: {my_rate(ps.simulate(ps.zb_v(p=4, m=8), unequal)):.4f}")
few = ps.simulate(ps.zb_v(p=4, m=4), halves)
print(f"with only 4 microbatches: {my_rate(few):.4f}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** By the zero-bubble rate it has none, if the three times are equal and there are enough microbatches. By makespan a slope remains at the beginning and at the end of the training. With other times, gaps come back.
# </details>
#
# ### Claim 5
#
# > A schedule without a bubble has to work with stale weights.

# %%
verdicts[5] = "?"

print("staleness of each worker, four batches of ZB-H2 and of ZB-V:")
for build in (ps.zb_h2, ps.zb_v):
    print(ps.simulate(build(p=4, m=8, batches=4)).staleness)
print("your real run of ZB-V: difference", reference.max_error(ran_v.gradients, one_process))

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong**, and it is the question of this unit. The gaps are filled with work of the *same* batch. Asynchronous pipelines fill them with the next one, on old weights.
# </details>
#
# ### Claim 6
#
# > A weight half can be held back as long as you like. It costs nothing.

# %%
verdicts[6] = "?"


def held_back(by):
    """1F1B with split backwards, weight halves `by` microbatches late."""

    def order(worker, p, m):
        row = []
        for kind, stage, k in ps.one_f_one_b(p, m).workers[worker]:
            if kind == "F":
                row.append(ps.F(stage, k))
            elif kind == "B":
                row += [ps.I(stage, k)] + [ps.W(stage, k - by)] * (k >= by)
        return row + [ps.W(worker, k) for k in range(max(m - by, 0), m)]

    return ps.Schedule.from_workers(order, p=4, m=8)


for by in (0, 1, 3, 8):
    trace = ps.simulate(held_back(by), cost)
    print(f"held back by {by}: in flight {trace.peak_activations}, makespan {trace.makespan:g}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** Activations stay until the weight half is done. Held back to the end of the batch, 1F1B is as full as GPipe.
# </details>
#
# ### Claim 7
#
# > If the first and the last layer share their weights, a V is easier than a line.

# %%
verdicts[7] = "?"

for schedule in (ps.one_f_one_b(4, 8), ps.interleaved_1f1b(4, 8), ps.zb_v(4, 8)):
    where = schedule.placement
    print(f"{schedule.name}: first stage on worker {where[0]}, last on worker {where[-1]}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right.** Two workers that hold the same weights must add up their gradients before every update. In a V one worker holds both ends.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit07.CLAIMS)

# %% [markdown]
# ## Summary
#
# - The waiting of a synchronous line is $(p - 1)(t_F + t_B)$. It has three cures: shorter steps, work that can wait, a folded line.
# - Interleaving: $v$ chunks per worker make the bubble $v$ times smaller. They cost about $v$ times the messages, and activations on the first workers.
# - A backward has two halves. The input half is urgent, the weight half is not. A real split does each product once.
# - ZB-H1 leaves a third of the bubble in the memory of 1F1B. ZB-H2 leaves no gap, in twice the memory. ZB-V leaves no gap in the memory of 1F1B, with two chunks in a V.
# - Always ask: of total, of ideal, or zero-bubble rate? And: what is B?
# - A schedule pays with activations, messages or copies of weights. Count cells to find out.
# - A rule makes a schedule in no time; a solver proves what is best. Whoever made it, a schedule is data: it runs on any engine.
# - So yes: the bubble can vanish without going stale.
#
# ## Check yourself
#
# 1. Eight workers, 16 microbatches. By interleaving with $v = 2$ or by ZB-H1 ($t_F = t_I = t_W$): which has the smaller bubble of ideal, and which needs fewer messages?
# 2. A paper says "zero bubble", and its figure has empty corners at the beginning and at the end. Is that a contradiction?
# 3. A colleague's split backward gives the right gradients, but the training became slower than with whole backwards. What would you look at first?
#
# <details>
# <summary>Answers</summary>
#
# 1. Interleaving: 7/(2 · 16) = 0.219 of ideal. ZB-H1: 7/(3 · 16) = 0.146. ZB-H1 is smaller, and it needs about half of the messages, for its stages are not cut.
# 2. No. By the zero-bubble rate each worker has a clock of its own. If the corners fit into each other, the next batch begins in them.
# 3. Whether it asks autograd twice. Then the weight half walks the whole way again. Count the matrix products.
# </details>
#
# Next comes the capstone, unit 08: build the engine, train a Transformer, win the contest.
