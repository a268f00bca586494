"""A sample of every family on real workers: gradients bit-equal in float64 to one process."""

from __future__ import annotations

import pipeschool as ps
import pytest
from pipeschool.runtime import reference
from test_run import batch, linear_stages, sgd

SAMPLES = [
    ("eager_1f1b", 4, 9, None),
    ("interleaved_1f1b", 3, 6, 2),
    ("interleaved_1f1b", 2, 5, 4),  # m is no multiple of p
    ("looped_bfs", 3, 4, 2),
    ("zb_h1", 4, 8, None),
    ("zb_h1", 4, 2, None),
    ("zb_h2", 3, 7, None),
    ("zb_v", 3, 7, None),
    ("zb_v", 4, 3, None),
    ("dualpipe_v", 3, 8, None),
    ("chimera", 4, 8, None),
    ("chimera", 2, 4, None),
]


@pytest.mark.parametrize(("name", "p", "m", "v"), SAMPLES)
def test_gradients_equal_one_process(name, p, m, v):
    schedule = ps.build(name, p, m, v=v)
    stages = linear_stages(schedule.stages)
    data = [batch(2 * m + 1), batch(2 * m + 1, seed=1)]
    result = ps.run(schedule, stages, data, optimizer=sgd)
    expected = reference.gradients(
        stages, data, m, optimizer=sgd, replicas=[len(workers) for workers in schedule.owners]
    )
    assert reference.max_error(result.gradients, expected) == 0.0
    assert len(result.losses) == 2 * m
    predicted = ps.simulate(schedule.repeat(2))
    assert result.trace.peak_activations == predicted.peak_activations
