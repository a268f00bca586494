# %% [markdown]
# # Weight versions
#
# Whose gradient is this, and may I use it?
#
# **After this unit you can**
#
# - say why PyTorch refuses an update between a forward and its backward, and how to keep old weights at hand,
# - write weight stashing, vertical sync and double buffering (2BW), and run them on real workers,
# - work out the versions, the bytes and the staleness of every stage,
# - prove, update by update, that a pipeline does what its rule says,
# - measure what each policy does to the accuracy, and say honestly where you see no difference.
#
# **It takes** two sittings of about 60 minutes, with a place to stop after section 7. In the second the machine computes for two or three minutes. **You need** [unit 02](../02_asynchronous_execution/asynchronous_execution.ipynb): the asynchronous order, and the torn gradient at its end.
#
# Nine exercises earn points. As before, what you write is used in the cells after it. Until it passes its checks, those cells use pipeschool's own answer and say so.

# %%
import copy
import math
from functools import partial
from statistics import mean, stdev

import pipeschool as ps
import torch
from pipeschool import course_data, grade
from torch import nn
from torch.func import functional_call

torch.set_num_threads(1)  # as in a worker, so that sums are added up in the same order
(inputs, targets), _ = course_data.digits()  # 1437 handwritten digits, 64 pixels each

torch.manual_seed(0)
stages = [
    nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    nn.Linear(64, 10),
]
loss = nn.functional.cross_entropy
sgd = partial(torch.optim.SGD, lr=0.1)
cups = list(zip(inputs.split(16), targets.split(16), strict=True))  # (inputs, targets) of each

print(f"{len(stages)} stages, and cups of {len(cups[0][0])} digits")

# %% [markdown]
# ## 1. A stamp on every recipe
#
# The shop where nobody waits has put a stamp on its recipe cards. At opening time every station's card says *v0*. Whenever a cup comes back, the station writes a new card: *v1*, *v2*, and so on. And every cup that leaves gets the stamp of the card that made it.
#
# **Predict.** Four stations work in the asynchronous order of unit 02. Think of cup 4 at station 0. Which stamp does it leave with? And which card lies there when it comes back?

# %%
guess_down = None  # a number: v...
guess_back = None

# %%
one_card = ps.simulate(ps.pipedream(p=4, m=1, batches=10), weights="latest")
stamps = {span.action: span.version for span in one_card.rows[0]}

grade.reveal(guess_down, stamps[ps.F(0, 4)], "on its way down")
grade.reveal(guess_back, stamps[ps.B(0, 4)], "when it is back")
ps.draw.versions(one_card)

# %% [markdown]
# One colour per version (after six the colours begin again). In the upper lane of a row cups go down the line, in the lower lane they come back. A thick edge marks a cup that comes back to another card than the one it was made with. In unit 02 you proved that such a gradient is no model's gradient.
#
# The cure seems simple: do not throw the old card away. The stamp says which one to take out when the cup is back. But first, let us see what PyTorch has to say about it.

# %% [markdown]
# ## 2. What PyTorch refuses, and what it cannot see
#
# A cup goes forward through a layer. Before its backward, another cup comes back and the layer is adjusted. Then our cup's backward runs. The function below does that with any adjustment you like. It returns the gradient for the stage before.
#
# **Predict.** The adjustment is a plain `optimizer.step()`. Will PyTorch compute the right gradient, compute a wrong one, or refuse?

# %%
guess_step = None  # "right", "wrong" or "refuse"


# %%
def there_and_back(adjust):
    """The gradient that a cup brings to the stage before, if `adjust(layer)` comes in between."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss_of_cup = layer(x).square().sum()  # forward
    adjust(layer)
    loss_of_cup.backward()
    return x.grad


def step(layer):
    for w in layer.parameters():
        w.grad = torch.ones_like(w)  # from the other cup
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


print("no adjustment:   ", there_and_back(lambda layer: None))
try:
    print("optimizer.step():", there_and_back(step))
except RuntimeError as problem:
    print("optimizer.step(): RuntimeError:", str(problem).partition(" Hint")[0])
print("you predicted:   ", guess_step)

# %% [markdown]
# It refuses. The backward needs the weights of the forward, and autograd keeps a counter on every tensor: it sees that this one was changed in place. (The *version* in its message is that counter. It has nothing to do with our stamps.) That is a good error. Do not silence it!
#
# People do silence it. `.data` gives the same numbers without the counter. The next cell makes the very same adjustment that way. It also prints what the gradient would be with the new weights in the forward *and* in the backward.


# %%
def copy_in(layer):
    for w in layer.parameters():
        w.data.copy_(w.data - 1.0)  # what the step above does, behind autograd's back


def all_new():
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    copy_in(layer)
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).square().sum().backward()
    return x.grad


print("forward old, backward old:", there_and_back(lambda layer: None))
print("forward old, backward new:", there_and_back(copy_in))
print("forward new, backward new:", all_new())

# %% [markdown]
# No error, and the line in the middle is neither the one above it nor the one below it. This is the torn gradient, and this is how pipeschool's `latest` makes it, on purpose.
#
# Now the right way. A version is a *dictionary of its own*, from names to tensors. `torch.func.functional_call` runs a layer with the dictionary that you hand to it. An update does not change a dictionary, it makes a new one.

# %%
torch.manual_seed(0)
layer = nn.Linear(2, 2)
v0 = {name: w.detach().clone().requires_grad_() for name, w in layer.named_parameters()}

x = torch.ones(1, 2, requires_grad=True)
loss_of_cup = functional_call(layer, v0, (x,)).square().sum()  # forward, on v0
v1 = {name: (w - 1.0).detach().requires_grad_() for name, w in v0.items()}  # the adjustment
loss_of_cup.backward()  # the graph still holds the tensors of v0

print("for the stage before:", x.grad)
print("for the weights:     ", {name: w.grad is not None for name, w in v0.items()}, "in v0")

# %% [markdown]
# That is the gradient of "no adjustment" again. Nothing had to be put back: the autograd graph itself holds on to the version that the forward used. So keeping versions costs no work. It costs memory.
#
# **Try it.** Hand `v1` instead of `v0` to `functional_call` (make it first). Which line of the table above do you get?

# %% [markdown]
# ## 3. Use, keep, drop
#
# *Weight stashing* (PipeDream, Narayanan et al., SOSP 2019) is three rules for the cards of one station.
#
# - **Use.** A forward uses the newest version. Its backward uses that same version again.
# - **Keep.** The newest version, and each one that a microbatch *in flight* will come back to. In flight is what has gone forward here and not yet backward.
# - **Drop** everything else at once.
#
# ### Exercise 1: a stash (4 points)
#
# One step of the book-keeping, for one stage. An update `ps.U(stage, t)` makes a new version.


# %%
def stash_step(action: ps.Action, newest: int, in_flight: dict[int, int]) -> tuple[int, list[int]]:
    """What stashing does at one action of a stage: the pair (version, kept).

    action: a forward F, a backward B or an update U; see its .kind and .microbatch.
    newest: the newest version before the action.
    in_flight: {microbatch: version that its forward used}, before the action. Leave it as it is.
    Returns the version that an F or B uses or that a U makes, and the list of all versions
    that must be kept once the action is over, each listed once.

    Example: stash_step(ps.F(0, 3), newest=2, in_flight={2: 1}) is (2, [1, 2]).
    """
    ### BEGIN SOLUTION
    flying = dict(in_flight)
    if action.kind == "F":
        version = flying[action.microbatch] = newest
    elif action.kind == "B":
        version = flying.pop(action.microbatch)
    else:
        version = newest = newest + 1
    return version, sorted({newest, *flying.values()})
    ### END SOLUTION


# %%
grade.check(stash_step, points=4)
### BEGIN HIDDEN TESTS
grade.check(stash_step, points=4, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# The next cell walks along a whole row with your function. Watch the list on the right grow. How long does it get?

# %%
my_step = grade.yours(stash_step)
stream = ps.pipedream(p=4, m=1, batches=12)  # 12 cups, an update after each


def walk(row):
    """(action, version, kept) of every action in the row of one stage."""
    newest, in_flight, lines = 0, {}, []
    for action in row:
        version, kept = my_step(action, newest, in_flight)
        lines.append((action, version, kept))
        if action.kind == "F":
            in_flight[action.microbatch] = version
        elif action.kind == "B":
            del in_flight[action.microbatch]
        else:
            newest = version
    return lines


for action, version, kept in walk(stream.workers[0])[:19]:
    verb = "makes" if action.kind == "U" else "uses "
    print(f"{action!s:>4} {verb} v{version}    kept: {' '.join(f'v{v}' for v in kept)}")

# %% [markdown]
# Now for real. pipeschool's runtime asks a *policy* three questions: which version does this forward use, which one does this backward use, and what is the oldest version that a forward to come may still ask for? It keeps the tensors, and drops those that nobody needs. The class below answers out of your function, and travels with it to four real processes.


# %%
class MyStash(ps.Policy):
    def forward(self, microbatch, newest):
        return my_step(ps.F(self.stage, microbatch), newest, {})[0]

    def backward(self, microbatch, used, newest):
        return my_step(ps.B(self.stage, microbatch), newest, {microbatch: used})[0]

    def oldest_needed(self, next_microbatch, newest):
        return newest  # every forward to come will use the newest


pace = (0.01, 0.02)
stashed = ps.run(
    stream, stages, cups[:12], loss=loss, optimizer=sgd, weights=MyStash, pace=pace, history=True
)
ps.draw.versions(stashed.trace)

# %% [markdown]
# Compare with the first chart. The thick edges are gone: follow any cup in any row, its colour below is its colour above. On the right stands how many copies of its weights a worker really had in memory at its worst moment.
#
# ### Exercise 2: versions needed (1 point)
#
# Look at that column and at the warm-up of each row. How many versions does stage $s$ of $p$ stages have to keep, in a long stream?


# %%
def versions_needed(stage: int, p: int) -> int:
    """How many weight versions a stage keeps at most under stashing, the newest one included.

    stage: counted from 0. p: the number of stages.

    Example: versions_needed(stage=0, p=1) is 1.
    """
    ### BEGIN SOLUTION
    return p - stage
    ### END SOLUTION


# %%
grade.check(versions_needed, points=1)
### BEGIN HIDDEN TESTS
grade.check(versions_needed, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
needed = grade.yours(versions_needed)
print(f"\n{'':<34}stage 0  1  2  3")
for name, counts in (
    ("your formula", [needed(s, 4) for s in range(4)]),
    ("longest list on your walk", [max(len(k) for _, _, k in walk(r)) for r in stream.workers]),
    ("copies in the real workers' memory", stashed.trace.weight_versions),
):
    print(f"{name:<40}" + "".join(f"{count:<3}" for count in counts))

# %% [markdown]
# ## 4. Right, but late
#
# With stashing, each stage computes a proper gradient, of the weights that the cup was made with. And what does it do with it? It takes it off the *newest* weights. In between there were other updates.
#
# Count it like this. Update number $t$ turns version $t$ into version $t + 1$. If its gradient was computed on version $u$, it is $t - u$ updates late. That is its *staleness*.
#
# **Predict.** Under `latest`, stage 0 of 4 is 3 updates late. How late is it with stashing?

# %%
guess_late = None

# %%
late = {name: ps.simulate(stream, weights=name).staleness for name in ("latest", "stash")}
grade.reveal(guess_late, late["stash"][0], "updates")
print("latest, stage 0 to 3:", late["latest"])
print("stash,  stage 0 to 3:", late["stash"])

# %% [markdown]
# Stashing cures the *mismatch*. It does nothing about the *delay*: the cup still has to go all the way down and back. And the delay is another one at every stage. In a formula (from the PipeDream paper, with stages counted from 0):
#
# $$w^{(t+1)} = w^{(t)} - \eta \, \nabla f\!\left(w_0^{(t-p+1)},\; w_1^{(t-p+2)},\; \dots,\; w_{p-1}^{(t)}\right)$$
#
# Here $w^{(t)}$ are all weights after $t$ updates, $w_s^{(t)}$ those of stage $s$, $\eta$ is the learning rate, and $\nabla f$ the gradient of the loss.
#
# ### Exercise 3: staleness (1 point)


# %%
def staleness(stage: int, p: int) -> int:
    """How many updates late a stage's gradients are under stashing, once the line is full.

    Example: staleness(stage=1, p=2) is 0.
    """
    ### BEGIN SOLUTION
    return p - 1 - stage
    ### END SOLUTION


# %%
grade.check(staleness, points=1)
### BEGIN HIDDEN TESTS
grade.check(staleness, points=1, seed=grade.seed())
### END HIDDEN TESTS

# %%
my_staleness = grade.yours(staleness)
print("\nyour formula, stage 0 to 3:   ", [my_staleness(s, 4) for s in range(4)])
print("measured, your stash, for real:", stashed.trace.staleness)

# %% [markdown]
# ### Is late bad?
#
# Try it where you can see everything. There is one weight $w$, and the loss is $w^2/2$, a bowl. Its gradient is $w$ itself, and the best weight is 0.
#
# ### Exercise 4: an old gradient on the newest weight (3 points)


# %%
def delayed_descent(gradient, start: float, delay: int, lr: float, updates: int) -> list[float]:
    """All weights of a gradient descent whose gradients come late.

    gradient: a function; gradient(w) is the slope of the loss at weight w.
    delay: how many updates late each gradient is. While there is no weight that old, the
        start stands in for it.
    Returns updates + 1 weights, the start first.

    Example: delayed_descent(lambda w: w, start=8.0, delay=1, lr=0.5, updates=2) is
    [8.0, 4.0, 0.0]: both gradients are taken at 8.
    """
    ### BEGIN SOLUTION
    weights = [start]
    for t in range(updates):
        old = weights[max(t - delay, 0)]
        weights.append(weights[t] - lr * gradient(old))
    return weights
    ### END SOLUTION


# %%
grade.check(delayed_descent, points=3)
### BEGIN HIDDEN TESTS
grade.check(delayed_descent, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** With learning rate 0.5 and no delay, the weight halves at every update. Which of the delays 1, 2 and 3 will still find the bottom?

# %%
guess_delays = None  # a list, such as [1, 2]

# %%
descent = grade.yours(delayed_descent)
paths = {delay: descent(lambda w: w, 1.0, delay, 0.5, 30) for delay in range(4)}
print(f"you predicted {guess_delays}")

ends = ", ".join(f"delay {d}: {abs(path[-1]):.2g}" for d, path in paths.items())
chart = ps.draw.Chart(
    alt=f"Weight over 30 updates in a bowl, learning rate 0.5. Distance at the end: {ends}.",
    height=3.2,
)
chart.subplots_adjust(left=0.08, right=0.98, top=0.95, bottom=0.17)
axes = chart.subplots()
for (delay, path), style in zip(paths.items(), ("-", "--", "-.", ":"), strict=True):
    axes.plot(path, style, color="black", lw=1 + delay / 2, label=f"delay {delay}")
axes.axhline(0, color="#999999", lw=0.5)
axes.set(xlabel="update", ylabel="weight (0 is best)", ylim=(-3, 3))
axes.legend(loc="lower left", ncols=4, frameon=False)
chart

# %% [markdown]
# A late gradient overshoots: the weight has crossed the bottom already, and is still being pushed the same way. With enough delay every swing is larger than the one before.
#
# So how large may the learning rate be? The next cell looks for the largest one that does not blow up, and prints beside it the known answer for a bowl of curvature 1, $2 \sin\frac{\pi}{4d + 2}$ with $d$ the delay.


# %%
def blows_up(lr, delay):
    path = descent(lambda w: w, 1.0, delay, lr, 2000)
    return max(map(abs, path[-50:])) > max(map(abs, path[:50]))


print("\ndelay   largest stable learning rate   formula")
for delay in (0, 1, 2, 3, 7):
    low, high = 0.0, 2.5
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if blows_up(middle, delay) else (middle, high)
    print(f"{delay:>5}{low:>31.3f}{2 * math.sin(math.pi / (4 * delay + 2)):>10.3f}")

# %% [markdown]
# One update late costs half of the learning rate, and it gets worse from there. A real network is no bowl, so do not expect these very numbers. But keep the lesson: *how much* you may hurry depends on *how late* your gradients are. Section 9 measures it on a network.

# %% [markdown]
# ## 5. Vertical sync: the same stamp all the way down
#
# Under stashing a cup meets v1 at station 0, v2 at station 1 and v3 at station 2: follow cup 4 in the chart above. The gradient is that of a model that never existed at one moment. PipeDream's *vertical sync* repairs that: a cup takes the stamp that it gets at station 0 along, and every station uses the card with that stamp.
#
# ### Exercise 5: vertical sync (2 points)
#
# Which stamp is it? When stage 0 lets microbatch $k$ in, $p - 1$ of the microbatches before it are still on their way, and all others have come back and made an update.


# %%
def vertical_sync_version(microbatch: int, p: int) -> int:
    """The version that a microbatch uses at every stage, with an update after each microbatch.

    microbatch: counted from 0. p: the number of stages.

    Example: vertical_sync_version(microbatch=0, p=4) is 0.
    """
    ### BEGIN SOLUTION
    return max(microbatch - (p - 1), 0)
    ### END SOLUTION


# %%
grade.check(vertical_sync_version, points=2)
### BEGIN HIDDEN TESTS
grade.check(vertical_sync_version, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# **Predict.** Under stashing the last stage keeps a single version. How many will it keep under vertical sync, with four stages? And how late will its gradients be?

# %%
guess_last_keeps = None
guess_last_late = None

# %%
my_vertical = grade.yours(vertical_sync_version)


class MyVerticalSync(ps.Policy):
    def forward(self, microbatch, newest):
        return my_vertical(microbatch, self.stages)

    def oldest_needed(self, next_microbatch, newest):
        return my_vertical(next_microbatch, self.stages)  # the ones after it ask for newer ones


synced = ps.run(
    stream, stages, cups[:12], loss=loss, optimizer=sgd, weights=MyVerticalSync, pace=pace
)
grade.reveal(guess_last_keeps, synced.trace.weight_versions[-1], "versions on the last stage")
grade.reveal(guess_last_late, synced.trace.staleness[-1], "updates late on the last stage")
print("staleness, stage 0 to 3:", synced.trace.staleness)
ps.draw.versions(synced.trace)

# %% [markdown]
# Every cup now has one colour, from station 0 to station 3 and back. The price: *every* stage is as late as stage 0, and every stage keeps as many versions as stage 0. The authors of PipeDream leave it out by default.
#
# Which is worse for learning, an uneven delay or a longer one? Do not believe anybody. You will measure it in section 9.

# %% [markdown]
# ## 6. 2BW: two cards are enough
#
# A station with $p$ cards needs a large drawer. *PipeDream-2BW* (Narayanan et al., ICML 2021) needs two cards, however long the line is. It has two ideas.
#
# - Write a new card only after every $m$ cups, from the mean of their gradients. (These $m$ microbatches are the batch, as in unit 01. But nobody waits for its end.)
# - The cups of batch $b$ do not use the newest card, which may not be there yet when the first of them comes. They use the one before it: version $b - 1$. Batches 0 and 1 share version 0.
#
# ### Exercise 6: the version of a cup (2 points)


# %%
def double_buffer_version(microbatch: int, m: int) -> int:
    """The version that a microbatch uses under 2BW, the same at every stage.

    microbatch: counted from 0 through the whole stream. m: microbatches per update.

    Example: double_buffer_version(microbatch=0, m=4) is 0.
    """
    ### BEGIN SOLUTION
    return max(microbatch // m - 1, 0)
    ### END SOLUTION


# %%
grade.check(double_buffer_version, points=2)
### BEGIN HIDDEN TESTS
grade.check(double_buffer_version, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# ### Exercise 7: when is a buffer free? (2 points)
#
# Two buffers suffice only if the old one is free in time. Which microbatch is the last one that uses a version?


# %%
def last_user(version: int, m: int) -> int:
    """The last microbatch that uses a version under 2BW. After its backward the buffer is free.

    Example: last_user(version=0, m=1) is 1, for microbatches 0 and 1 use version 0.
    """
    ### BEGIN SOLUTION
    return (version + 2) * m - 1
    ### END SOLUTION


# %%
grade.check(last_user, points=2)
### BEGIN HIDDEN TESTS
grade.check(last_user, points=2, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Both answers go into a policy. The runtime drops what `oldest_needed` no longer asks for, so if your `last_user` were too small, the run would stop with a message.

# %%
my_version, my_last = grade.yours(double_buffer_version), grade.yours(last_user)


class My2BW(ps.Policy):
    def forward(self, microbatch, newest):
        return my_version(microbatch, self.m)

    def oldest_needed(self, next_microbatch, newest):
        version = 0
        while my_last(version, self.m) < next_microbatch:  # it has no users to come
            version += 1
        return version


batches_of_4 = list(zip(inputs.split(64), targets.split(64), strict=True))
two_cards = ps.pipedream_2bw(p=4, m=4, batches=4)
buffered = ps.run(
    two_cards, stages, batches_of_4[:4], loss=loss, optimizer=sgd, weights=My2BW, pace=pace
)
ps.draw.versions(buffered.trace)

# %%
print("versions held: ", buffered.trace.weight_versions)
print("staleness:     ", buffered.trace.staleness)

print("\nIn the real run, on stage 0:")
row = buffered.trace.rows[0]
for version in (0, 1):
    uses = [i for i, s in enumerate(row) if s.action.kind == "B" and s.version == version]
    update = next(s for s in row[uses[-1] :] if s.action.kind == "U")
    print(
        f"the last backward on v{version} is {row[uses[-1]].action} (last_user: "
        f"{my_last(version, 4)}), and the update after it makes v{update.version}"
    )

# %% [markdown]
# Just in time: when the last user of $v$ is done, the next update needs a place for $v + 2$, and the buffer of $v$ is free.
#
# ### How small may m be?
#
# The paper asks for $m \ge p$. **Predict.** With four stages and your policy, what is the smallest $m$ that runs?

# %%
guess_smallest_m = None


# %%
def one_in_one_out(extra):
    """The asynchronous order, with `extra` more forwards than needed at the beginning."""

    def order(worker, p, n):
        first = min(p - 1 - worker + extra, n)
        row = [ps.F(worker, k) for k in range(first)]
        for k in range(n):
            row += [ps.F(worker, first + k)] if first + k < n else []
            row.append(ps.B(worker, k))
        return row

    return order


def try_2bw(m, extra=0):
    """True where it runs; otherwise prints why not."""
    try:
        schedule = ps.Schedule.from_workers(
            one_in_one_out(extra), p=4, m=m, batches=6, weights=My2BW, updates_every=m
        )
        ps.simulate(schedule)
    except ps.IllegalSchedule as problem:
        print(f"m = {m}: {problem}")
        return False
    print(f"m = {m}: runs")
    return True


runs = [m for m in range(1, 6) if try_2bw(m)]
grade.reveal(guess_smallest_m, min(runs))

# %% [markdown]
# Here is why. The first microbatch of batch $b$ is number $bm$. Stage 0 lets it in when $bm - (p - 1)$ microbatches have come back. It asks for version $b - 1$, which is made after $(b - 1)\,m$ of them. So $m \ge p - 1$ is enough.
#
# Then why does the paper ask for one more? **Try it.** Let every worker take in one forward more than it needs, which a real system may well do to hide its messages: call `try_2bw(m, extra=1)` for $m = 3$ and $m = 4$ in the cell below. What is the smallest $m$ now?

# %%
it_runs = try_2bw(3, extra=0)

# %% [markdown]
# <details>
# <summary>What you should see</summary>
#
# With one more microbatch in flight, $m = 3$ is refused and $m = 4 = p$ runs. The paper's rule has a margin of one.
# </details>
#
# pipeschool's own builder refuses too, in one sentence:

# %%
try:
    ps.pipedream_2bw(p=4, m=2)
except ValueError as problem:
    print(problem)

# %% [markdown]
# ## 7. The bill, in bytes
#
# ### Exercise 8: bytes of versions (3 points)


# %%
def version_bytes(policy: str, sizes: list[int]) -> list[int]:
    """The bytes of weights that each worker holds at most, all versions together.

    policy: "latest", "stash", "vertical_sync" or "double_buffer".
    sizes: the bytes of one version of each stage's weights, stage 0 first. One stage per worker.

    Example: version_bytes("latest", [8, 4]) is [8, 4].
    """
    ### BEGIN SOLUTION
    p = len(sizes)
    copies = {
        "latest": [1] * p,
        "stash": [p - stage for stage in range(p)],
        "vertical_sync": [p] * p,
        "double_buffer": [2] * p,
    }
    return [count * size for count, size in zip(copies[policy], sizes, strict=True)]
    ### END SOLUTION


# %%
grade.check(version_bytes, points=3)
### BEGIN HIDDEN TESTS
grade.check(version_bytes, points=3, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# The trace of a real run knows how many copies a worker had in memory, and how large one is. So you can compare.

# %%
my_bytes = grade.yours(version_bytes)
sizes = [sum(w.numel() * w.element_size() for w in stage.parameters()) for stage in stages]
careless = ps.run(stream, stages, cups[:12], loss=loss, optimizer=sgd, weights="latest")

print(f"\n{'bytes on worker':<17}{'0':>8}{'1':>8}{'2':>8}{'3':>8}     all")
for policy, run in {
    "latest": careless,
    "stash": stashed,
    "vertical_sync": synced,
    "double_buffer": buffered,
}.items():
    for name, found in ((policy, my_bytes(policy, sizes)), ("measured", run.trace.version_bytes)):
        print(f"{name:<17}" + "".join(f"{x:>8.0f}" for x in found) + f"{sum(found):>8.0f}")

# %% [markdown]
# Small, here. Now a model of 8 billion weights on 8 workers, each weight a number of 4 bytes:

# %%
print("GiB of weights on worker 0 and on worker 7, and on all 8 together")
for policy in ("latest", "stash", "vertical_sync", "double_buffer"):
    gib = [x / 2**30 for x in my_bytes(policy, [4 * 10**9] * 8)]
    print(f"{policy:<15}{gib[0]:>8.1f}{gib[-1]:>8.1f}{sum(gib):>8.1f}")

# %% [markdown]
# Gradients and the optimizer's own numbers (such as Adam's two averages) are there once, whatever the policy. Under stashing it is worker 0 that runs out of memory first, for weights as for activations.
#
# **Here is a good place to stop.** So far it was about what each policy keeps. The rest proves that the pipeline does what you think, and measures what it does to learning. When you come back, run the cells from the top: it takes less than a minute.

# %% [markdown]
# ## 8. One process that says the same
#
# A pipeline has four processes, messages, and versions that come and go. How do you know that it does what the formula says? Write the formula down as a plain program in one process, a *replay*, and compare all weights after *every* update.
#
# ### Exercise 9: the replay (5 points)
#
# For each microbatch: take the version of every stage that the rule names, go forward and backward, and collect the gradients. After $m$ microbatches let the optimizer step, on the *newest* weights. A way that works:
#
# - `newest`: one dictionary per stage, of parameters of your own (`copy.deepcopy` the stages), and an optimizer for each.
# - `history`: copies of them after each update. Beware: without `.detach().clone()` all entries are the same tensors.
# - Per microbatch, clone the dictionaries it uses out of `history` and give them `.requires_grad_()`. Then go through the stages with `functional_call`.
# - Put the gradients of the clones into the `.grad` of the newest.
#
# With `overwrite=True` it shall do what `latest` does: between forward and backward, `.data.copy_` the newest values over the clones. Part of the points are for that, and part for $m > 1$.


# %%
def replay(stages: list, batches: list, loss, optimizer, version, m: int, overwrite: bool) -> list:
    """The weights of every stage after every update, computed in one process.

    stages: modules. They stay as they are.
    batches: (inputs, targets) of each microbatch, in order; len(batches) is a multiple of m.
    loss: loss(outputs, targets) is the mean over the samples of a microbatch.
    optimizer: optimizer(parameters) makes the optimizer of one stage.
    version: version(stage, k) is the version that microbatch k uses there, forward and backward.
    m: microbatches per update, which takes the mean of their gradients.
    overwrite: True for `latest`: the backward meets the newest values in place of those.
    Returns history: history[t][stage] is {name: tensor} after t updates; history[0] is the start.

    Example: with batches=[], the answer is [[dict of stage 0, dict of stage 1, ...]], the start.
    """
    ### BEGIN SOLUTION
    newest = [dict(copy.deepcopy(stage).named_parameters()) for stage in stages]
    optimizers = [optimizer(list(weights.values())) for weights in newest]

    def snapshot():
        return [{name: w.detach().clone() for name, w in weights.items()} for weights in newest]

    history = [snapshot()]
    for k, (x, y) in enumerate(batches):
        used = [
            {name: w.clone().requires_grad_() for name, w in history[version(s, k)][s].items()}
            for s in range(len(stages))
        ]
        for stage, weights in zip(stages, used, strict=True):
            x = functional_call(stage, weights, (x,))
        value = loss(x, y) / m
        if overwrite:
            for weights, now in zip(used, history[-1], strict=True):
                for name, w in weights.items():
                    w.data.copy_(now[name])
        value.backward()
        for weights, clones in zip(newest, used, strict=True):
            for name, w in weights.items():
                gradient = clones[name].grad
                w.grad = gradient if w.grad is None else w.grad + gradient
        if (k + 1) % m == 0:
            for opt in optimizers:
                opt.step()
                opt.zero_grad()
            history.append(snapshot())
    return history
    ### END SOLUTION


# %%
grade.check(replay, points=5)
### BEGIN HIDDEN TESTS
grade.check(replay, points=5, seed=grade.seed())
### END HIDDEN TESTS

# %% [markdown]
# Now the proof, for four policies and two optimizers. Each pair of runs starts from the same weights. `history=True` makes the real workers note their weights after every update. The rules for `version` come from your own answers.
#
# The last line is there to show that the test can fail: its rule is wrong by one update.

# %%
my_replay = grade.yours(replay)
rules = {  # policy: version(stage, k), microbatches per update, overwrite
    "latest": (lambda s, k: max(k - my_staleness(s, 4), 0), 1, True),
    "stash": (lambda s, k: max(k - my_staleness(s, 4), 0), 1, False),
    "vertical_sync": (lambda s, k: my_vertical(k, 4), 1, False),
    "double_buffer": (lambda s, k: my_version(k, 4), 4, False),
}
momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.003)


def largest_difference(ours, theirs):
    """Over all updates, stages and weights."""
    return max(
        (a[name] - b[name]).abs().max().item()
        for A, B in zip(ours, theirs, strict=True)
        for a, b in zip(A, B, strict=True)
        for name in a
    )


print(f"\n{'policy':<15}{'optimizer':<15}{'updates':>8}   largest difference of any weight")
for policy, (version, m, overwrite) in rules.items():
    schedule = ps.pipedream_2bw(4, 4, batches=6) if m > 1 else ps.pipedream(4, 1, batches=24)
    data = (batches_of_4 if m > 1 else cups)[: schedule.batches]
    for name, optimizer in (("momentum", momentum), ("Adam", adam)):
        theirs = ps.run(
            schedule, stages, data, loss=loss, optimizer=optimizer, weights=policy, history=True
        ).history
        ours = my_replay(stages, cups[:24], loss, optimizer, version, m, overwrite)
        off = largest_difference(ours, theirs)
        print(f"{policy:<15}{name:<15}{len(ours) - 1:>8}   {off:.1e}")

wrong = my_replay(stages, cups[:12], loss, sgd, lambda s, k: max(k - 3 + s - 1, 0), 1, False)
right = stashed.history
print(
    f"{'stash':<15}{'SGD':<15}{12:>8}   {largest_difference(wrong, right):.1e}   one update too old"
)

# %% [markdown]
# Zero means equal to the last bit. (If you added up in another order, you may see something like 1e-08: that is rounding.) The wrong rule in the last line differs by far more than that.
#
# This is worth a moment of joy. Four processes, no barrier, old weights everywhere, and yet every single number is known. Asynchronous does not mean random: the *order* of actions decides, and no clock.
#
# And it is useful. An experiment with many learning rates and seeds does not need a pipeline at all: your replay gives the same weights. So we use it from here on, and check against real workers as we go.

# %% [markdown]
# ## 9. Does it matter? The experiment that is not in the paper
#
# The PipeDream paper argues for weight stashing, but it prints no experiment that leaves it out. You will make one: *final accuracy by policy, learning rate and seed*.
#
# - **Task.** Read handwritten digits. Six stages, one layer each. Batches of 32, 400 updates, plain SGD.
# - **Policies.** `latest`, `stash`, `vertical_sync`, `double_buffer`, and as a yardstick `synchronous`, which always uses the newest weights.
# - **Fair.** Everybody sees the same batches and makes the same number of updates. (2BW cuts each batch into $m$ microbatches. The gradient of the batch is the same whatever the cut, as you proved in unit 01, so we compute it in one go.) We compare equal updates, not equal time: synchronous training also pays its bubble. You know that bill from unit 02.
# - **Seeds.** Eight. To save time eight models stand side by side in the same tensors: their weights have one more dimension. Nothing leads from one to another.
#
# **Predict** before you run it. Order the five from the one that bears the largest learning rate to the one that bears the smallest.

# %%
guess_order = None  # such as ["synchronous", "stash", ...]

# %%
updates, seeds = 400, range(8)
rates = [0.02, 0.04, 0.08, 0.16, 0.32]


def policies(p):
    """The rules on p stages: version(stage, update), and whether the backward is overwritten."""
    return {
        "synchronous": (lambda s, t: t, False),
        "latest": (lambda s, t: max(t - my_staleness(s, p), 0), True),
        "stash": (lambda s, t: max(t - my_staleness(s, p), 0), False),
        "vertical_sync": (lambda s, t: my_vertical(t, p), False),
        "double_buffer": (lambda s, t: my_version(t, 1), False),
    }


def train(stages, data, test, rule, optimizer):
    """The accuracy that each seed ends with."""
    version, overwrite = rule
    weights = my_replay(stages, data, course_data.loss_of_all, optimizer, version, 1, overwrite)
    return course_data.accuracies(stages, weights[-1], test)


def line(name, results):
    """Mean and standard deviation over the seeds, for every learning rate."""
    cells = [f"{mean(found):.2f} ± {stdev(found):.2f}" for found in results.values()]
    return f"{name:<15}" + "".join(f"{cell:>13}" for cell in cells)


def accuracy_table(stages, data, test, rates):
    """{policy: {learning rate: accuracies of all seeds}}, printed as it is made."""
    print("\naccuracy, mean ± standard deviation over the seeds")
    print(f"{'learning rate':<15}" + "".join(f"{lr:>13}" for lr in rates))
    results = {}
    for policy, rule in policies(len(stages)).items():
        results[policy] = {
            lr: train(stages, data, test, rule, partial(torch.optim.SGD, lr=lr)) for lr in rates
        }
        print(line(policy, results[policy]))
    return results


# %%
six = course_data.digit_stages(6, seeds)
digit_data = course_data.digit_stream(updates, 32, seeds), course_data.digit_test(seeds)
digit_results = accuracy_table(six, *digit_data, rates)
print("\nyou predicted", guess_order)

# %% [markdown]
# A plot says it faster. A dot is the mean, a bar goes from the worst seed to the best.

# %%
STYLES = {  # marker, line, colour
    "synchronous": ("o", "-", "#000000"),
    "latest": ("X", ":", "#d55e00"),
    "stash": ("s", "--", "#0072b2"),
    "vertical_sync": ("v", "-.", "#7f7f7f"),
    "double_buffer": ("D", "-", "#009e73"),
}


def plot(results, rates, what, floor):
    """Accuracy over the learning rate, one line per policy; `floor` is what guessing gives."""
    means = {policy: [mean(found[lr]) for lr in rates] for policy, found in results.items()}
    listed = "; ".join(f"{k}: {', '.join(f'{x:.2f}' for x in v)}" for k, v in means.items())
    chart = ps.draw.Chart(
        alt=f"{what}, mean accuracy at learning rates {', '.join(map(str, rates))}. {listed}.",
        height=4.2,
    )
    chart.subplots_adjust(left=0.07, right=0.83, top=0.92, bottom=0.12)
    axes = chart.subplots()
    for i, (policy, found) in enumerate(results.items()):
        marker, style, colour = STYLES[policy]
        xs = [j + (i - 2) * 0.06 for j in range(len(rates))]  # side by side
        low = [m - min(found[lr]) for m, lr in zip(means[policy], rates, strict=True)]
        high = [max(found[lr]) - m for m, lr in zip(means[policy], rates, strict=True)]
        axes.errorbar(
            xs,
            means[policy],
            (low, high),
            marker=marker,
            ls=style,
            color=colour,
            ms=7,
            capsize=3,
            label=policy,
        )
    axes.axhline(floor, color="#999999", lw=0.8)
    axes.set_xticks(range(len(rates)), map(str, rates))
    axes.set(xlabel="learning rate", ylabel="accuracy", title=what)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return chart


plot(digit_results, rates, f"Digits, six stages, SGD, {updates} updates", floor=0.1)

# %% [markdown]
# The thin grey line is what guessing gives. Now let the numbers answer. Where does `latest` fail while `stash` holds? Let us say that a model has learned when it reads more than half of the digits right.

# %%
print("models that have learned, of", len(seeds))
print(f"{'learning rate':<15}" + "".join(f"{lr:>6}" for lr in rates))
for policy, results in digit_results.items():
    counts = [sum(x > 0.5 for x in results[lr]) for lr in rates]
    print(f"{policy:<15}" + "".join(f"{count:>6}" for count in counts))

top = max(mean(found[lr]) for found in digit_results.values() for lr in rates)
print(f"\nnine tenths of {top:.2f} is reached by")
for policy, found in digit_results.items():
    fine = [lr for lr in rates if mean(found[lr]) >= 0.9 * top]
    print(f"{policy:<15} at {', '.join(map(str, fine)) or 'none of the rates'}")

# %% [markdown]
# Before you read on, say in one sentence each:
#
# 1. At the small learning rates, does stashing matter?
# 2. Which policy with versions bears the least, and why?
# 3. Which one comes closest to synchronous training, and why?
#
# <details>
# <summary>Our reading</summary>
#
# 1. Hardly. The weights move little from update to update, so an old version is almost the newest. The bars of `latest` and `stash` overlap there: with eight seeds we cannot tell them apart.
# 2. Vertical sync. Its gradients are clean, each of one whole model, but *all* stages are $p - 1$ updates late. Here a longer delay costs more than an uneven one.
# 3. 2BW. Every stage is one update late, and no more, however long the line is.
#
# And between small and large there is the learning rate that you came for, 0.16. Nearly all models with torn gradients end at the level of guessing, while nearly all with the same delay and a stash still learn. The delay alone would have let them.
# </details>
#
# ### On real workers
#
# Those were replays. Here is the decisive learning rate once more, on six real processes: `latest` and `stash`, all 400 updates, all seeds side by side.

# %%
decisive = 0.16
for policy in ("latest", "stash"):
    ran = ps.run(
        ps.pipedream(p=6, m=1, batches=updates),
        six,
        digit_data[0],
        loss=course_data.loss_of_all,
        optimizer=partial(torch.optim.SGD, lr=decisive),
        weights=policy,
    )
    found = course_data.accuracies(six, ran.state_dicts, digit_data[1])
    print(f"{policy:<7} pipeline {' '.join(f'{x:.3f}' for x in found)}")
    found = digit_results[policy][decisive]
    print(f"{'':<7} replay   {' '.join(f'{x:.3f}' for x in found)}")

# %% [markdown]
# ## 10. And a Transformer?
#
# One network is no law. The next one is of quite another kind: a small Transformer that reads the documentation of Python and guesses, at every character, the next one. Four stages, one block each, and five seeds side by side. The text comes with Python, nothing is downloaded.

# %%
print(course_data.text()[:220].strip(), "...")

# %% [markdown]
# **Predict.** Will the policies come in the same order as on the digits? Which one will be the first to fail as the learning rate grows?

# %%
guess_first_to_fail = None  # the name of a policy

# %%
length, text_seeds, text_rates = 16, range(5), [0.1, 0.5, 1.5]
readers = course_data.transformer_stages(4, width=16, heads=2, length=length, seeds=text_seeds)
text_data = (
    course_data.text_stream(200, 8, length, text_seeds),
    course_data.text_test(256, length, text_seeds),
)
text_results = accuracy_table(readers, *text_data, text_rates)
print("\nyou predicted", guess_first_to_fail)

# %%
_, answers = text_data[1]
space = answers.flatten().bincount().max().item() / answers.numel()  # always the commonest one
plot(text_results, text_rates, "Text, four stages, SGD, 200 updates", floor=space)

# %% [markdown]
# Here guessing means to say "space" every time; that is the grey line. And do real workers agree? The first 30 passages, on four processes:

# %%
slow = partial(torch.optim.SGD, lr=text_rates[0])
theirs = ps.run(
    ps.pipedream(p=4, m=1, batches=30),
    readers,
    text_data[0][:30],
    loss=course_data.loss_of_all,
    optimizer=slow,
    history=True,
).history
rule, overwrite = policies(4)["stash"]
ours = my_replay(readers, text_data[0][:30], course_data.loss_of_all, slow, rule, 1, overwrite)
print(f"largest difference in {len(ours) - 1} updates: {largest_difference(ours, theirs):.1e}")

# %% [markdown]
# They do. Two questions are open. First: does stashing make a difference here?

# %%
print("stash minus latest, seed by seed")
for lr in text_rates:
    both = zip(text_results["stash"][lr], text_results["latest"][lr], strict=True)
    gaps = [a - b for a, b in both]
    spread = stdev(text_results["stash"][lr])
    seen = "larger than" if abs(mean(gaps)) > spread else "within"
    print(f"learning rate {lr}: {mean(gaps):+.3f}, {seen} the spread of the seeds, {spread:.3f}")

# %% [markdown]
# Second: look at `double_buffer` at the largest learning rate. It is never more than one update late, and yet it fails where `stash`, up to three updates late, does not. What is the difference between them? Under stashing, the *last* stage is not late at all.
#
# That is a guess. A replay can test it, because you can make any stage as late as you like.
#
# **Predict.** One update late, but only on the last stage; one update late, but only on the other three: which of the two will fail?

# %%
guess_fails = None  # "last" or "others"

# %%
fast = partial(torch.optim.SGD, lr=text_rates[-1])
print("accuracy of each seed, learning rate", text_rates[-1])
for name, rule in (
    ("only the last stage late", lambda s, t: max(t - (s == 3), 0)),
    ("only the others late", lambda s, t: max(t - (s < 3), 0)),
):
    found = train(readers, *text_data, (rule, False), fast)
    print(f"{name:<26}{' '.join(f'{x:.2f}' for x in found)}   mean {mean(found):.2f}")
print("you predicted", guess_fails)

# %% [markdown]
# <details>
# <summary>Our reading, of both tables</summary>
#
# - On this Transformer we see *no difference* between `latest` and `stash` that is larger than the spread of the seeds, at any of the three learning rates. On the digits we did. So "without stashing it does not learn" is not a law, and neither is its opposite.
# - The order is another one. 2BW came closest to synchronous training on the digits, and here it fails before `stash` does. It is the lateness of the *last* stage that hurts: with that stage on time, the others may be late.
# - Vertical sync is the first to fail in both. Late on all stages is worse than late on some.
#
# Why do torn gradients harm this Transformer so little? One idea is that in every block the signal also passes *around* the weights, on the residual connection, so that most of the gradient never meets the wrong version. We have not tested that. You could.
# </details>
#
# ## 11. Stabilisers
#
# Suppose you must use the large learning rate. Practice knows three remedies, and `ps.run` has all of them:
#
# - **clipping** (`clip_norm=`): a gradient longer than a limit is shortened to it,
# - **warm-up** (`scheduler=`): the learning rate grows from almost nothing to its full size during the first updates,
# - an **adaptive learning rate**, such as Adam's (`optimizer=`): each weight's steps are divided by the usual size of its gradients.
#
# In our replays several models share a tensor, but each must be clipped by its own length. So here is a small optimizer that does both for each seed.


# %%
class Stabilised:
    """`make`'s optimizer with clipping, seed by seed, and with warm-up."""

    def __init__(self, parameters, make, clip_norm=None, warm_up=None):
        self.parameters, self.clip_norm, self.inner = list(parameters), clip_norm, make(parameters)
        self.scheduler = warming(self.inner, warm_up) if warm_up else None

    def step(self):
        if self.clip_norm:
            squares = sum(w.grad.flatten(1).square().sum(1) for w in self.parameters)
            shorten = (self.clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1)
            for w in self.parameters:
                w.grad = w.grad * shorten[:, None, None]
        self.inner.step()
        if self.scheduler:
            self.scheduler.step()

    def zero_grad(self):
        self.inner.zero_grad()


def warming(optimizer, updates):
    """A learning rate that grows in a line during the first `updates`."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1 / updates, total_iters=updates)


# Is that what ps.run does? One seed, so that its clipping and ours mean the same.
plain = partial(torch.optim.SGD, lr=0.16)
alone = course_data.digit_stages(6, seeds=[0])
first_40 = course_data.digit_stream(40, 32, seeds=[0])
theirs = ps.run(
    ps.pipedream(p=6, m=1, batches=40),
    alone,
    first_40,
    loss=course_data.loss_of_all,
    optimizer=plain,
    clip_norm=0.5,
    scheduler=partial(warming, updates=20),
    history=True,
).history
both = partial(Stabilised, make=plain, clip_norm=0.5, warm_up=20)
ours = my_replay(alone, first_40, course_data.loss_of_all, both, policies(6)["stash"][0], 1, False)
print(f"largest difference in 40 updates: {largest_difference(ours, theirs):.1e}")

# %% [markdown]
# **Predict.** At learning rate 0.16 and above: which of clipping and warm-up will help more? Will it save `latest` as well?

# %%
guess_remedy = None  # "clipping" or "warm-up"

# %%
print("digits, accuracy, mean ± standard deviation of", len(seeds), "seeds")
print(f"{'learning rate':<15}{0.16:>13}{0.32:>13}")
for remedy, options in {
    "none": {},
    "warm-up": {"warm_up": 100},
    "clipping": {"clip_norm": 0.5},
    "both": {"clip_norm": 0.5, "warm_up": 100},
}.items():
    print(remedy)
    for policy in ("latest", "stash"):
        found = {lr: digit_results[policy][lr] for lr in (0.16, 0.32)}
        for lr in found if options else ():
            make = partial(Stabilised, make=partial(torch.optim.SGD, lr=lr), **options)
            found[lr] = train(six, *digit_data, policies(6)[policy], make)
        print(line(f"  {policy}", found))
print("\nyou predicted", guess_remedy)

# %%
adam_rates = (0.001, 0.003, 0.01)
print("digits with Adam, accuracy, mean ± standard deviation of", len(seeds), "seeds")
print(f"{'learning rate':<15}" + "".join(f"{lr:>13}" for lr in adam_rates))
for policy in ("synchronous", "latest", "stash"):
    rule = policies(6)[policy]
    found = {
        lr: train(six, *digit_data, rule, partial(torch.optim.Adam, lr=lr)) for lr in adam_rates
    }
    print(line(policy, found))

# %% [markdown]
# <details>
# <summary>Our reading</summary>
#
# - Warm-up alone only puts the trouble off. Once the learning rate has its full size, `latest` fails nearly as often as before, and what `stash` gains is within the spread.
# - Clipping helps a lot, and it helps both policies. A shortened gradient cannot move the weights far, so old and new versions stay close to each other. `stash` stays ahead of `latest`.
# - Adam at its usual small rates trains well under both, and we see no clear difference between them. At 0.01 both get worse together: dividing by the size of a gradient does not make it any less late.
#
# None of the three replaces stashing, and none makes a gradient come earlier.
# </details>
#
# **Your turn.** Which combination of remedies gives `vertical_sync` the best accuracy at learning rate 0.16? Change the numbers and run the cell a few times. (About a second each.)

# %%
mine = partial(Stabilised, make=plain, clip_norm=None, warm_up=None)
found = train(six, *digit_data, policies(6)["vertical_sync"], mine)
print(f"{mean(found):.2f}, seeds from {min(found):.2f} to {max(found):.2f}")

# %% [markdown]
# ## 12. The claims lab
#
# As before: decide first, write `"right"`, `"wrong"` or `"half"` in place of the `"?"`, run the cell, and only then open the verdict.

# %%
verdicts = {}

# %% [markdown]
# ### Claim 1
#
# > PipeDream-2BW keeps two copies of the weights: one for the forward, and one that is updated.

# %%
verdicts[1] = "?"

print("a piece of stage 0's row in your real run of 2BW:")
row = buffered.trace.rows[0]
begin = [span.action for span in row].index(ps.B(0, 7))
for span in row[begin : begin + 9]:
    verb = "makes" if span.action.kind == "U" else "uses "
    print(f"{span.action!s:>5} {verb} v{span.version}")
print("\nIs there a copy that only forwards use?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** There are two *versions*, and both do both. New microbatches go forward on the newer one, while those in flight finish on the older one, with forward and backward on the same version. An update does not write into a version that somebody uses: it writes the next one into the buffer that has become free.
# </details>
#
# ### Claim 2
#
# > In PipeDream, stage 0 updates its weights right after its own forward. Later stages then work with newer weights.

# %%
verdicts[2] = "?"

print("stage 0 begins with:", *(str(span.action) for span in stashed.trace.rows[0][:9]))
for stage, row in enumerate(stashed.trace.rows):
    used = {span.action.kind: span.version for span in row if span.action.microbatch == 6}
    print(f"microbatch 6 on stage {stage}: forward on v{used['F']}, backward on v{used['B']}")
print("\nWhat comes right before the first update?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** An update needs a gradient, so it follows a *backward*. It is true that a later stage uses a newer version in the forward. But that is not because stage 0 was quick to update: a later stage has got more cups back by then. And on each stage the backward returns to the version of the forward.
# </details>
#
# ### Claim 3
#
# > Weight stashing removes staleness.

# %%
verdicts[3] = "?"

for p in (2, 4, 8):
    for policy in ("latest", "stash"):
        trace = ps.simulate(ps.pipedream(p, 1, batches=4 * p), weights=policy)
        torn = sum(map(len, trace.mismatched))
        print(f"p = {p}, {policy:<7} torn: {torn:>3}   updates late: {trace.staleness}")
print("\nWhich of the two columns does stashing change?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** It removes the mismatch between a forward and its own backward. The gradients are as late as before.
# </details>
#
# ### Claim 4
#
# > In PipeDream, every stage is equally late.

# %%
verdicts[4] = "?"

for name, run in {"stash": stashed, "vertical_sync": synced, "double_buffer": buffered}.items():
    print(f"{name:<15} measured, updates late on stage 0 to 3: {run.trace.staleness}")
print("\nWhich of them is PipeDream as it comes?")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong.** With stashing, stage $s$ is $p - 1 - s$ updates late. Vertical sync, which PipeDream leaves out by default, makes all stages equally late, namely as late as the first. 2BW makes all of them one update late.
# </details>
#
# ### Claim 5
#
# > A learning rate that was tuned for synchronous training can be used for an asynchronous run as it is.

# %%
verdicts[5] = "?"

for name, results in (("digits", digit_results), ("text", text_results)):
    best = max(results["synchronous"], key=lambda lr: mean(results["synchronous"][lr]))
    print(f"{name}: synchronous training is best at {best}. There the policies get")
    for policy, found in results.items():
        own = max(found, key=lambda lr: mean(found[lr]))
        print(
            f"  {policy:<15}{mean(found[best]):.2f}   (its own best: {mean(found[own]):.2f} at {own})"
        )

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Wrong**, as a rule. Late gradients want a smaller learning rate, and how much smaller depends on the policy, the depth, and the model. Sometimes one is lucky, as 2BW is with the digits. Tune again, beginning lower.
# </details>
#
# ### Claim 6
#
# > Without weight stashing, asynchronous training does not learn.

# %%
verdicts[6] = "?"

for name, results, floor in (("digits", digit_results, 0.1), ("text", text_results, space)):
    for lr, found in results["latest"].items():
        stash = mean(results["stash"][lr])
        print(
            f"{name:<7} learning rate {lr:<5} latest {mean(found):.2f}, stash {stash:.2f}", end=""
        )
        print(f", guessing {floor:.2f}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Half.** At a small learning rate it learns about as well as with stashing. On the digits there is a learning rate at which it collapses and stashing does not. On the text we found none. Stashing is an insurance: it costs memory, and what it is worth depends on the model.
# </details>
#
# ### Claim 7
#
# > With 2BW, the memory for weights on a worker does not depend on the length of the pipeline.

# %%
verdicts[7] = "?"

for p in (2, 4, 8, 16):
    stash = ps.simulate(ps.pipedream(p, 1, batches=3 * p)).weight_versions
    double = ps.simulate(ps.pipedream_2bw(p, m=p, batches=4)).weight_versions
    print(f"p = {p:<3} most versions on a worker: stash {max(stash):>3}, 2BW {max(double)}")

# %% [markdown]
# <details>
# <summary>Verdict</summary>
#
# **Right**, for stages of a given size: two versions, however long the line. What does depend on it is $m$, and with it the batch: at least $p - 1$ microbatches per update.
# </details>

# %% [markdown]
# How well did you judge?

# %%
grade.tally(verdicts, grade.unit03.CLAIMS)

# %% [markdown]
# ## Summary
#
# - A version is a dictionary of parameters. With `functional_call` the autograd graph holds on to the version that the forward used. Never silence autograd's complaint with `.data`.
# - Stashing: a backward uses the version of its own forward. Stage $s$ keeps $p - s$ versions and is $p - 1 - s$ updates late.
# - Vertical sync: one version for a microbatch on all stages. Every stage keeps $p$ and is $p - 1$ late.
# - 2BW: one update for $m$ microbatches, two versions, one update late everywhere. It needs $m \ge p - 1$ in this order; the paper asks for $m \ge p$.
# - Staleness limits the learning rate. In a bowl, one update late halves it.
# - An asynchronous run is not random. A replay in one process gives the same weights, after every update.
# - On the digits, torn gradients failed at a learning rate at which late ones still learned. On the text we saw no difference between the two. Clipping helped, warm-up alone hardly.
#
# ## Check yourself
#
# 1. Eight stages, with stashing. How many versions does stage 2 keep, and how late are its gradients?
# 2. A colleague got an error about an "inplace operation" in the backward, and made it go away with `w.data.copy_(...)`. What would you tell them?
# 3. You double the stages of a 2BW pipeline from 8 to 16, and keep the size of a microbatch. Which of these change: versions, staleness, the smallest batch?
#
# <details>
# <summary>Answers</summary>
#
# 1. It keeps 8 − 2 = 6 versions, and is 5 updates late.
# 2. That the error was right: the backward needs the weights of the forward. Now the gradient is torn between two versions, and nothing will say so. Keep the old weights in a dictionary of their own and use `functional_call`.
# 3. Versions (two) and staleness (one update) stay. The smallest $m$ grows from 7 to 15, or from 8 to 16 by the paper's rule, so the smallest batch about doubles.
# </details>
#
# Next: [one forward, one backward](../04_one_forward_one_backward/one_forward_one_backward.ipynb). How do I keep the counter clear without losing time?
