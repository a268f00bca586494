# %% [markdown]
# # Choosing
#
# Which schedule, which mix, or none?
#
# **After this unit you can**
#
# - choose a schedule by a table that you have measured yourself,
# - say what tensor parallelism sends, and what a pipeline sends, to the byte,
# - tell whether a plan fits into memory before anybody buys anything,
# - run two pipelines side by side, and average their gradients so that training stays what it was,
# - choose the mix for a machine, or no pipeline at all, and give reasons that can be checked.
#
# **It takes** two sittings of about 45 minutes, with a place to stop after section 3. **You need** [unit 03](../03_weight_versions/weight_versions.ipynb): weight versions, and [unit 04](../04_one_forward_one_backward/one_forward_one_backward.ipynb): 1F1B, and the bytes of a worker.
#
# Six exercises earn points. As before, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
from functools import partial
from statistics import mean

import pipeschool as ps
import torch
from pipeschool import course_data, grade, lateness
from pipeschool.mix import GB, GIB, MIB, Mix
from pipeschool.partition import split_layers
from pipeschool.runtime import reference
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

torch.set_num_threads(1)
(inputs, targets), (test_inputs, test_targets) = course_data.digits()
batches = [(inputs[i : i + 64], targets[i : i + 64]) for i in range(0, 1024, 64)]

torch.manual_seed(0)
layers = [nn.Linear(64, 64) for _ in range(7)]
for layer in layers:
    nn.init.xavier_uniform_(layer.weight, gain=5 / 3)
model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers), nn.Linear(64, 10))
loss = nn.functional.cross_entropy
sgd = partial(torch.optim.SGD, lr=0.1)

print(f"{len(model)} layers to cut, {len(batches)} batches of {len(batches[0][0])} digits")

# %% [markdown]
# ## 1. A table of your own
#
# The tea shop does well, and the owner opens more of them. Before each opening somebody asks: how shall they work here? "As at the first shop" is no answer. One shop has a tiny counter. One must never serve an old recipe. One has a queue that never ends.
#
# You know four managers by now, and two relatives of the last one:
#
# | schedule | unit | its idea |
# |---|---|---|
# | `gpipe` | 01 | all forwards, all backwards, then the update |
# | `pipedream` | 02, 03 | never stop; an update after every microbatch; keep old weights in a stash |
# | `pipedream_2bw` | 03 | never stop; an update per batch; two versions of the weights |
# | `one_f_one_b` | 04 | take turns, with a flush per batch |
# | `interleaved_1f1b` | 07 | two smaller chunks per worker, so that filling takes half as long |
# | `zb_h1` | 07 | split the backward, and do in the gaps what can wait |
#
# (The last two come in unit 07. Here they only enter the race.)
#
# **Predict.** Four workers, eight microbatches, three batches in a row. Which of the six is fastest? Whose fullest worker holds the fewest bytes? And after one pass over 1024 digits with the same learning rate: do the synchronous ones differ from each other in accuracy?

# %%
guess_fastest = None  # a name
guess_smallest = None  # a name
guess_synchronous_differ = None  # "yes" or "no"

# %% [markdown]
# The next cell runs each of them twice on four real processes: three batches *paced*, to measure time and memory, and then one pass over 1024 digits at full speed, in batches of four microbatches, to see what they learn. It takes 15 to 30 seconds.

# %%
names = ("gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "pipedream", "pipedream_2bw")


def accuracy(stages, weights):
    """The share of the test digits that the trained stages get right."""
    x = test_inputs
    with torch.no_grad():
        for stage, parameters in zip(stages, weights, strict=True):
            x = torch.func.functional_call(stage, parameters, (x,))
    return (x.argmax(1) == test_targets).float().mean().item()


predicted, traces, learned = {}, {}, {}
for name in names:
    three = ps.build(name, p=4, m=8, batches=3)
    stages = split_layers(model, three.stages)
    pace = (0.015 / three.v, 0.03 / three.v)  # a chunk is a part of a worker's share
    options = dict(loss=loss, optimizer=sgd)
    predicted[name] = ps.simulate(three, ps.Cost(*pace))
    traces[name] = ps.run(three, stages, batches[:3], pace=pace, memory=True, **options).trace
    all_batches = ps.build(name, p=4, m=4, batches=len(batches))
    trained = ps.run(all_batches, stages, batches, **options)
    learned[name] = accuracy(stages, trained.state_dicts)

print(" " * 18 + "batches per second         bubble     most                 most")
print(" " * 18 + "predicted  measured*  of total*      A*  versions  late     kB*  accuracy")
for name, trace in traces.items():
    print(f"{name:<18}{3 / predicted[name].makespan:>9.2f}{3 / trace.makespan:>11.2f}", end="")
    print(f"{trace.bubble_of_total:>11.1%}{max(trace.peak_activations):>8g}", end="")
    print(f"{max(trace.weight_versions):>10}{max(trace.staleness):>6}", end="")
    print(f"{max(trace.peak_bytes) / 1000:>8.0f}{learned[name]:>10.1%}")
print("* measured, paced\n")
lateness.tell({name: (predicted[name], trace) for name, trace in traces.items()})

least = min(trace.makespan for trace in traces.values())
fastest = [name for name, trace in traces.items() if trace.makespan < 1.04 * least]
smallest = min(traces, key=lambda name: max(traces[name].peak_bytes))
synchronous = [learned[name] for name in names[:4]]
print(f"\nfastest, up to 4%: {', '.join(fastest)}; you predicted {guess_fastest}")
print(f"fewest bytes: {smallest}; you predicted {guess_smallest}")
print(f"the four synchronous ones differ by {max(synchronous) - min(synchronous):.1%}", end="")
print(f"; you predicted {guess_synchronous_differ}")

# %% [markdown]
# *most A* is what the fullest worker holds in activations, *most kB* what it holds in all, and *late* says how many updates old its weights were. The lines below the table say why *measured* is a little below *predicted*. If one says *run it again*, your machine was busy with something else: run the cell again before you compare. Each line of the table is a different bargain. Here are the same numbers as a picture: to the right is faster, up is fuller.

# %%
speeds = {name: 3 / trace.makespan for name, trace in traces.items()}
peaks = {name: max(trace.peak_bytes) / 1000 for name, trace in traces.items()}
points = "; ".join(f"{name} {speeds[name]:.2f} and {peaks[name]:.0f}" for name in names)
chart = ps.draw.Chart(
    f"Batches per second and peak kB on the fullest worker, measured and paced: {points}. "
    "Filled circles are synchronous, open squares asynchronous.",
    height=3.6,
)
chart.subplots_adjust(left=0.08, right=0.96, top=0.9, bottom=0.15)
axes = chart.subplots()
for name in names:
    late = max(traces[name].staleness) > 0
    marker, fill = ("s", "none") if late else ("o", "#0072b2")
    axes.plot(speeds[name], peaks[name], marker, color="#0072b2", mfc=fill, ms=9)
    axes.annotate(name, (speeds[name], peaks[name]), (9, 6), textcoords="offset points")
axes.set(xlabel="batches per second", ylabel="kB on the fullest worker")
axes.set_title("Measured, paced (filled: never late, open: late)", loc="left")
axes.margins(x=0.3, y=0.2)
chart

# %% [markdown]
# How to read it:
#
# - **The synchronous four** compute the same gradients, so they learn the same. Among them only time and memory count.
# - **The asynchronous two** save the refill, and pay: with versions, and with gradients that are late. `pipedream` also makes an update per microbatch, so four times as many, each from a quarter of the samples. So its accuracy is not to be compared at *one* learning rate; unit 03 has the fair experiment.
# - Which schedules stand in the line *fastest* hardly differ: look at what is *predicted* for them. `zb_h1` fills its gaps about as well as the asynchronous two avoid theirs.
# - Three batches are a short stream. The asynchronous two fill and drain once, the others once *per batch*: with every further batch the asynchronous ones gain.
# - Everybody would like to be in the lower right corner with a filled circle: fast, small, and never late. See who comes closest. Unit 07 shows how it is done.
#
# **Try it.** Find `p` and `m` at which the choice between the two hardly matters any more.

# %%
ps.widgets.explore(("one_f_one_b", "pipedream_2bw"))

# %% [markdown]
# ## 2. Two at one cup
#
# So far we cut the *line*. There is another way: two people make every cup together. One pours the left half, one the right half, and after each step they put the halves together.
#
# In training this is *tensor parallelism* (Shoeybi et al., Megatron-LM, 2019). The matrices of a layer are cut, so that each device has a part of *every* layer. There is no bubble. But the parts must be added up, by all, again and again: an **all-reduce** after the attention and one after the two linear layers, forward and backward. That makes *four per layer and microbatch*. Everybody waits for each of them.
#
# How large are these sums? As large as what a pipeline hands from stage to stage: a vector for each word.
#
# ### Exercise 1: one boundary (1 point)


# %%
def boundary_bytes(microbatch: int, sequence: int, hidden: int, bytes_per_number: int) -> int:
    """Bytes of the activations that one stage hands to the next, for one microbatch.

    microbatch: sequences in it. sequence: words in each. hidden: numbers per word.

    Example: boundary_bytes(microbatch=2, sequence=3, hidden=10, bytes_per_number=2) is 120.
    """
    ### BEGIN SOLUTION
    return microbatch * sequence * hidden * bytes_per_number
    ### END SOLUTION


# %%
grade.check(boundary_bytes, points=1)
### BEGIN HIDDEN TESTS
grade.check(boundary_bytes, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **An all-reduce.** $n$ devices stand in a ring. Each has a list of numbers, and all want the sum of the lists. A list is cut into $n$ equal pieces.
#
# - *Add up:* each device sends one piece to its neighbour, who adds its own. After $n - 1$ such turns each piece has met everybody, and each device has one finished piece.
# - *Hand out:* the finished pieces go round once more. That is $n - 1$ turns again.
#
# **Predict.** The model of 175 billion weights (96 layers, hidden 12288, 2 bytes per number) takes one sequence of 2048 words. A pipeline sends one boundary between two stages. How many times as much does *each* device send if 8 of them share every layer?

# %%
guess_times_as_much = None  # a number

# %% [markdown]
# ### Exercise 2: the traffic of tensor parallelism (3 points)


# %%
def tensor_bytes(layers: int, tensor: int, boundary: int) -> float:
    """Bytes that each device sends for one microbatch, forward and backward, in all-reduces.

    layers: how many layers the devices share; each has four all-reduces of `boundary` bytes.
    tensor: how many devices share them.

    Example: tensor_bytes(layers=1, tensor=5, boundary=1000) is 6400.
    """
    ### BEGIN SOLUTION
    return layers * 4 * 2 * (tensor - 1) / tensor * boundary
    ### END SOLUTION


# %%
grade.check(tensor_bytes, points=3)
### BEGIN HIDDEN TESTS
grade.check(tensor_bytes, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_boundary, my_tensor = grade.yours(boundary_bytes), grade.yours(tensor_bytes)
one = my_boundary(1, 2048, 12288, 2)
shared = my_tensor(96, 8, one)
grade.reveal(guess_times_as_much, round(shared / one), "times as much")

print(f"\none boundary: {one / MIB:g} MiB; a device between two others sends two of them,")
print(f"activations one way and gradients the other: {2 * one / MIB:g} MiB")
print(f"8-way tensor parallel: {shared / GIB:g} GiB from each device\n")
for link, speed in (("within a box, 200 GB/s", 200 * GB), ("between boxes, 20 GB/s", 20 * GB)):
    print(f"{link}: pipeline {2 * one / speed:.4f} s, tensor parallel {shared / speed:.2f} s")

gpt3 = ps.mix.Transformer(layers=96, hidden=12288, sequence=2048)
box = ps.mix.Machine(8, 1, 80 * GB, 150e12, inside=200 * GB, between=20 * GB)
print(
    f"\npipeschool's cost model: {ps.mix.estimate(gpt3, box, Mix(tensor=8)).tensor_bytes / GIB:g}"
)

# %% [markdown]
# The formula: with $L$ layers, $t$ devices and a boundary of $b$ bytes, each device sends
#
# $$L \cdot 4 \cdot \frac{2(t - 1)}{t} \cdot b .$$
#
# Three things follow. Tensor parallelism wants the fastest links there are, those *inside* a box. A pipeline is content with slow ones, *between* boxes. And the more devices share a layer, the less each computes, while it sends nearly the same: the fraction only creeps towards 2.
#
# ### For real
#
# Which way are the matrices cut, so that two all-reduces per direction are enough? The first linear layer of a pair by columns: each device then has some of the numbers in between, ready to use, and nobody needs the others. The second one by rows: each device has a share of every result. Only then a sum is due.
#
# The next cell trains a pipeline of two stages, and *two processes share each stage*. The slices and the sums are PyTorch's own (`torch.distributed.tensor.parallel`). `up` and `down` are the two linear layers of a stage.
#
# **Predict.** How much of the bytes of the weights does each of the four processes hold, compared with a pipeline of two?

# %%
guess_bytes_left = None  # a share, such as 0.25


# %%
class Pair(nn.Module):
    """Two linear layers, as in every block of a Transformer: wide in between."""

    def __init__(self, outputs):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, outputs)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


pairs, some = [Pair(64), Pair(10)], (inputs[:256], targets[:256])
line = ps.one_f_one_b(p=2, m=4)
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
alone = ps.run(line, pairs, [some], loss=loss)
cut = ps.run(line, pairs, [some], loss=loss, tensor_parallel=2, tensor_plan=plan)

before, after = (run.trace.parameter_bytes for run in (alone, cut))
error = reference.max_error(cut.gradients, reference.gradients(pairs, [some], m=4, loss=loss))
print("bytes of weights on each process, stage 0 and stage 1")
print("  two processes: ", before)
print("  four processes:", after)
grade.reveal(guess_bytes_left, round(sum(after) / sum(before), 3), "of the bytes")
print(f"largest difference from the gradients of one process: {error:.1e}")
for name, run in (("pipeline alone", alone), ("pipeline x tensor", cut)):
    print(f"{name:<18} measured here, not paced: {1000 * run.trace.makespan:.0f} ms")

# %% [markdown]
# A little more than half: what is added *after* the sum (the second layer's bias) is on both. The gradients are right. And it is slower here, as you may have guessed: the layers are tiny, and each sum is a conversation between processes.

# %% [markdown]
# ## 3. Does it fit?
#
# Why cut a model at all? Because it does not fit. Large models are trained in *mixed precision*, and each weight then takes
#
# | | bytes per weight |
# |---|---|
# | the weight itself, and its gradient | 2 + 2 |
# | Adam: a precise copy of the weight, and two moments | 4 + 4 + 4 |
#
# That is 16 bytes (Rajbhandari et al., ZeRO, 2020). The activations come on top: those of every microbatch in flight, for every layer on the device.
#
# **Predict.** A model of 13 billion weights, devices of 80 GB. Into how many parts must it be cut, at least?

# %%
guess_parts = None  # a whole number

# %% [markdown]
# ### Exercise 3: the bytes of a plan (4 points)
#
# Work out the bytes on a device of the *first* stage, whose counter is fullest. The plan has `pipeline` stages, and each stage is shared by `tensor` devices. So each device has an equal part of the weights. 2BW keeps one more version of them, 2 bytes each; its counter is as full as that of 1F1B, whose order it has.


# %%
def plan_bytes(
    schedule: str,
    pipeline: int,
    tensor: int,
    m: int,
    parameters: int,
    layers: int,
    layer_activations: int,
) -> float:
    """Bytes on a device of the first stage: weights, gradients, optimizer, activations.

    schedule: "one_f_one_b", "gpipe" or "pipedream_2bw".
    m: microbatches of one line and one batch.
    parameters, layers: weights and layers of the whole model, shared out evenly.
    layer_activations: bytes that one layer keeps for one microbatch on one device. (Tensor
    parallelism has been taken into account in it; it does not shrink any further.)

    Example: plan_bytes("one_f_one_b", 2, 1, 6, 1000, 4, 10) is 8040.
    """
    ### BEGIN SOLUTION
    per_weight = 18 if schedule == "pipedream_2bw" else 16
    in_flight = m if schedule == "gpipe" else min(m, pipeline)
    weights = per_weight * parameters / (pipeline * tensor)
    return weights + in_flight * layers / pipeline * layer_activations
    ### END SOLUTION


# %%
grade.check(plan_bytes, points=4)
### BEGIN HIDDEN TESTS
grade.check(plan_bytes, points=4, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_plan = grade.yours(plan_bytes)
big = ps.mix.Transformer(layers=40, hidden=5120, sequence=2048)
grade.reveal(guess_parts, -(-16 * big.parameters // (80 * GB)), "parts, for the weights alone")

print(f"\n{big.parameters / 1e9:.3g} billion weights, GB on a device of the first stage")
print(f"{'data x pipeline x tensor':<32}{'schedule':<16}{'your plan':>9}{'library':>9}")
for mix in (
    Mix(1, 1, 1, m=32),
    Mix(1, 8, 1, m=32),
    Mix(1, 8, 1, m=32, schedule="gpipe"),
    Mix(1, 8, 1, m=32, schedule="pipedream_2bw"),
    Mix(2, 4, 1, m=16),
    Mix(2, 2, 2, m=16),
    Mix(1, 1, 8, m=32),
):
    each = big.layer_activation_bytes(mix.microbatch, mix.tensor)
    need = my_plan(mix.schedule, mix.pipeline, mix.tensor, mix.m, big.parameters, big.layers, each)
    found = ps.mix.estimate(big, box, mix)
    fits = "fits" if found.fits else "does not fit"
    print(f"{str(mix):<32}{mix.schedule:<16}{need / GB:>9.1f}{found.memory / GB:>9.1f}  {fits}")

# %% [markdown]
# The library looks at all stages, not only at the first. Where its number is larger, another device is fuller: it also keeps the inputs that came from the stage before.
#
# Note what *data* parallelism does in this table: nothing. A second line is a second copy of everything. It buys speed, never memory.
#
# *This is a good place to stop for today. When you come back, run the cells from the top: it takes a minute.*

# %% [markdown]
# ## 4. Two lines side by side
#
# The shop has four people. They can form one line of four, or two lines of two that share the queue: *data times pipeline*. In the evening the two lines compare notes, so that both use the same recipe tomorrow.
#
# In training, each line has all weights and takes a part of the microbatches. At the update, all workers of the same stage add up their gradients, by an all-reduce.
#
# ### Exercise 4: who takes what (1 point)
#
# The lines take microbatches in turn: number 0 goes to line 0, number 1 to line 1, and so on round and round.


# %%
def share_of(line: int, lines: int, m: int) -> list[int]:
    """The microbatches that `line` takes, out of m, numbered from 0.

    Example: share_of(line=2, lines=3, m=9) is [2, 5, 8].
    """
    ### BEGIN SOLUTION
    return list(range(line, m, lines))
    ### END SOLUTION


# %%
grade.check(share_of, points=1)
### BEGIN HIDDEN TESTS
grade.check(share_of, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 5: one gradient out of several (2 points)
#
# Each line's gradient is the mean over *its own* samples. Wanted is the mean over *all* samples of the batch. What if one line had more samples than the other?


# %%
def mean_gradient(gradients: list[list[float]], samples: list[int]) -> list[float]:
    """The gradient of the whole batch.

    gradients: one per line, each a list of numbers, of equal lengths.
    samples: over how many samples each of them is the mean.

    Example: mean_gradient(gradients=[[2.0, 0.0], [5.0, 3.0]], samples=[2, 4]) is [4.0, 2.0].
    """
    ### BEGIN SOLUTION
    total = sum(samples)
    return [
        sum(g * n for g, n in zip(column, samples, strict=True)) / total
        for column in zip(*gradients, strict=True)
    ]
    ### END SOLUTION


# %%
grade.check(mean_gradient, points=2)
### BEGIN HIDDEN TESTS
grade.check(mean_gradient, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Now your two answers train, by hand. 1000 digits are cut into five microbatches. Two lines of two workers each run one after the other, each with its share. That makes three microbatches for one line, and two for the other. Then your average is compared with the gradient of one process that never heard of lines.

# %%
my_share, my_mean = grade.yours(share_of), grade.yours(mean_gradient)
halves = split_layers(model, 2)
uneven = (inputs[:1000], targets[:1000])
pieces = list(zip(*(torch.tensor_split(part, 5) for part in uneven), strict=True))


def as_list(gradients):
    """All numbers of a list of dictionaries of gradients, one after the other."""
    return [x for stage in gradients for g in stage.values() for x in g.flatten().tolist()]


found, samples = [], []
for line in range(2):
    numbers = my_share(line, 2, 5)
    mine = tuple(torch.cat([pieces[k][i] for k in numbers]) for i in (0, 1))
    run = ps.run(ps.one_f_one_b(p=2, m=len(numbers)), halves, [mine], loss=loss)
    found.append(as_list(run.gradients))
    samples.append(len(mine[0]))
    print(f"line {line}: microbatches {numbers}, {samples[-1]} digits")

right = as_list(reference.gradients(halves, [uneven], m=5, loss=loss))
half_and_half = [mean(pair) for pair in zip(*found, strict=True)]
for name, gradient in (("your average", my_mean(found, samples)), ("half and half", half_and_half)):
    error = max(abs(a - b) for a, b in zip(gradient, right, strict=True))
    print(f"{name:<14} largest difference from one process: {error:.1e}")

# %% [markdown]
# Half and half is not far off, and that is the trouble: nothing breaks, nobody notices.
#
# Now all four workers at the same time. `ps.replicate` puts copies of a schedule side by side. Microbatches go to the lines as in your `share_of`, and at the update the workers of a stage sum their gradients.
#
# **Predict.** Workers 0 and 1 are line 0, workers 2 and 3 are line 1. Which worker computes the same gradients as worker 1?

# %%
guess_same_stage = None  # number of a worker

# %%
two_by_two = ps.replicate(ps.one_f_one_b(p=2, m=4), lines=2)
batch = (inputs[:1024], targets[:1024])
both = ps.run(two_by_two, halves, [batch], loss=loss, optimizer=sgd, pace=(0.03, 0.06))

alone = reference.gradients(halves, [batch], m=8, loss=loss, replicas=[2, 2])
grade.reveal(guess_same_stage, two_by_two.owners[1][1], "is on stage 1 as well")
print("the workers of each stage:", two_by_two.owners)
for line in range(2):
    done = [span.action.microbatch for span in both.trace.rows[2 * line] if span.action.kind == "F"]
    print(f"line {line} did {done}; your share_of says {my_share(line, 2, 8)}")
error = reference.max_error(both.gradients, alone)
print(f"largest difference from the gradients of one process: {error:.1e}")
ps.draw.gantt(both.trace)

# %% [markdown]
# Two short pipelines, each with a small bubble of its own. The black boxes at the end are the updates: the workers of a stage wait for each other there, and sum.
#
# For four workers and eight microbatches there are three ways: 1 × 4, 2 × 2 and 4 × 1. The last is data parallelism without any pipeline. Let the whole model take 4 seconds forward and 8 backward, and an all-reduce of *all* gradients between two devices `sync` seconds.
#
# **Predict.** With a fast all-reduce, which of the three is fastest? And with a slow one?

# %%
guess_fast_sync = None  # (lines, stages)
guess_slow_sync = None

# %%
guesses = {0: guess_fast_sync, 24: guess_slow_sync}
for sync in (0, 8, 24):  # try others
    print(f"all-reduce of all gradients between two devices: {sync} s")
    for lines in (1, 2, 4):
        p = 4 // lines
        update = sync / p * 2 * (lines - 1) / lines  # of a stage's share, round the ring
        cost = ps.Cost(forward=4 / p, backward=8 / p, update=update)
        trace = ps.simulate(ps.replicate(ps.one_f_one_b(p, m=8 // lines), lines), cost)
        print(f"  {lines} x {p}: {trace.makespan:>5g} s", end="")
        print(f"   (bubble and update {1 - sum(trace.busy) / (4 * trace.makespan):.0%})")
    if sync in guesses:
        print(f"  you predicted {guesses[sync]}")

# %% [markdown]
# So there is no winner. Data parallelism has no bubble and much to sum. A pipeline has a bubble and little to send. With fast links and a model that fits, *the best pipeline is none at all*.
#
# **A mix with a limp.** PipeDream also knows lines of which one station has more people than the others. Say stage 0 is twice as slow as stage 1. `round_robin([2, 1], m)` puts stage 0 on two workers, which take turns.
#
# **Predict.** Two workers, one per stage, against three: how many times as fast is the line?

# %%
guess_times_as_fast = None  # a number

# %%
slow_first = ([0.02, 0.01], [0.04, 0.02])  # seconds forward and backward, per stage
pair = ps.run(ps.pipedream(2, 16), halves, [batch], loss=loss, optimizer=sgd, pace=slow_first)
three = ps.run(
    ps.round_robin([2, 1], 16), halves, [batch], loss=loss, optimizer=sgd, pace=slow_first
)
times = pair.trace.makespan / three.trace.makespan
grade.reveal(guess_times_as_fast, round(times, 2), "times as fast, measured, paced")
slow_cost = ps.Cost(*slow_first)
lateness.tell(
    {
        "two workers": (ps.simulate(ps.pipedream(2, 16), slow_cost), pair.trace),
        "three": (ps.simulate(ps.round_robin([2, 1], 16), slow_cost), three.trace),
    }
)
ps.draw.gantt(pair.trace, three.trace)

# %% [markdown]
# The slowest stage set the pace (unit 02). With two workers it takes half as long per microbatch, and nobody has to wait for it in the long run. The extra worker brings its own copy of the weights, and the two sum their gradients at each update, just like two lines. The black boxes are these sums, and the wait for the other worker. (No time was declared for them, so they come on top of the pace, and the lines count them among the *actions*.)

# %% [markdown]
# ## 5. Choose
#
# Five shops want your advice. `ps.mix` is the cost model: it simulates the pipeline with the seconds and bytes of the real sizes, adds the all-reduces, and says what a step takes and whether it fits. Everything it says is *predicted*.

# %%
sites = grade.unit06.SITES
for name, site in sites.items():
    print(f"{name}: {site}\n")

# %% [markdown]
# (A *node* is one machine: a box with all its devices, or a desk with one.)
#
# A *mix* says how many copies of the model there are (`data`), into how many stages each is cut (`pipeline`), how many devices share a stage (`tensor`), and how many microbatches each line takes. `microbatch` is the number of sequences in each, one if you leave it out. So `data * m * microbatch` must be the sequences of a step. The table below writes `1 x 8 x 1, m=8 of 4` for one copy, eight stages, one device each, and eight microbatches of four.
#
# **Try it.** Change the mixes and the site, and look at where the time goes.

# %%
site = sites["server"]
mixes = [
    Mix(data=8, pipeline=1, tensor=1, m=8),
    Mix(data=1, pipeline=8, tensor=1, m=64),
    Mix(data=1, pipeline=1, tensor=8, m=64),
    Mix(data=1, pipeline=8, tensor=1, m=8, microbatch=8),
    Mix(data=1, pipeline=8, tensor=1, m=64, recompute=True),
]
print(ps.mix.table(ps.mix.compare(site.model, site.machine, mixes)))

# %% [markdown]
# The shares are those of the mean device: computing, waiting for other stages (bubble), waiting for the sums of tensor parallelism, and for the sums of gradients (data). What they leave out: a small microbatch uses a real device worse than a large one, and large systems hide part of the sums behind work.
#
# **Predict**, before you try them all: at which of the five is a pipeline *not* worth it?

# %%
guess_no_pipeline = set()  # names, such as {"desk"}

# %% [markdown]
# ### Exercise 6: five choices (5 points)
#
# One point for each site. Return a mix and your reason, or a list of reasons. A choice counts if it fits and a step takes at most 15% longer than the best one that pipeschool knows. The cost model is no better than that. And each reason must be *true* of your mix:
#
# | reason | true if |
# |---|---|
# | `"one device suffices"` | the mix does not cut the model, and it fits |
# | `"must be cut"` | the model does not fit on one device, even with recomputation |
# | `"small bubble"` | there is a pipeline, and its bubble is less than 10% of the step |
# | `"tensor inside the node"` | the machine has several nodes, and tensor parallelism stays inside one |
# | `"pipeline across nodes"` | stages are on several nodes, and send less than tensor parallelism would |
# | `"recompute to fit"` | the mix recomputes, and would not fit otherwise |
# | `"faster than a pipeline"` | the mix has none, and no pipeline on as many devices is as fast |
# | `"faster than data parallel"` | copies of the whole model fit, and would take longer |


# %%
def choose(site: str) -> tuple[ps.mix.Mix, str | list[str]]:
    """A mix for one of the five sites, and why.

    site: "desk", "workstation", "server", "office" or "cluster".

    Example: (ps.mix.Mix(data=2, pipeline=2, m=16), ["must be cut"]) is right in form, for no site.
    """
    ### BEGIN SOLUTION
    return {
        "desk": (Mix(m=32), "one device suffices"),
        "workstation": (Mix(data=8, m=2), ["one device suffices", "faster than a pipeline"]),
        "server": (Mix(data=2, pipeline=2, tensor=2, m=32), ["must be cut", "small bubble"]),
        "office": (Mix(pipeline=4, m=64), ["pipeline across nodes", "faster than data parallel"]),
        "cluster": (
            Mix(pipeline=8, tensor=8, m=128),
            ["must be cut", "tensor inside the node", "pipeline across nodes"],
        ),
    }[site]
    ### END SOLUTION


# %%
grade.check(choose, points=5)
### BEGIN HIDDEN TESTS
grade.check(choose, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# And what would pipeschool have chosen? It tries every mix that could be the fastest, and gives all reasons that are true.

# %%
my_choice = grade.yours(choose)
no_pipeline = set()
for name, site in sites.items():
    mix, why = my_choice(name)
    best = ps.mix.recommend(site.model, site.machine, site.batch)
    took = ps.mix.estimate(site.model, site.machine, mix).seconds
    print(f"\n{name}. Yours: {mix}, {took:.3g} s per step. pipeschool's: {best}")
    if best.best.mix.pipeline == 1:
        no_pipeline.add(name)
print(f"\nno pipeline at: {sorted(no_pipeline)}; you predicted {sorted(guess_no_pipeline)}")

# %% [markdown]
# In the end it is four questions, in this order:
#
# 1. **Does it fit on one device?** Then take copies, as many as there are devices and as the network can bear. No pipeline.
# 2. **If not: are there fast links?** Share layers inside the box, with tensor parallelism, as far as they reach.
# 3. **Still too large, or only slow links?** Put a pipeline across them, with as few stages as fit, and $m$ well above $p$.
# 4. **Which schedule?** Synchronous, unless you are ready to tune for late gradients. 1F1B if memory is short. The ones of unit 07 if the bubble hurts.

# %% [markdown]
# ## 6. The claims lab
#
# As before: decide first, write `"right"`, `"wrong"` or `"half"` (right in part, or only under a condition that the claim leaves out) in place of the `"?"`, run the cell, and only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > Tensor parallelism sends gigabytes in a step, a pipeline megabytes.

# %%
verdicts[1] = "?"

print("175 billion weights, sent by the busiest device in one step")
for m in (1, 8, 128):
    tensor, pipeline = (
        ps.mix.estimate(gpt3, box, mix) for mix in (Mix(tensor=8, m=m), Mix(pipeline=8, m=m))
    )
    print(f"m = {m:<4} 8-way tensor parallel {tensor.tensor_bytes / GIB:>8,.1f} GiB", end="")
    print(f", 8 stages {pipeline.pipeline_bytes / GIB:>6.2f} GiB", end="")
    print(f", ratio {tensor.tensor_bytes / pipeline.pipeline_bytes:.0f}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** It is right for one sequence. A real step has many microbatches, and then a pipeline sends gigabytes, too. What stays is the ratio, and it is large.
# </details>
#
# ### Claim 2
#
# > If you want PipeDream, take DeepSpeed: its pipeline is a PipeDream-style schedule.
#
# DeepSpeed's source (`deepspeed/runtime/pipe/schedule.py`, class `TrainSchedule`) says of itself that it works by gradient accumulation, and that it converges like data parallelism with the same batch size. It has $2(m + p - 1)$ steps of one forward or one backward each. The optimizer comes once, in the last of them. Which line below is that?

# %%
verdicts[2] = "?"

p, m = 4, 8
print(f"2(m + p - 1) = {2 * (m + p - 1)}")
for name in ("one_f_one_b", "pipedream"):
    schedule = ps.build(name, p, m)
    trace = ps.simulate(schedule, ps.Cost(forward=1, backward=1))
    updates = sum(action.kind == "U" for action in schedule.workers[0])
    print(f"{name:<12} steps {trace.makespan:g}, updates {updates}", end="")
    print(f", in flight {trace.peak_activations}, late {trace.staleness}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** It takes turns as PipeDream does, but it updates once, after a flush: it is 1F1B, synchronous. (Both names are in use for it, which is how the rumour began.)
# </details>
#
# ### Claim 3
#
# > In inference there is nothing to wait for but fill and drain. Putting more requests together makes the bubble vanish.
#
# `ps.forward_only` is a pipeline without backwards. With `tokens`, each request comes round again for its next word, once the last one has left the line.

# %%
verdicts[3] = "?"

counts = (1, 2, 4, 8, 32)
print("bubble of total, p = 4, m requests" + "".join(f"{f'm = {m}':>9}" for m in counts))
for words in (1, 16, 64):
    bubbles = [ps.simulate(ps.forward_only(4, m, tokens=words)).bubble_of_total for m in counts]
    print(f"words per request: {words:<15}" + "".join(f"{bubble:>9.1%}" for bubble in bubbles))

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** Without the words in turn, it is $(p - 1)/(m + p - 1)$ again, and more requests help. But who writes word by word needs at least $p$ requests in flight *all the time*. With fewer, each word waits for the one before it, and the bubble stays, however long the answers are. Dynamic batching helps just as far as it keeps $p$ requests in flight.
# </details>
#
# ### Claim 4
#
# > Four workers in a pipeline are always faster than one.

# %%
verdicts[4] = "?"

print("eight microbatches, 3 ms each on one worker; four workers, one message in ms:")
single = ps.simulate(ps.one_f_one_b(1, 8), ps.Cost(1, 2)).makespan
for message in (0, 0.25, 1, 2, 4):
    cost = ps.Cost(forward=1 / 4, backward=2 / 4, latency=message)
    together = ps.simulate(ps.one_f_one_b(4, 8), cost).makespan
    print(f"  {message:<5} one worker {single:g} ms, four workers {together:.4g} ms")

small = {
    p: ps.run(ps.one_f_one_b(p, 8), split_layers(model, p), batches[:1], loss=loss) for p in (1, 4)
}
print("\nmeasured here, not paced, with our small model:")
for p, run in small.items():
    print(f"  {p} worker(s): {run.trace.makespan * 1000:.1f} ms")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** A microbatch has to be worth its message. And four workers on fewer than four cores share them. A pipeline is for models that do not fit, or that compute for long between two messages.
# </details>
#
# ### Claim 5
#
# > So we take A100s with 72 GB.
#
# An A100 has five stacks of memory in use.

# %%
verdicts[5] = "?"

for stack in (8, 16):
    print(f"five stacks of {stack} GB: {5 * stack} GB")
mix = my_choice("cluster")[0]
need = ps.mix.estimate(sites["cluster"].model, sites["cluster"].machine, mix).memory / GB
for size in (40, 72, 80):
    print(f"the cluster's mix takes {need:.1f} GB of {size}: {'fits' if need <= size else 'no'}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** It is sold with 40 and with 80 GB. One wrong number in a plan, and you order too many devices, or too few. (Of the 80, leave some for what a plan leaves out.)
# </details>
#
# ### Claim 6
#
# > Two lines that average their gradients by samples train exactly like one process with the whole batch.

# %%
verdicts[6] = "?"

print(f"2 x 2, all four workers: off by {error:.1e} after one batch")
five = ps.run(two_by_two.repeat(5), halves, [batch] * 5, loss=loss, optimizer=sgd)
by_one = reference.gradients(halves, [batch] * 5, m=8, loss=loss, optimizer=sgd)
print(f"after five updates: off by {reference.max_error(five.gradients, by_one):.1e}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, up to the rounding of sums in another order, and as long as no layer looks at the other samples of its batch, as BatchNorm does. Data times pipeline is not a new way to train. It is a new way to be fast.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit06.CLAIMS)

# %% [markdown]
# ## Summary
#
# - A schedule is a bargain of time, memory and lateness. Synchronous ones learn the same; among them choose by time and memory.
# - Tensor parallelism has no bubble, and four all-reduces per layer and microbatch: keep it on fast links. A pipeline sends one boundary each way: it may cross slow ones.
# - Weights take 16 bytes each with Adam in mixed precision. Cutting the model saves memory; copies of it never do.
# - Data × pipeline: lines take microbatches in turn, and average their gradients by samples. Training stays what it was.
# - If the model fits and the links are fast, take copies and no pipeline.
# - A choice is worth as much as its reasons. Work them out in bytes and seconds.
#
# ## Check yourself
#
# 1. Your model fits on one device, and eight devices share a fast box. A colleague builds a pipeline of eight stages. What do you ask?
# 2. Sixteen boxes with eight devices each. Why is tensor parallelism over 16 devices a bad idea here?
# 3. Two lines have 300 and 100 samples. What happens if their gradients are averaged half and half?
#
# <details>
# <summary>Answers</summary>
#
# 1. Why not eight copies? They have no bubble, and the all-reduce of the gradients is fast inside the box. A pipeline saves memory, which you do not need.
# 2. It would have to leave the box. Everybody waits for four all-reduces per layer, and now over links that are many times slower.
# 3. Each of the 100 samples counts three times as much as each of the 300. It is not the gradient of the batch's mean loss, and nothing says so.
# </details>
#
# Next comes unit 07: can the bubble vanish without going stale?
