"""The process of an agent that is a function: `python -m rollouts.environments.agent_child NAME` calls it
with the row of ROLLOUTS_ROW; without one it is only loaded.
"""

import json
import os
import sys
from pathlib import Path

from rollouts.config.plugins import load_function

if __name__ == "__main__":
    function = load_function(sys.argv[1], role="agent")
    if path := os.environ.get("ROLLOUTS_ROW"):
        function(json.loads(Path(path).read_text("utf-8")))
