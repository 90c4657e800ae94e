"""Print the reward: 1 if the requested file has the right content, else 0."""

import json
import os
from pathlib import Path

row = json.loads(Path(os.environ["ASYNCRL_PROMPT_FILE"]).read_text())
file = Path(row["file"])
print(float(file.is_file() and file.read_text(errors="replace").strip() == row["content"]))
