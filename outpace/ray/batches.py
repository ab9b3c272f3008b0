"""`outpace batch --ray`: the lines of a batch are answered on a cluster; results are written here, as they come."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import ray

from outpace.batch.job import Job
from outpace.batch.lines import BadLine, refused
from outpace.errors import OutpaceError
from outpace.ray.predictor import Predictor

_BLOCK_LINES = 64  # lines that an engine gets at once; several times what it runs at once, so that it is never idle
_MOST_LINES = 1 << 16  # lines that are sent to the cluster together: engines are started anew for each such part


def run_on_cluster(
    job: Job,
    options: dict[str, Any],
    *,
    num_engines: int,
    num_cpus: float,
    num_gpus: float,
    address: str | None,
    show: Callable[[], None],
) -> None:
    """Answer all pending lines with `num_engines` engines. `options` are the arguments of `Predictor`."""
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OutpaceError(
            f"cannot use the Ray cluster: {' '.join(str(error).split())}; check --ray-address"
        ) from error
    ray.data.DataContext.get_current().enable_progress_bars = False

    def answer(rows: list[dict[str, str]]) -> None:
        answered = ray.data.from_items(rows).map_batches(
            Predictor,
            fn_constructor_kwargs=options,
            batch_size=_BLOCK_LINES,
            concurrency=num_engines,
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
        )
        for row in answered.iter_rows():
            job.write(json.loads(row["result"]))
            show()

    try:
        rows = list[dict[str, str]]()
        for line, request in job.pending():
            if isinstance(request, BadLine):
                job.write(refused(line, request))
                show()
                continue
            rows.append({"id": line.id, "text": line.content.decode()})
            if len(rows) == _MOST_LINES:
                answer(rows)
                rows = []
        if rows:
            answer(rows)
    except KeyboardInterrupt:
        job.tally.is_interrupted = True
    except ray.exceptions.RayError as error:
        raise OutpaceError(f"the Ray cluster failed: {' '.join(str(error).split())}") from error
    finally:
        ray.shutdown()
