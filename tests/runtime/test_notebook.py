"""Runs from notebook cells: code from cells, the stop button, and clean runs afterwards."""

from __future__ import annotations

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.xdist_group("notebook")  # they share a kernel

CELLS = """
import time, torch, pipeschool as ps
x = torch.ones(4, 3)
class Tea(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)
class Sleepy(Tea):
    def forward(self, x):
        print("asleep")
        time.sleep(1000)
class Broken(Tea):
    def forward(self, x):
        return super().forward(x) + sugar
def stages(kind):
    return [Tea(3, 3), kind(3, 3)]
"""


class Notebook:
    """A live kernel that runs cells and returns what they show: [(kind, text)]."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def cell(self, code, stop_at=None):
        """Run `code`; press stop as soon as a worker prints `stop_at`."""
        request = self.client.execute(code)
        shown = []
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append((content["name"], content["text"]))
                if stop_at and stop_at in content["text"]:
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                shown.append(("error", "\n".join(content["traceback"])))
            elif content.get("execution_state") == "idle":
                return shown


@pytest.fixture(scope="module")
def notebook():
    book = Notebook()
    yield book
    book.client.stop_channels()
    book.manager.shutdown_kernel(now=True)


@pytest.fixture(autouse=True)
def ready(notebook):
    assert notebook.cell(CELLS) == []


RUN = "print(len(ps.run(ps.gpipe(p=2, m=2), stages(Tea), [(x, x)]).losses))"


def test_code_from_cells_runs_on_workers(notebook):
    assert notebook.cell(RUN) == [("stdout", "2\n")]


def test_an_error_points_to_the_line_of_the_cell_and_shows_no_library_frames(notebook):
    shown = notebook.cell("ps.run(ps.gpipe(p=2, m=2), stages(Broken), [(x, x)])")
    ((kind, text),) = shown
    assert kind == "error"
    assert "worker 1 failed at 1F0" in text
    assert "in forward: return super().forward(x) + sugar" in text
    assert "launch.py" not in text


def test_the_stop_button_ends_all_workers_and_the_next_run_is_right(notebook):
    code = "ps.run(ps.gpipe(p=2, m=2), stages(Sleepy), [(x, x)], timeout=500)"
    shown = notebook.cell(code, stop_at="asleep")
    assert shown[-1][0] == "error"
    assert "stopped: all workers have been ended" in shown[-1][1]
    assert "worker 1 was at 1F0" in shown[-1][1]
    kernel = psutil.Process(notebook.manager.provisioner.process.pid)
    left = [c for c in kernel.children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]
    keepers = [c for c in left if "multiprocessing." in " ".join(c.cmdline())]
    assert len(left) == len(keepers) == 2  # fork server and resource tracker
    assert notebook.cell(RUN) == [("stdout", "2\n")]
