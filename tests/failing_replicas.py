"""`cbatch run` with engines that fail when told to: `python -m tests.failing_replicas run ...`.

The model is exact and costs nothing. The process of each engine imports this module, too, and writes which rows it runs
to a file `engine-PID`. The environment says what goes wrong: with CBATCH_TEST_BOOT a process ends before it has an
engine; CBATCH_TEST_DEADLY lists rows that kill the process which runs them; CBATCH_TEST_STEP is the seconds of a step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

if __name__ == "__mp_main__" and "CBATCH_TEST_BOOT" in os.environ:
    os._exit(9)

from cbatch.cli import main
from cbatch.engine.engine import Engine
from cbatch.engine.scheduler import Schedule
from tests.chain_engine import replace_models

DEADLY = {int(row) for row in os.environ.get("CBATCH_TEST_DEADLY", "").split(",") if row}
STEP = float(os.environ.get("CBATCH_TEST_STEP", "0"))


class WatchedEngine(Engine):
    def _launch(self, schedule: Schedule) -> None:
        rows = [seq.request.row.index for seq in schedule.sampled if not seq.num_completion_tokens]
        with Path(f"engine-{os.getpid()}").open("a") as file:
            file.writelines(f"{row}\n" for row in rows)
        if DEADLY.intersection(rows):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP)
        super()._launch(schedule)


replace_models(num_blocks=128, max_num_seqs=16, engine=WatchedEngine, order="auto")

if __name__ == "__main__":
    main()
