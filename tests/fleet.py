"""A job with engines whose model is exact, costs nothing and fails when told to: `python -m tests.fleet run ...`.

The process of each engine runs this module, too. It writes which rows it runs to a file `engine-PID`. The environment
says what goes wrong: CBATCH_TEST_BOOT ends a process before it has an engine; CBATCH_TEST_DEADLY are rows that kill the
process which runs them, CBATCH_TEST_STEP the seconds of a step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

if __name__ == "__mp_main__" and "CBATCH_TEST_BOOT" in os.environ:
    os._exit(9)

from cbatch.cli import main
from cbatch.model.batch import Batch
from tests.chain import ChainRunner
from tests.chain_engine import replace_models

DEADLY = {int(row) for row in os.environ.get("CBATCH_TEST_DEADLY", "").split(",") if row}
STEP = float(os.environ.get("CBATCH_TEST_STEP", "0"))


class Runner(ChainRunner):
    def launch(self, batch: Batch) -> Any:
        rows = [seq.request.row.index for seq in batch.sampled if not seq.num_completion_tokens]  # type: ignore[attr-defined]
        with Path(f"engine-{os.getpid()}").open("a") as file:
            file.writelines(f"{row}\n" for row in rows)
        if DEADLY.intersection(rows):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP)
        return super().launch(batch)


replace_models(num_blocks=128, max_num_seqs=16, runner=Runner, order="auto")

if __name__ == "__main__":
    main()
