"""What stands in for the process of a run: writes, fails, dies or hangs as its run's variant says, without torch.

Called as the runner calls a run: `stand_in_child.py -m scalla.benchmark.run_one TASK.json`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

task = json.loads(Path(sys.argv[-1]).read_text())
run, out = task["run"], Path(task["out"])
done, failed = map(Path, json.loads((out / "paths.json").read_text())[f"{run['variant']} {run['seed']}"])
(out / "began").mkdir(exist_ok=True)
(out / "began" / f"{run['variant']} {run['seed']} {os.getpid()}").write_text(os.environ["OMP_NUM_THREADS"])
print("a line of the log from /somewhere/on/this/machine/data.gz", flush=True)
match run["variant"]:
    case "works":
        done.parent.mkdir(exist_ok=True)
        done.write_text(json.dumps({"schema": 1, "run": run, "status": "done"}))
    case "fails":
        error = {"type": "InputError", "message": "a matrix was not positive definite", "traceback": []}
        failed.parent.mkdir(exist_ok=True)
        failed.write_text(json.dumps({"schema": 1, "run": run, "status": "failed", "error": error}))
        sys.exit(1)
    case "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    case "crashes before it can say why":
        sys.exit(1)
    case "hangs":
        time.sleep(60)
