"""The command line: the same words as the Python API.

Exit status 0 when all went well; 1 for an illegal schedule or a failed run; 2 for wrong input.
Whatever goes wrong is one sentence on stderr. Only `run`, `bench` and ``--png`` import torch or
matplotlib, so that everything else answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import pipeschool as ps
from pipeschool.checking import MATCHING
from pipeschool.formats import from_csv, to_csv
from pipeschool.lowering import lower
from pipeschool.runtime import RunError
from pipeschool.runtime.host.fork_server import start_early
from pipeschool.schedules import ALIASES
from pipeschool.text import columns, text_gantt, title
from pipeschool.versions import with_weights

MOST_ROWS = 1000  # workers of a chart
MOST = 1_000_000  # microbatches on all stages together: seconds of work
METRICS = (  # name in JSON, name for people, what it is counted in
    ("makespan", "makespan", ""),
    ("bubble_of_total", "bubble of total", "idle / (p * makespan)"),
    ("bubble_of_ideal", "bubble of ideal", "idle / busy"),
    ("peak_activations", "peak activations", "of each worker, in A: one microbatch on one worker"),
    ("weight_versions", "weight versions", "alive at once on each worker"),
    ("staleness", "staleness", "of each worker, in updates"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser().parse_args(_join_negative_pace(words))
        return int(args.command(args) or 0)
    except (ps.IllegalSchedule, RunError) as error:
        return _fail(str(error), 1)
    except UnicodeDecodeError:
        return _fail("the schedule file is not UTF-8 text", 2)
    except ValueError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"cannot use {error.filename}: {error.strerror}", 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


def _fail(message: str, status: int) -> int:
    print(f"pipeschool: {message}", file=sys.stderr)
    return status


# The commands


def _schedules(args: argparse.Namespace) -> None:
    also = {name: f" (or {alias})" for alias, name in ALIASES.items()}
    for name, builder in ps.SCHEDULES.items():
        about = (sys.modules[builder.__module__].__doc__ or "").partition("\n")[0]
        print(f"{name + also.get(name, ''):34}{about}")


def _simulate(args: argparse.Namespace) -> None:
    trace = _predict(args)
    if args.json:
        print(json.dumps(_as_json(trace)))
    else:
        print(title(trace))
        _print_table([trace])


def _show(args: argparse.Namespace) -> None:
    if args.p > MOST_ROWS:
        raise ValueError(f"a chart has a row for each worker: -p may be at most {MOST_ROWS:,} here")
    trace = _predict(args)
    if args.csv:
        Path(args.csv).write_text(to_csv(_schedule(args)), encoding="utf-8")
    if args.png:
        ps.draw.gantt(trace).savefig(args.png, format="png")
    # A file or a pipe gets whole lines; on a terminal they end where it would break them.
    print(text_gantt(trace, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def _check(args: argparse.Namespace) -> None:
    text = Path(args.file).read_text(encoding="utf-8-sig")
    schedule = from_csv(text, args.p, args.m, name=args.file)
    if schedule.lowered:
        kind, messages = "with its messages", schedule
    else:
        kind, messages = "compute only", lower(ps.check(schedule), args.matching == "rendezvous")
    ps.check(messages, matching=args.matching)
    print(f"{args.file} is legal and free of deadlock: p={schedule.p}, m={schedule.m}, {kind}")


def _run(args: argparse.Namespace) -> None:
    schedule = _schedule(args)
    start_early()
    import torch

    from pipeschool.partition import split_layers
    from pipeschool.runtime import reference

    def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    torch.manual_seed(0)
    width = args.hidden
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()).double()
        for _ in range(max(schedule.stages, 8) if args.layers is None else args.layers)
    ]
    stages = split_layers(torch.nn.Sequential(*blocks), schedule.stages)
    size = (4 * args.m if args.batch_size is None else args.batch_size, width)
    batches = [
        (torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64))
        for _ in range(args.batches)
    ]

    pace = args.pace and tuple(seconds / schedule.v for seconds in args.pace)
    result = ps.run(
        schedule,
        stages,
        batches,
        optimizer=sgd,
        pace=pace,
        device=args.device,
        engine=args.engine,
    )
    measured = result.trace
    cost = ps.Cost(*pace) if pace else _measured_cost(schedule, measured)
    predicted = ps.simulate(schedule, cost)
    error = None
    if schedule.synchronous:
        alone = reference.gradients(
            stages, batches, args.m, optimizer=sgd, replicas=[len(w) for w in schedule.owners]
        )
        error = reference.max_error(result.gradients, alone)

    if args.trace:
        Path(args.trace).write_text(measured.to_chrome(), encoding="utf-8")
    if args.png:
        ps.draw.compare(predicted, measured).savefig(args.png, format="png")
    if args.json:
        short = ("makespan", "bubble_of_total", "bubble_of_ideal")
        more = {
            "predicted": {name: getattr(predicted, name) for name in short},
            "measured": {name: getattr(measured, name) for name in short},
            "backend": result.backend,
            "device": result.device,
            "engine": args.engine,
            "paced": result.paced,
            "gradient_max_error": error,
            "start_seconds": result.start_seconds,
        }
        print(json.dumps(_as_json(measured) | more))
        return
    engine = ", PyTorch's engine" if args.engine == "torch" else ""
    print(f"{title(measured)}, {result.backend} on {result.device}{engine}")
    _print_table([predicted, measured])
    source = "from the declared times" if args.pace else "from the measured mean times per stage"
    print(f"times in seconds, predicted {source}")
    print(f"{result.start_seconds:.2f} s from the call to the first action")
    if error is not None:
        print(f"largest difference from the gradients of one process: {error:.3g}")


def _bench(args: argparse.Namespace) -> None:
    from pipeschool import bench_report
    from pipeschool.bench import bench

    benchmark = bench(args.p, args.m, args.rounds)
    if args.out:
        Path(args.out).write_text(bench_report.page(benchmark), encoding="utf-8")
    if args.png:
        bench_report.chart(benchmark).savefig(args.png, format="png")
    print(json.dumps(benchmark.as_json()) if args.json else bench_report.text(benchmark))


def _lab(args: argparse.Namespace) -> None:
    course = _find_course()
    os.chdir(course.parent)  # nbgrader looks for its settings in the working directory
    # In this very process: to end it is to end the server.
    from jupyterlab.labapp import LabApp  # type: ignore[import-untyped]

    words = [
        f"--ServerApp.root_dir={course}",
        "--ServerApp.answer_yes=True",  # Ctrl-C ends it, without a question
        "--Application.log_level=WARN",  # still prints the address
        # Formgrader wants to be served from the folder above the course, and says so every time.
        "--ServerApp.jpserver_extensions=nbgrader.server_extensions.formgrader=False",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if args.port is not None:
        words.append(f"--ServerApp.port={args.port}")
    if args.no_browser or not _has_browser():
        words.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-root")  # in a container everybody is root
    print("The course opens in your browser, or at the address below; Ctrl-C ends it.", flush=True)
    LabApp.launch_instance(words)


# What they share


def _schedule(args: argparse.Namespace) -> ps.Schedule:
    """The schedule that the words on the command line ask for."""
    if args.p * args.m * args.batches * (args.v or 1) > MOST:
        raise ValueError(f"p * m * batches * v may be at most {MOST:,}")
    schedule = ps.build(args.name, args.p, args.m, args.batches, args.v)
    return with_weights(schedule, args.weights)


def _predict(args: argparse.Namespace) -> ps.Trace:
    schedule = _schedule(args)
    chunk = (args.forward / schedule.v, args.backward / schedule.v)
    return ps.simulate(schedule, ps.Cost(*chunk, comm=args.comm))


def _measured_cost(schedule: ps.Schedule, trace: ps.Trace) -> ps.Cost:
    """The mean time of every kind of action on each stage, in seconds."""

    def means(kind: str) -> list[float]:
        spans = [
            [s.seconds for s in trace.spans if s.action[:2] == (kind, stage)]
            for stage in range(schedule.stages)
        ]
        return [sum(times) / len(times) if times else 0.0 for times in spans]

    return ps.Cost(means("F"), means("B"), means("I"), means("W"))


def _as_json(trace: ps.Trace) -> dict[str, object]:
    return {"schedule": trace.name, "p": trace.p, "m": trace.m, "v": trace.v, **trace.metrics()}


def _print_table(traces: Sequence[ps.Trace]) -> None:
    """One line per metric, one column per trace."""
    rows = [["", *(trace.label for trace in traces), ""]] if len(traces) > 1 else []
    for key, name, unit in METRICS:
        rows.append([name, *(_cell(trace.metrics()[key]) for trace in traces), unit])
    print(columns(rows))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"{item:g}" for item in value)
    return f"{value:.4g}"


def _find_course() -> Path:
    """The course's folder: in the working directory, or in the repository that holds this file."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / "course").is_dir():
            return folder / "course"
    raise ValueError("there is no course/ folder here: start this in the folder of the repository")


def _has_browser() -> bool:
    """False on a Linux machine without a screen, where only a text browser could open."""
    if sys.platform.startswith(("win", "darwin")):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# The words


class _Parser(argparse.ArgumentParser):
    """argparse, but what is wrong is said in one sentence, by `main`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _join_negative_pace(words: list[str]) -> list[str]:
    """argparse takes the -1,2 of ``--pace -1,2`` for an option; joined, it is a wrong pace."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--pace" and re.match(r"-[\d.]", word):
            joined[-1] = f"--pace={word}"
        else:
            joined.append(word)
    return joined


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text!r}")
    return number


def _pace(text: str) -> tuple[float, float]:
    try:
        forward, backward = map(_seconds, text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            "must be the seconds of a forward and of a backward, each 0 or more, such as "
            f"0.005,0.010, not {text!r}"
        ) from None
    return forward, backward


def _port(text: str) -> int:
    number = _whole(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be between 1 and 65535, not {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pipeschool", description="Pipeline-parallel training, step by step.")
    parser.add_argument("-V", "--version", action="version", version=ps.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    pipeline = _Parser(add_help=False)
    pipeline.add_argument("name", metavar="NAME", help="see `pipeschool schedules`")
    pipeline.add_argument("-p", type=_positive, default=4, help="workers (default: 4)")
    pipeline.add_argument(
        "-m", type=_positive, default=8, help="microbatches in one batch (default: 8)"
    )
    pipeline.add_argument(
        "-v", type=_positive, help="chunks per worker (default: the schedule's own number)"
    )
    pipeline.add_argument("--batches", type=_positive, default=1, help="batches (default: 1)")
    pipeline.add_argument(
        "--weights", metavar="POLICY", help="weight versions of an asynchronous schedule"
    )
    costs = _Parser(add_help=False)
    for name, value in (("forward", 1.0), ("backward", 2.0), ("comm", 0.0)):
        costs.add_argument(
            f"--{name}",
            type=_seconds,
            default=value,
            metavar="SECONDS",
            help=f"time of a {name} of one microbatch on one worker (default: {value:g})"
            if name != "comm"
            else "time of a message between two workers (default: 0)",
        )

    def command(name: str, function: object, about: str, *parents: _Parser) -> _Parser:
        new: _Parser = commands.add_parser(
            name, help=about, description=about, parents=parents, allow_abbrev=False
        )
        new.set_defaults(command=function)
        return new

    lab = command("lab", _lab, "open the course in JupyterLab")
    lab.add_argument("--port", type=_port, help="where to serve it (default: the first free one)")
    lab.add_argument("--no-browser", action="store_true", help="print the address, open nothing")

    command("schedules", _schedules, "list the schedules there are")

    show = command("show", _show, "draw a chart in the terminal", pipeline, costs)
    show.add_argument("--png", metavar="FILE", help="also draw it into this file")
    show.add_argument("--csv", metavar="FILE", help="also write PyTorch's schedule CSV")

    simulate = command("simulate", _simulate, "tell how long, how idle, how full", pipeline, costs)
    simulate.add_argument("--json", action="store_true", help="one JSON object")

    run = command("run", _run, "run on real worker processes", pipeline)
    run.add_argument(
        "--pace", type=_pace, metavar="F,B", help="declared seconds of a worker's whole share"
    )
    run.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    run.add_argument(
        "--engine", default="pipeschool", help="pipeschool, or torch for PyTorch's own"
    )
    run.add_argument(
        "--layers", type=_positive, help="layers of the model (default: p * v, at least 8)"
    )
    run.add_argument("--hidden", type=_positive, default=32, help="width of a layer (default: 32)")
    run.add_argument("--batch-size", type=_positive, help="samples in a batch (default: 4m)")
    run.add_argument("--png", metavar="FILE", help="draw prediction and measurement")
    run.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto")
    run.add_argument("--json", action="store_true", help="one JSON object")

    bench = command("bench", _bench, "compare with PyTorch's own engine; takes minutes")
    bench.add_argument("-p", type=_positive, default=4, help="workers (default: 4)")
    bench.add_argument("-m", type=_positive, default=16, help="microbatches (default: 16)")
    bench.add_argument("--rounds", type=_positive, default=5, help="for a median (default: 5)")
    bench.add_argument("--json", action="store_true", help="one JSON object, all rounds")
    bench.add_argument("--png", metavar="FILE", help="also draw it into this file")
    bench.add_argument("--out", metavar="FILE", help="also write a report in Markdown")

    check = command("check", _check, "tell whether a schedule CSV is legal")
    check.add_argument("file", metavar="FILE.csv")
    check.add_argument("-p", type=_positive, help="stages it must have")
    check.add_argument("-m", type=_positive, help="microbatches it must have")
    check.add_argument(
        "--matching",
        choices=MATCHING,
        default="in_order",
        help="how receives find their sends (default: in_order); with rendezvous a send waits for "
        "its receiver, as NCCL's do, and messages that the file does not have are fused",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
